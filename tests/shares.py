"""Shares of long lists of trials: each runs in a forked process and becomes a line of a log."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Line = dict[str, Any]


@dataclass(frozen=True)
class Share:
    """Some trials of a matrix; `work` runs them in a separate folder and returns the result."""

    matrix: str
    number: int
    shares: int
    work: Callable[[Path], Line]


class _Process:
    """Running share."""

    def __init__(self, share: Share, parent: Path) -> None:
        self._share, self._began, self._ended = share, time.monotonic(), False
        self._folder = parent / f"{share.matrix}-{share.number}".replace(" ", "-")
        self._folder.mkdir()
        self._output = self._folder.with_suffix(".json")
        self._process = os.fork()
        if self._process == 0:
            os.setsid()
            try:
                result = share.work(self._folder)
            except BaseException:
                result = {"wrong": [f"the share ended with {traceback.format_exc()[-2000:]}"]}
            whole = self._output.with_suffix(".part")
            whole.write_text(json.dumps(result))
            whole.rename(self._output)
            os._exit(0)

    def line(self) -> Line | None:
        """Return the result of the share; None while it runs."""
        if os.waitpid(self._process, os.WNOHANG)[0] == 0:
            return None
        self._ended = True
        taken = round(time.monotonic() - self._began, 1)
        place = {"matrix": self._share.matrix, "share": self._share.number, "shares": self._share.shares}
        killed = {"wrong": ["the share was killed before it ended"]}
        result: Line = json.loads(self._output.read_text()) if self._output.exists() else killed
        shutil.rmtree(self._folder, ignore_errors=True)
        return place | {"seconds": taken} | result

    def stop(self) -> None:
        """End the share and all its processes."""
        if not self._ended:
            os.killpg(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)


def options(description: str | None) -> argparse.Namespace:
    """Parse the common options of programs with shares."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after this many seconds")
    parser.add_argument("--log", type=Path, required=True, help="file of JSON lines to extend and continue")
    return parser.parse_args()


def work_off(shares: Sequence[Share], parent: Path, chosen: argparse.Namespace) -> list[Line]:
    """Run the shares missing in the log in a random order, as time permits; return every line of the log."""
    lines = [json.loads(text) for text in chosen.log.read_text().splitlines()] if chosen.log.exists() else []
    done = {(line["matrix"], line["share"]) for line in lines}
    waiting = [share for share in shares if (share.matrix, share.number) not in done]
    random.Random(1).shuffle(waiting)
    running: list[_Process] = []
    began = time.monotonic()
    try:
        while (waiting or running) and not (chosen.seconds and time.monotonic() - began > chosen.seconds):
            while waiting and len(running) < chosen.jobs:
                running.append(_Process(waiting.pop(0), parent))
            time.sleep(0.05)
            for process in list(running):
                line = process.line()
                if line is not None:
                    running.remove(process)
                    lines.append(line)
                    with chosen.log.open("a") as stream:
                        stream.write(json.dumps(line) + "\n")
    finally:
        for process in running:
            process.stop()
    return lines


def cut(trials: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Return consecutive trials, `size` at a time."""
    return [trials[begin : begin + size] for begin in range(0, len(trials), size)]
