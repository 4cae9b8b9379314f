"""Tests that need Flower (the extra `flower`); without it they are skipped."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("flwr") is None:
    collect_ignore_glob = ["test_*.py", "memory_grid.py", "flower_federation.py"]
