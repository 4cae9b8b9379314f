"""Floating-point results that err on the safe side (docs/theory.md, section 6.1), against exact rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sifu.errors import InputError
from sifu.theory.facts import ClientProfile
from sifu.theory.regularity import RoundRegularity, client_factors, contraction, step_factor
from sifu.theory.rounding import down, norm, norm_up, up
from sifu.theory.tracking import client_increments


def is_upper_bound_of_norm(bound: float, vector: np.ndarray) -> bool:
    """Return whether bound >= ||vector||, decided without rounding."""
    if math.isinf(bound):
        return True
    return Fraction(bound) ** 2 >= sum(Fraction(float(x)) ** 2 for x in vector.reshape(-1))


WIDE = st.floats(-1e300, 1e300, allow_nan=False)


@given(hnp.arrays(np.float64, st.integers(0, 40), elements=WIDE))
@example(np.array([1e-170]))  # the square underflows to zero
@example(np.array([1e-200, 1e-200, 0.0]))
@example(np.array([5e-324, 5e-324]))  # denormal: enlarging by a factor has no effect
@example(np.array([1e308, 1e308, 1e308]))
@example(np.array([1e155, 1.0]))
@example(np.zeros(0))
def test_norm_is_an_upper_bound_everywhere(vector: np.ndarray) -> None:
    assert is_upper_bound_of_norm(norm_up(vector), vector)


@given(hnp.arrays(np.float32, st.integers(1, 60), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_norm_of_float32_is_that_of_its_float64_values(vector: np.ndarray) -> None:
    bound = norm_up(vector)
    assert is_upper_bound_of_norm(bound, vector)
    assert bound <= float(np.linalg.norm(vector.astype(np.float64))) * (1.0 + 1e-12) or bound < 1e-140


def test_norm_is_tight_and_keeps_what_is_not_finite() -> None:
    long = np.full(100_000, 0.1)
    assert math.sqrt(1e5) * 0.1 <= norm_up(long) <= math.sqrt(1e5) * 0.1 * (1.0 + 1e-9)
    assert norm_up(np.array([1.0, math.inf])) == math.inf
    assert math.isnan(norm_up(np.array([1.0, math.nan])))
    assert norm_up(np.zeros(7)) == 0.0


def test_control_a_float32_norm_under_reports() -> None:
    """Negative control: next to one large entry a running float32 sum loses every small one (docs/theory.md, section
    6.2).
    """
    vector = np.full(4_000_000, 1e-2, dtype=np.float32)
    vector[0] = 1000.0
    running = float(np.cumsum(vector * vector, dtype=np.float32)[-1])
    exact = math.sqrt(1e6 + 3_999_999 * float(np.float32(1e-2)) ** 2)
    assert math.sqrt(running) < exact * (1.0 - 1.9e-4)
    assert exact <= norm_up(vector) <= exact * (1.0 + 1e-8)


@given(st.floats(1e-300, 1e300))
def test_up_and_down_are_neighbours(value: float) -> None:
    assert down(value) < value < up(value)
    assert up(0.0) == 0.0
    assert down(0.0) == 0.0


COUNTS = st.lists(st.integers(1, 10_000), min_size=1, max_size=6)


@given(COUNTS, st.data())
def test_increments_are_upper_bounds(counts: list[int], data: st.DataObject) -> None:
    drifts = data.draw(st.lists(st.floats(0.0, 1e6), min_size=len(counts), max_size=len(counts)))
    drifts = [0.0 if x < 1e-290 else x for x in drifts]
    extra = data.draw(st.integers(1, 10_000))
    total = sum(counts) + extra
    increments = client_increments(np.array(counts), np.array(drifts), total, 1.0)
    for n, drift, value in zip(counts, drifts, increments.tolist(), strict=True):
        truth = n * Fraction(drift) / (total - n)
        assert Fraction(value) >= truth
        assert Fraction(value) <= truth * (1 + Fraction(1, 2**40))


def test_control_increments_without_slack_are_caught() -> None:
    generator = np.random.default_rng(5)
    caught = 0
    for _ in range(50):
        n, drift, total = (
            int(generator.integers(1, 99)),
            float(generator.uniform(0, 9)),
            int(generator.integers(100, 999)),
        )
        caught += Fraction(1.0 * n / (total - n) * drift) < Fraction(n) * Fraction(drift) / (total - n)
    assert caught > 0


RATES = st.floats(1e-4, 3.0)


@given(RATES, st.floats(1e-3, 1e3), st.floats(0.0, 1.0))
@example(0.1, 10.0, 1.0)  # eta mu = eta beta = 1 up to rounding: B is tiny, not zero
@example(0.3, 10 / 3, 1.0)
def test_step_factor_is_an_upper_bound(rate: float, smoothness: float, share: float) -> None:
    curvature = share * smoothness
    truth = max(abs(1 - Fraction(rate) * Fraction(curvature)), abs(1 - Fraction(rate) * Fraction(smoothness)))
    if curvature == 0.0 and rate * smoothness <= 2.0:
        truth = min(truth, Fraction(1))  # the convex theorem; eta beta = 2 is decided in float64
    assert Fraction(step_factor(rate, smoothness, curvature)) >= truth


def test_assumed_growth_beyond_float64_is_infinite_not_an_exception() -> None:
    assert client_factors([ClientProfile("c", 5, 400), ClientProfile("d", 5, 2)], 0.0, 10.0).tolist() == [
        math.inf,
        100.0,
    ]


@pytest.mark.parametrize(
    ("expansion", "decay", "match"),
    [
        (None, 0.1, "reports no expansion"),
        (0.5, 0.0, "is 1 without weight decay"),
        (1.5, 0.1, "safe steps cannot have"),
        (0.0, 0.1, "safe steps cannot have"),
        (math.nan, 0.1, "safe steps cannot have"),
    ],
)
def test_expansions_that_safe_steps_cannot_have_are_refused(expansion: float | None, decay: float, match: str) -> None:
    with pytest.raises(InputError, match=match):
        client_factors([ClientProfile("c", 5, 2, 1.0), ClientProfile("d", 5, 2, expansion)], decay, None)


def test_reported_expansions_are_the_factors() -> None:
    clients = [ClientProfile("c", 5, 2, 1.0), ClientProfile("d", 5, 2, 0.5)]
    assert client_factors(clients, 0.1, None).tolist() == [1.0, 0.5]


def test_a_round_of_huge_factors_is_infinite_not_an_exception() -> None:
    regularity = RoundRegularity.of(np.array([1, 1]), np.full(2, 1e308))
    assert regularity.factor_sum == math.inf
    assert regularity.absent >= 1e308


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0.01, 5.0)), min_size=2, max_size=6))
def test_contraction_of_a_round_is_an_upper_bound(clients: list[tuple[int, float]]) -> None:
    """L for the absent and for each participant is an upper bound, compared with fractions."""
    samples = np.array([n for n, _ in clients])
    factors = np.array([p for _, p in clients])
    regularity = RoundRegularity.of(samples, factors)

    def truth(rest: list[tuple[int, float]]) -> Fraction:
        return sum(n * Fraction(p) for n, p in rest) / sum(n for n, _ in rest)

    assert Fraction(regularity.absent) >= truth(clients)
    own = regularity.without(samples.astype(float), factors)
    for index in range(len(clients)):
        exact = truth(clients[:index] + clients[index + 1 :])
        assert Fraction(float(own[index])) >= exact
        assert float(own[index]) <= float(exact) * (1.0 + 1e-8) + 1e-8


def test_contraction_is_exactly_one_where_proven() -> None:
    regularity = RoundRegularity.of(np.array([3, 5, 7]), np.ones(3))
    assert regularity.absent == 1.0
    assert regularity.without(np.array([3.0, 15.0]), np.ones(2)).tolist() == [1.0, 1.0]
    grown = RoundRegularity.of(np.array([3, 5, 7]), np.full(3, 2.0))
    assert grown.without(np.array([15.0]), np.full(1, 2.0))[0] == 1.0  # no client left
    assert RoundRegularity.of(np.zeros(0, dtype=np.int64), np.zeros(0)).absent == 1.0


def test_infinite_growth_is_never_read_as_none() -> None:
    """L of a round with an unbounded client is infinite, whichever client is left out; inf - inf must not become NaN.

    Without the only unbounded client a finite L would hold; a larger L is safe, NaN is not.
    """
    with np.errstate(invalid="ignore"):
        regularity = RoundRegularity.of(np.array([1, 1, 1]), np.array([math.inf, math.inf, 1.0]))
        assert regularity.absent == math.inf
        own = regularity.without(np.ones(3), np.array([math.inf, math.inf, 1.0]))
    assert own.tolist() == [math.inf] * 3
    assert contraction(np.array([math.inf]), np.array([2.0]), math.inf)[0] == math.inf


@pytest.mark.parametrize("size", [0, 1, 7, 20_000])
def test_the_plain_norm_is_numpys(size):
    """The plain norm agrees with numpy's, also for long vectors, float32 and several axes."""
    vector = np.random.default_rng(size).standard_normal(size)
    assert norm(vector) == pytest.approx(float(np.linalg.norm(vector)), rel=1e-13)
    assert norm(vector.astype(np.float32)) == pytest.approx(float(np.linalg.norm(vector)), rel=1e-6)
    assert norm(vector.reshape(size, 1)) == norm(vector)
