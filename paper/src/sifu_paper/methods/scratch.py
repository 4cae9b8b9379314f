"""Scratch: train again from a fresh model, without the clients."""

from __future__ import annotations

from sifu_paper.running import State


def scratch(state: State, most: int) -> int:
    """Start from a fresh initial model."""
    state.fresh()
    return 0
