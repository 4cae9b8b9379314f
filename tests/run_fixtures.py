"""Runs that several suites share: each is built once per session, and tests get copies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from run_tools import Command, build_run_with_requests, called_in_process, copy_run, small_spec


@pytest.fixture
def heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a test its own memory of heads, and return the file."""
    path = tmp_path / "memory" / "heads"
    monkeypatch.setenv("SIFU_HEADS", str(path))
    return path


@pytest.fixture(scope="session")
def run_with_requests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with requests of several kinds (rollback, scratch, strict, waiting); tests only read it."""
    folder = tmp_path_factory.mktemp("runs") / "with-requests"
    build_run_with_requests(folder)
    return folder


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a trained run without requests; tests only read it."""
    import sifu

    folder = tmp_path_factory.mktemp("runs") / "trained"
    sifu.train(small_spec(), run=folder)
    return folder


@pytest.fixture
def own_run(run_with_requests: Path, tmp_path: Path) -> Path:
    """Return a copy of `run_with_requests` that a test may change."""
    return copy_run(run_with_requests, tmp_path / "own-run")


@pytest.fixture
def own_trained(trained_run: Path, tmp_path: Path) -> Path:
    """Return a copy of `trained_run` that a test may change."""
    return copy_run(trained_run, tmp_path / "own-trained")


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
