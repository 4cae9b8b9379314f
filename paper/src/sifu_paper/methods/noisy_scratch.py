"""Noisy Scratch: a fresh model plus the paper's noise.

It is a control: what SIFU gains over it comes from the history, and what it gains over Scratch from larger initial
weights.
"""

from __future__ import annotations

from sifu_paper.running import State


def noisy_scratch(state: State, most: int) -> int:
    """Start from a fresh initial model with noise."""
    state.fresh()
    sigma = state.settings.sigma if state.sigma is None else state.sigma
    state.history.add_noise(sigma, state.noise(), state.requests)
    return 0
