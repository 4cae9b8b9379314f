"""The whole crash matrix in several processes: python tests/faults/whole_matrix.py --jobs 4 --log FILE.jsonl

Every fault at every point of the four jobs of `test_crash_matrix.py`, in shares of faults that follow each other. Each
share is a line of the log as soon as it ends, and the next call makes those that are missing. Prints what they say
together; exit code 3 if a fault lost something. The runs are made in the folder for temporary files (`TMPDIR`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from faulty_runs import Matrix
from test_crash_matrix import CLOSED_FORM, GROUPS, JOB, OUTSIDE

FAULTS = 48
"""Faults of a share: they take half a minute or less."""
JOBS = {"sifu": JOB, "closed form": JOB | CLOSED_FORM, "groups": JOB | GROUPS}
if shutil.which("openssl"):
    JOBS["witness, timestamps, backup"] = JOB | OUTSIDE


class Share:
    """One share of one matrix, in a process forked from this one."""

    def __init__(self, name: str, matrix: Matrix, share: int) -> None:
        self._line = {"matrix": name, "share": share, "shares": shares(matrix)}
        self._began = time.monotonic()
        self._folder = matrix.base
        self._output = matrix.base / f"share-{share}.json"
        self._process = os.fork()
        if self._process == 0:
            os.setsid()
            try:
                result = matrix.attempt_all(matrix.faults[share * FAULTS :][:FAULTS])
            except BaseException:
                result = {"points": 0, "faults": {}, "states": 0, "wrong": [traceback.format_exc()[-2000:]]}
            self._output.write_text(json.dumps(result))
            os._exit(0)

    def line(self) -> dict[str, Any] | None:
        """What came of it; None while it runs."""
        if os.waitpid(self._process, os.WNOHANG)[0] == 0:
            return None
        result = json.loads(self._output.read_text())
        return self._line | {"seconds": round(time.monotonic() - self._began, 1)} | result

    def stop(self) -> None:
        """End it and everything it started."""
        os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)


def shares(matrix: Matrix) -> int:
    """How many shares a matrix has."""
    return -(-len(matrix.faults) // FAULTS)


def main() -> int:
    """Make what is missing, and say what all of it says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="so many processes")
    parser.add_argument("--seconds", type=float, default=0.0, help="end after so many seconds")
    parser.add_argument("--log", type=Path, required=True, help="a file of JSON lines to add to, and to go on from")
    options = parser.parse_args()
    lines = [json.loads(text) for text in options.log.read_text().splitlines()] if options.log.exists() else []
    done = {(line["matrix"], line["share"]) for line in lines}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sifu-faults-") as parent:
        matrices = {}
        for number, (name, job) in enumerate(JOBS.items()):
            (Path(parent) / str(number)).mkdir()
            matrices[name] = Matrix(Path(parent) / str(number), job)
            lines += [{"matrix": name, "wrong": matrices[name].wrong}] if matrices[name].wrong else []
        wanted = [(name, share) for name, matrix in matrices.items() for share in range(shares(matrix))]
        waiting = [place for place in wanted if place not in done]
        running: list[Share] = []
        try:
            while (waiting or running) and not (options.seconds and time.monotonic() - began > options.seconds):
                while waiting and len(running) < options.jobs:
                    name, share = waiting.pop(0)
                    running.append(Share(name, matrices[name], share))
                time.sleep(0.05)
                for process in list(running):
                    line = process.line()
                    if line is not None:
                        running.remove(process)
                        lines.append(line)
                        with options.log.open("a") as stream:
                            stream.write(json.dumps(line) + "\n")
        finally:
            for process in running:
                process.stop()
        for name, matrix in matrices.items():
            own = [line for line in lines if line["matrix"] == name and "share" in line]
            faults = sum((Counter(line["faults"]) for line in own), Counter())
            print(
                f"{name}: {len(own)} of {shares(matrix)} shares, {sum(map(len, matrix.points))} points, "
                f"{faults.total()} faults {dict(faults)}, {sum(line['states'] for line in own)} states gone on from, "
                f"{sum(len(line['wrong']) for line in own)} wrong"
            )
    problems = [problem for line in lines for problem in line["wrong"]]
    print("\n".join(problems[:20]))
    return 3 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
