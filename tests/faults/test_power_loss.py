"""Power losses at any call of commands that write: the same command finishes the work, and nothing acknowledged is
lost.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from run_tools import environment, small_spec

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="the log needs a C compiler"),
]
HERE = Path(__file__).parent
SPEC = small_spec(keep={"models": 4}, stop={"target": 0.0, "max_rounds": 2})
FIRST = [
    ["init", "spec.toml"],
    ["--witness", "witness.jsonl", "train", "small.toml", "--run", "run"],
    ["request", "run", "--clients", "client-000", "--id", "a"],
    ["requests", "decide", "run", "a", "verified"],
    ["forget", "run", "--request", "a"],
]
THEN = [
    ["forget", "run", "--clients", "client-001", "--request", "b", "--retention", "strict", "--method", "scratch"],
    ["purge", "run"],
    ["export", "run", "--model", "model.safetensors"],
    ["report", "run"],
    ["key", "rotate", "run"],
    ["backup", "run", "backup.zip"],
    ["restore", "backup.zip", "again"],
    ["token", "create", ".", "--name", "ann", "--role", "auditor"],
    ["token", "revoke", ".", "ann"],
]


def lose_power(folder: Path, commands: list[list[str]], losses: int, **more: Any) -> dict[str, Any]:
    """Compile the call log, run the program, and return its result."""
    shim = folder / "io_log.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", shim, HERE / "io_log.c", "-ldl"], check=True)
    job = {"spec": SPEC, "commands": commands, "losses": losses, "seed": 1} | more
    ended = subprocess.run(
        [sys.executable, str(HERE / "power_loss.py"), str(folder), json.dumps(job)],
        env=environment(LD_PRELOAD=str(shim)),
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    result: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("losses", [1, pytest.param(40, marks=pytest.mark.slow)])
def test_no_power_loss_costs_anything(tmp_path: Path, losses: int) -> None:
    result = lose_power(tmp_path, FIRST + THEN, losses)
    assert result["wrong"] == []
    assert len(result["lost"]) == len(FIRST + THEN)
    assert all(count > losses for count, _ in result["lost"].values())


def test_a_folder_that_is_not_synced_loses_what_was_acknowledged(tmp_path: Path) -> None:
    """Negative control: without a sync of the folder, acknowledged work is lost."""
    (wrong,) = lose_power(tmp_path, FIRST[1:2], 0, folders_unsynced=True)["wrong"]
    assert "run is lost" in wrong
