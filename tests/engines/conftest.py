"""Fixture for suites that compare engines with the plain loop."""

from __future__ import annotations

import pytest
import torch

from sifu.engines.sim.plain_loop import LoopTrainer


@pytest.fixture(autouse=True)
def _forks_nothing_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train in this process if torch sees a GPU, because copies of the process cannot compute gradients."""
    if torch.cuda.is_available():
        monkeypatch.setattr(LoopTrainer, "forks", False)
