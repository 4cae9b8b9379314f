"""Runs that several suites look at: one is built a session, every test gets its own copy."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

if not Path("/dev/nvidia0").exists():
    # Without a GPU its kernels run in Triton's interpreter, which has to be said before anything imports triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # `make test &` of a script starts us with Ctrl-C ignored, and children inherit that; some tests press it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

import sys

import pytest
from hypothesis import HealthCheck, settings

from run_tools import Answer, Command, build_run_with_requests, copy_run, small_spec

# Property tests see the same examples on every run, with no deadline on a shared machine.
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=45,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")

MEMORY = Path("/dev/shm")
ROOM = 1 << 30
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= ROOM:
    # A run waits for the disk at every event, some fifty times a request; nothing here needs to outlive the machine.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


@pytest.fixture(scope="session")
def run_with_requests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only: a run with a request to the middle, scratch, joint, strict, and one that waits."""
    folder = tmp_path_factory.mktemp("runs") / "with-requests"
    build_run_with_requests(folder)
    return folder


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only: a run that was trained and asked nothing yet."""
    import sifu

    folder = tmp_path_factory.mktemp("runs") / "trained"
    sifu.train(small_spec(), run=folder)
    return folder


@pytest.fixture
def own_run(run_with_requests: Path, tmp_path: Path) -> Path:
    """A copy of `run_with_requests` that a test may change."""
    return copy_run(run_with_requests, tmp_path / "own-run")


@pytest.fixture
def own_trained(trained_run: Path, tmp_path: Path) -> Path:
    """A copy of `trained_run` that a test may change."""
    return copy_run(trained_run, tmp_path / "own-trained")


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`sifu ARGUMENTS` inside this process: its exit code and what it printed."""
    from sifu.cli.main import main

    for variable in ("SIFU_TIMESTAMP", "SIFU_WITNESS"):  # options set them for the rest of the process
        monkeypatch.setenv(variable, os.environ.get(variable, ""))
        if not os.environ[variable]:
            monkeypatch.delenv(variable)

    def call(*arguments: object) -> Answer:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["sifu", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        code = ended.value.code
        return Answer(code if isinstance(code, int) else 1, printed.out, printed.err)

    return call
