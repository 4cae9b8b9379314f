"""Finished runs, the command line and the memory of heads for every suite, and the hooks around a test run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import runs
from run_tools import Command, called_in_process


def pytest_configure() -> None:
    """Begin the folder of finished runs; workers use that of the process that starts them."""
    if runs.PLACE not in os.environ:
        runs.begin()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if a test changed a finished run; with workers, once they have all ended."""
    changed = [] if hasattr(session.config, "workerinput") else runs.changed()
    if changed:
        print(f"\nFAILED: tests changed the finished runs {', '.join(changed)}: let them use runs.own")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a test its own memory of heads, and return the file."""
    path = tmp_path / "memory" / "heads"
    monkeypatch.setenv("SIFU_HEADS", str(path))
    return path


@pytest.fixture(scope="session")
def run_with_requests() -> Path:
    """Return a run with requests of several kinds (rollback, scratch, strict, waiting); tests only read it."""
    return runs.run("requests")


@pytest.fixture(scope="session")
def trained_run() -> Path:
    """Return a trained run without requests; tests only read it."""
    return runs.run("trained")


@pytest.fixture(scope="session")
def approved_run() -> Path:
    """Return a run whose requests need two approvals; tests only read it."""
    return runs.run("approving")


@pytest.fixture
def own_run(tmp_path: Path) -> Path:
    """Return a copy of `run_with_requests` that a test may change."""
    return runs.own("requests", tmp_path)


@pytest.fixture
def own_trained(tmp_path: Path) -> Path:
    """Return a copy of `trained_run` that a test may change."""
    return runs.own("trained", tmp_path)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that calls `sifu ARGUMENTS` in this process and returns exit code and output."""
    from sifu.cli.main import main

    # Options set these variables for the whole process.
    for variable in ("SIFU_WITNESS", "SIFU_NEW_RUN", "SIFU_ALLOW_CODE"):
        monkeypatch.setenv(variable, os.environ.get(variable, ""))
        if not os.environ[variable]:
            monkeypatch.delenv(variable)

    return called_in_process(main, "sifu", monkeypatch, capsys)
