"""Runs whose groups tune a public network, trained once per session; tests that change a run get a copy."""

from __future__ import annotations

from pathlib import Path

import pytest

import sifu
from run_tools import copy_run
from tuned_runs import clients_of, spec_of, without


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with blocks, before any request; tests only read it."""
    folder = tmp_path_factory.mktemp("tuned") / "run"
    sifu.train(spec_of(), run=folder, clients=clients_of())
    return folder


@pytest.fixture
def own(trained: Path, tmp_path: Path) -> Path:
    return copy_run(trained, tmp_path / "own")


@pytest.fixture(scope="session")
def never(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of the same federation without client-003; tests only read it."""
    folder = tmp_path_factory.mktemp("tuned") / "never"
    sifu.train(spec_of(), run=folder, clients=without(clients_of(), ["client-003"]))
    return folder
