"""Noise from a budget (docs/theory.md, section 7): golden numbers, another library, 50 digits of mpmath."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian, get_sigma_gaussian
from hypothesis import given
from hypothesis import strategies as st

from sifu.errors import InputError
from sifu.theory.calibration import (
    check_noise,
    delta_reached,
    exact_multiplier,
    hidden_sensitivity,
    true_positive_rate,
)
from sifu.theory.regularity import largest_momentum_step

EPSILONS = (1e-3, 1e-2, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 25.0, 50.0)
DELTAS = (1e-12, 1e-9, 1e-6, 1e-5, 1e-3, 0.01, 0.1, 0.5, 0.9)
BUDGETS = [(epsilon, delta) for epsilon in EPSILONS for delta in DELTAS]
CORNERS = [(1e-6, 1e-12), (1e-6, 1e-30), (1e-4, 1e-12), (1e-4, 1e-100), (0.1, 1.0 - 1e-6), (10.0, 1.0 - 1e-12)]
"""Budgets that are valid but hard for float64: the two terms of delta cancel, or delta is close to 1."""


def precise_delta(epsilon: float, multiplier: float) -> mpmath.mpf:
    """Return Balle & Wang's delta to 50 digits after all cancellation, from exactly the given floats."""
    with mpmath.workdps(150):
        eps, s = mpmath.mpf(epsilon), mpmath.mpf(multiplier)
        return +(mpmath.ncdf(1 / (2 * s) - eps * s) - mpmath.exp(eps) * mpmath.ncdf(-1 / (2 * s) - eps * s))


def test_golden_multipliers() -> None:
    assert round(exact_multiplier(10, 0.01), 5) == 0.35010
    assert round(exact_multiplier(1, 0.01), 5) == 1.87788
    assert round(delta_reached(10, 0.31075), 5) == 0.04058


def test_golden_attack() -> None:
    mu = 1.0 / exact_multiplier(10, 0.01)
    assert round(true_positive_rate(mu, 0.01), 2) == 0.70
    # Simulation of the best test, with its threshold at the 1 % quantile; 10^6 draws have a standard error of 5e-4.
    draws = np.random.default_rng(1).standard_normal(1_000_000)
    threshold = 2.3263478740408408
    assert np.mean(draws + mu > threshold) == pytest.approx(true_positive_rate(mu), abs=2.5e-3)


def test_two_full_budget_releases_reach_a_quarter() -> None:
    """Two full-budget releases of which only the latest is counted really reach delta 0.248 (docs/theory.md, section
    8.1).
    """
    s = exact_multiplier(10, 0.01)
    assert round(delta_reached(10, s / math.sqrt(2.0)), 3) == 0.248


@pytest.mark.parametrize(
    ("steps", "golden"), [(1, 2.0), (2, 0.892), (3, 0.500), (5, 0.229), (10, 0.0798), (20, 0.0319)]
)
def test_golden_momentum_steps(steps: int, golden: float) -> None:
    step = largest_momentum_step(steps, 0.9)
    assert step == pytest.approx(golden, rel=2e-3)
    assert float(f"{step:.3g}") == golden


def precise_momentum_step(steps: int, momentum: float) -> float:
    """Return x_max to 50 digits, by the formula of docs/theory.md, section 5.6, entry by entry."""
    with mpmath.workdps(50):
        rho = mpmath.mpf(momentum)

        def reach(i: int, stop: int) -> mpmath.mpf:
            return mpmath.fsum(rho**k for k in range(stop - i))

        c = [reach(i, steps) for i in range(steps)]
        scaled = mpmath.matrix(steps, steps)
        for i in range(steps):
            for j in range(i, steps):
                entry = c[j] * (c[i] - reach(i, j)) if i < j else c[j] ** 2
                scaled[i, j] = scaled[j, i] = entry / mpmath.sqrt(c[i] * c[j])
        return float(2 / max(mpmath.eigsy(scaled, eigvals_only=True)))


@pytest.mark.parametrize("momentum", [0.1, 0.5, 0.9, 0.99, 1.0 - 1e-6, 1.0 - 1e-8, 1.0 - 1e-12])
@pytest.mark.parametrize("steps", [2, 3, 10])
def test_momentum_step_is_rounded_down(steps: int, momentum: float) -> None:
    truth = precise_momentum_step(steps, momentum)
    step = largest_momentum_step(steps, momentum)
    assert step <= truth
    assert step >= truth * (1.0 - 1e-6)


