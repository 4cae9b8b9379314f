"""Random kills, failing calls and power losses in every command that writes: a sample of `random_faults.py`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from random_faults import INTERRUPTED, SCENARIOS

from run_tools import built_command, environment
from sifu.cli.main import app

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="the log needs a C compiler"),
]
READ_ONLY = {
    "audit", "clients list", "plan", "requests", "status", "token list", "verify",
}  # fmt: skip
"""Commands that write nothing, or only the file named in their arguments."""
ELSEWHERE = {
    "clients sign": "writes one file, on a client's machine",
    "demo": "train, forget and verify in a new folder",
    "flower": "writes a new folder from templates",
    "serve": "starts the commands above as jobs",
}


def faults(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run the program; return the lines of its log."""
    log = folder / "log.jsonl"
    program = [sys.executable, str(Path(__file__).with_name("random_faults.py")), "--log", str(log), *arguments]
    ended = subprocess.run(program, env=environment(), capture_output=True, text=True, timeout=3000)
    assert ended.returncode in (0, 3), ended.stderr[-4000:]
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize("each", [1, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scenario", ["groups", "noise", "table"])
def test_nothing_is_lost_and_the_same_command_finishes(scenario: str, each: int, tmp_path: Path) -> None:
    (line,) = faults(tmp_path, "--only", scenario, "--each", str(each), "--seed", "7")
    assert line["wrong"] == []
    assert line["tried"] == {"kill": each, "failing call": each, "power loss": each}


def test_a_command_that_syncs_nothing_is_caught(tmp_path: Path) -> None:
    """Negative control: without syncs, acknowledged work is lost with the power."""
    (line,) = faults(tmp_path, "--only", "table", "--each", "20", "--unsynced")
    assert any("power lost" in problem and "lost" in problem.partition(": ")[2] for problem in line["wrong"])


def test_every_command_that_writes_is_tried() -> None:
    def names(command: Any, words: str) -> Iterator[str]:
        if not hasattr(command, "commands"):
            yield words.strip()
        for name, below in getattr(command, "commands", {}).items():
            yield from names(below, f"{words} {name}")

    tried = {words.removeprefix(f"{INTERRUPTED} ") for commands in SCENARIOS.values() for words in commands}
    everything = set(names(built_command(app), ""))
    begun = [f" {' '.join(words.split()[:3])} " for words in tried]
    missing = {name for name in everything if not any(f" {name} " in words for words in begun)}
    assert missing == READ_ONLY | ELSEWHERE.keys()
