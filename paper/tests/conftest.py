"""Fixtures of the experiments' tests: their command line, the registered baselines, and runs of the library's tests."""

from __future__ import annotations

import importlib.util

import pytest
from tests.conftest import cli, folders_of_keys, known_keys, own_trained, trained_run  # noqa: F401

import suite_setup  # noqa: F401  before anything of ours is imported
from run_tools import Command, called_in_process
from secret_draws import fixed_secrets, pytest_fixture_setup  # noqa: F401  for every test and shared fixture
from sifu_paper.baselines import register_all

register_all()  # works whether the package is installed or only on the path

if importlib.util.find_spec("flwr") is None:
    collect_ignore_glob = ["test_flower*.py"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that calls `sifu-bench ARGUMENTS` in this process and returns exit code and output."""
    from sifu_paper.command import main

    return called_in_process(main, "sifu-bench", monkeypatch, capsys)
