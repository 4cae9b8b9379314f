"""Fixtures that make data tests independent of this machine."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _no_data_of_this_machine(tmp_path_factory, monkeypatch):
    """Keep SIFU_DATA and the real home directory from influencing a test."""
    monkeypatch.delenv("SIFU_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240501)
