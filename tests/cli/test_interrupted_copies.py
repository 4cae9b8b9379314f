"""Signals to `sifu train` while a copy of the process computes features of a user's module: the command can go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from run_tools import environment
from sifu.api import verify_run
from sifu.store.reader import RunReader

pytestmark = pytest.mark.long

MODULE = """
import os, pathlib, time
import torch
from torch import nn

class Pausing(nn.Module):
    '''Network that waits, after twenty batches, as long as a file named pause exists.'''
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh())

    def forward(self, x):
        if float(x.max()) > 0.999 and pathlib.Path("pause").exists():
            pathlib.Path("waiting").write_text(str(os.getpid()))
            pathlib.Path("waiting").rename("waits")
            while pathlib.Path("pause").exists():
                time.sleep(0.01)
        return self.inner(x)

def make():
    return Pausing()
"""
SPEC = """
[data]
name = "digits"
clients = 6
samples_per_client = 8
preprocessing = "fixed"
[model]
kind = "ridge"
[features]
kind = "module"
module = "pausing:make"
"""


def train(folder: Path, name: str) -> subprocess.Popen[str]:
    """Start `sifu train` in a session of its own, as a terminal does."""
    return subprocess.Popen(
        [sys.executable, "-m", "sifu.cli.main", "--allow-code", "pausing:make", "train", "spec.toml", "--run", name],
        cwd=folder,
        env=environment(SIFU_KNOWN_KEYS=str(folder / "keys")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def head(folder: Path) -> np.ndarray:
    with RunReader(folder) as reader:
        return np.array(reader.load_model(reader.tip))


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(3000):
        if holds():
            return
        time.sleep(0.02)
    raise AssertionError("waited for a minute")


def has_ended(process: int) -> bool:
    """Return whether a process does not exist any more, or only until its parent asks for its result."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize(
    ("number", "to_all", "code"),
    [
        (signal.SIGINT, False, 130),
        (signal.SIGINT, True, 130),
        (signal.SIGTERM, False, None),
        (signal.SIGKILL, False, -signal.SIGKILL),
    ],
    ids=["Ctrl-C to the process", "Ctrl-C in a terminal", "terminated", "killed"],
)
def test_training_goes_on_after_a_signal(
    number: signal.Signals, to_all: bool, code: int | None, tmp_path: Path
) -> None:
    (tmp_path / "pausing.py").write_text(MODULE)
    (tmp_path / "spec.toml").write_text(SPEC)
    whole = train(tmp_path, "whole")
    assert whole.wait(timeout=120) == 0, whole.communicate()[1]
    (tmp_path / "pause").touch()
    process = train(tmp_path, "run")
    wait_until(lambda: (tmp_path / "waits").exists() or process.poll() is not None)
    copy = int((tmp_path / "waits").read_text())
    assert copy != process.pid, "the module computes in a copy"
    (os.killpg if to_all else os.kill)(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    assert process.returncode == code or (code is None and process.returncode != 0), err
    (tmp_path / "pause").unlink()
    wait_until(lambda: has_ended(copy))
    again = train(tmp_path, "run")
    assert again.wait(timeout=120) == 0, again.communicate()[1]
    assert verify_run(tmp_path / "run").problems == []
    assert np.array_equal(head(tmp_path / "run"), head(tmp_path / "whole"))
