"""Small runs for reports; each is trained once for all tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from report_runs import HOSTILE, MATHS, SMALL

import sifu


@pytest.fixture(scope="session")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a trained run without any forgotten client."""
    folder = tmp_path_factory.mktemp("runs") / "plain"
    sifu.train(SMALL, run=folder)
    return folder


@pytest.fixture(scope="session")
def busy_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with requests of several kinds: SIFU, strict, Scratch, waiting."""
    folder = tmp_path_factory.mktemp("runs") / "busy"
    run = sifu.train(SMALL, run=folder)
    run.forget(["client-000"], request="first", sigma=20.0)
    run.forget(["client-001", "client-002"], request="strict", sigma=0.5, retention="strict")
    run.forget(["client-003"], request="fresh", method="scratch")
    run.forget(["client-004"], request="fourth", sigma=5.0)
    run.request(["client-005"], request="later")
    return folder


@pytest.fixture(scope="session")
def hostile_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with client names that try to become markup, mathematics, or several lines."""
    generator = np.random.default_rng(1)
    names = [HOSTILE, MATHS, "two  lines", "x" * 200, "plain"]
    clients = {name: (generator.random((6, 3)), generator.integers(0, 2, 6)) for name in names}
    folder = tmp_path_factory.mktemp("runs") / "a & <b>"
    run = sifu.train(
        {"model": {"kind": "softmax"}, "local": {"rate": 0.2}, "stop": {"target": 0.0, "max_rounds": 4}},
        run=folder,
        clients=clients,
    )
    run.forget([HOSTILE], sigma=5.0)
    run.forget([MATHS, "two  lines", "x" * 200], sigma=5.0)
    return folder
