"""SIFU: go back to the latest model at which the clients' Psi is small enough for the noise, and add it."""

from __future__ import annotations

import math

import numpy as np

from sifu.theory.automatic_noise import expected_rounds, noise_to_signal, rounded_up_sigma
from sifu_paper.budgets import least_noise, release
from sifu_paper.running import State


def sifu(state: State, most: int) -> int:
    """Go back to the latest kept model that every budget allows with this sigma (eq. 18 of the paper)."""
    needed = {depth: least_noise(state, depth) for depth in state.history.candidates()}
    sigma = chosen_sigma(state, needed) if state.sigma is None else state.sigma
    depth = max(depth for depth, least in needed.items() if least <= sigma)  # nothing needs noise at depth 0
    release(state, depth, sigma)
    return 0


def chosen_sigma(state: State, needed: dict[int, float]) -> float:
    """Return the least noise of the model from which a request should take the fewest rounds, by sifu's own rule.

    Noise undoes rounds in the ratio of its norm to the distance that the model has moved (docs/theory.md, section 13).
    """
    history = state.history

    def expected(depth: int) -> float:
        energy = sum(sigma**2 for here, sigma in history.noises if here <= depth)
        moved = float(np.linalg.norm(history.model_at(depth).astype(np.float64) - history.kept[0]))
        sigma = rounded_up_sigma(needed[depth])
        ratio = noise_to_signal(sigma, moved, history.model.size, energy)
        done = history.rounds_until(depth)
        return expected_rounds(
            state.training_rounds, history.rounds_until(history.depth) - done, done, ratio, state.errors
        )

    usable = [depth for depth, sigma in needed.items() if math.isfinite(sigma)]
    best = min(usable, key=lambda depth: (expected(depth), needed[depth], -depth))
    return rounded_up_sigma(needed[best])
