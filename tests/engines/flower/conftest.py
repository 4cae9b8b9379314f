"""Tests that need Flower (the extra `flower`); without it they are skipped."""

from __future__ import annotations

import importlib.util

import pytest

from sifu.engines.sim import embedded_heads

if importlib.util.find_spec("flwr") is None:
    collect_ignore_glob = ["test_*.py", "memory_grid.py", "flower_federation.py"]


@pytest.fixture
def in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make clients send statistics even where rows are smaller."""
    monkeypatch.setattr(embedded_heads, "rows_are_smaller", lambda fixed, samples: False)
