"""Bounds on the rounding error of added noise, for clients that ask later."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from sifu.core.round import noise_rounding
from sifu.theory.facts import ROUNDING_HOLDS_UP_TO
from sifu.theory.history import ActivePath, PathNode
from sifu.theory.tracking import SensitivityTracker


def exact_distance(vector: np.ndarray, other: np.ndarray) -> Fraction:
    """Return the squared distance of two vectors of floats without rounding."""
    return sum(
        ((Fraction(a) - Fraction(b)) ** 2 for a, b in zip(vector.tolist(), other.tolist(), strict=True)), Fraction()
    )


def test_the_same_noise_separates_two_runs_by_no_more_than_the_allowance() -> None:
    generator = np.random.default_rng(0)
    grew = 0
    for _ in range(300):
        theta = generator.standard_normal(40) * 10.0 ** generator.integers(-3, 3)
        phi = theta + generator.standard_normal(40) * 10.0 ** generator.integers(-16, 0)
        noise = generator.standard_normal(40) * 10.0 ** generator.integers(-3, 3)
        here, there = theta + noise, phi + noise
        before, after = exact_distance(theta, phi), exact_distance(here, there)
        allowed = Fraction(noise_rounding(here))
        # after <= (sqrt(before) + allowed)^2, compared without square roots
        gap = after - before - allowed**2
        assert gap <= 0 or gap**2 <= 4 * allowed**2 * before
        grew += after > before
    # Negative control: without the allowance the bound would often be violated.
    assert grew > 50


def test_the_allowance_covers_the_farthest_bounded_counterfactual() -> None:
    assert noise_rounding(np.zeros(5)) >= 2.0**-53 * ROUNDING_HOLDS_UP_TO
    large = np.full(100, 1e6)
    assert noise_rounding(large) >= 2.0**-53 * (2.0 * 1e7 + ROUNDING_HOLDS_UP_TO)


def test_history_and_tracker_count_it_alike() -> None:
    nodes = [
        PathNode(0, None, "initial", 0, 0),
        PathNode(1, 0, "noise", 1, 0, rounding=3e-13, noise_std=0.1, order=1),
        PathNode(2, 1, "noise", 2, 0, rounding=2e-13, noise_std=0.1, order=2),
    ]
    gathered = ActivePath(nodes).rounding
    assert gathered[0] == 0.0
    tracker = SensitivityTracker(1)
    for depth in (1, 2):
        tracker.add_rounding(nodes[depth].rounding)
        assert tracker.rounding == gathered[depth] >= sum(node.rounding for node in nodes[: depth + 1])
