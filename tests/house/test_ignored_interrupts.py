"""Tests that press Ctrl-C also pass when the shell started them with interrupts ignored, as `make test &` does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from run_tools import environment

IGNORING = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable]
"""Command that starts Python with Ctrl-C ignored."""
WAITING = "import time; print('ready', flush=True); time.sleep(60)"


def press_ctrl_c() -> None:
    """Send an interrupt and wait, because the interpreter notices the signal a few steps later."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)


def test_ctrl_c_reaches_this_process() -> None:
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()


def test_ctrl_c_reaches_a_child() -> None:
    child = subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in child.communicate(timeout=60)[1]
    finally:
        child.kill()
        child.communicate()


def test_a_shell_can_ignore_it_for_a_child() -> None:
    """Negative control: a child started by `IGNORING` does ignore Ctrl-C."""
    code = "import signal, sys; sys.exit(signal.getsignal(signal.SIGINT) != signal.SIG_IGN)"
    assert subprocess.run([*IGNORING, "-c", code], check=False).returncode == 0


def test_the_suite_started_with_interrupts_ignored() -> None:
    """The tests above, and one that presses Ctrl-C in a commit, pass in a suite started with interrupts ignored."""
    tests = Path(__file__).resolve().parents[1]
    chosen = [
        f"{__file__}::test_ctrl_c_reaches_this_process",
        f"{__file__}::test_ctrl_c_reaches_a_child",
        f"{tests / 'store' / 'test_interrupts.py'}::test_an_interrupt_waits_for_the_end_of_a_commit",
    ]
    answer = subprocess.run(
        [*IGNORING, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *chosen],
        env=environment(),
        cwd=tests.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