@pytest.mark.parametrize(("epsilon", "delta"), BUDGETS)
def test_agrees_with_dp_accounting(epsilon: float, delta: float) -> None:
    """dp-accounting's root finder stops at about 1e-6 of sigma if delta is tiny, which sets the tolerance."""
    assert exact_multiplier(epsilon, delta) == pytest.approx(get_sigma_gaussian(epsilon, delta, tol=1e-12), rel=2e-6)


@pytest.mark.parametrize(("epsilon", "delta"), BUDGETS + CORNERS)
def test_never_too_small_against_fifty_digits(epsilon: float, delta: float) -> None:
    s = exact_multiplier(epsilon, delta)
    assert precise_delta(epsilon, s) <= delta
    wasted = 1e-4 if (epsilon, delta) in CORNERS else 1e-8
    assert precise_delta(epsilon, s * (1.0 - wasted)) > delta  # and hardly more than necessary


def test_control_the_multiplier_without_its_margin_is_caught() -> None:
    """Negative control: the same check refuses a multiplier that is 1e-7 too small, at every budget of the grid."""
    for epsilon, delta in BUDGETS:
        assert precise_delta(epsilon, exact_multiplier(epsilon, delta) * (1.0 - 1e-7)) > delta


@pytest.mark.parametrize(("epsilon", "delta"), BUDGETS)
def test_inverse_pair(epsilon: float, delta: float) -> None:
    reached = delta_reached(epsilon, exact_multiplier(epsilon, delta))
    assert delta * (1.0 - 1e-9) <= reached <= delta


@given(st.floats(1e-3, 50.0), st.floats(1e-12, 0.9), st.floats(1.01, 3.0))
def test_monotone(epsilon: float, delta: float, factor: float) -> None:
    s = exact_multiplier(epsilon, delta)
    assert exact_multiplier(epsilon * factor, delta) < s
    assert exact_multiplier(epsilon, min(delta * factor, 0.95)) < s or delta * factor > 0.95
    assert delta_reached(epsilon, s * factor) < delta_reached(epsilon, s)
    assert delta_reached(epsilon * factor, s) < delta_reached(epsilon, s)


@given(st.floats(0.05, 20.0), st.floats(1e-9, 0.5))
def test_epsilon_is_recovered(epsilon: float, delta: float) -> None:
    s = exact_multiplier(epsilon, delta)
    assert get_epsilon_gaussian(s, delta) == pytest.approx(epsilon, rel=1e-6)


def test_epsilon_zero_is_allowed_for_the_exact_root() -> None:
    """At epsilon = 0 the exact root solves delta = 2 Phi(1/(2s)) - 1."""
    s = exact_multiplier(0.0, 0.01)
    assert precise_delta(0.0, s) <= 0.01
    assert s == pytest.approx(39.894, rel=1e-4)


@given(st.floats(1e-6, 1e6), st.floats(1e-3, 1e3))
def test_hidden_sensitivity_is_never_rounded_up(noise_std: float, multiplier: float) -> None:
    hidden = hidden_sensitivity(noise_std, multiplier)
    assert Fraction(hidden) * Fraction(multiplier) <= Fraction(noise_std)
    assert Fraction(hidden) * Fraction(multiplier) >= Fraction(noise_std) * (1 - Fraction(1, 2**50))


def test_control_plain_division_rounds_up_somewhere() -> None:
    generator = np.random.default_rng(3)
    pairs = generator.uniform(0.1, 10.0, (200, 2))
    assert any(Fraction(float(a / b)) * Fraction(float(b)) > Fraction(float(a)) for a, b in pairs)


@pytest.mark.parametrize(("epsilon", "delta"), [(-1.0, 0.1), (math.inf, 0.1), (math.nan, 0.1)])
def test_a_bad_epsilon_is_named(epsilon: float, delta: float) -> None:
    with pytest.raises(InputError, match=f"epsilon must be a positive number of at most 10000, found {epsilon}"):
        exact_multiplier(epsilon, delta)


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, 2.0, math.nan])
def test_a_bad_delta_is_named(delta: float) -> None:
    with pytest.raises(InputError, match="delta must lie strictly between 0 and 1"):
        exact_multiplier(1.0, delta)


def test_other_bad_arguments_are_named() -> None:
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InputError, match="sigma must be a positive number"):
            check_noise(bad)
