"""Scale of the tracker and product of the history, against a dense recursion (docs/theory.md, section 4.4).

The reference is mpmath with 40 digits and unlimited exponents: Psi' = L Psi + Delta for every client at every round.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sifu.theory.history import ActivePath, PathNode, TakenPart, client_curve
from sifu.theory.regularity import RoundRegularity
from sifu.theory.tracking import RoundScalars, SensitivityTracker, summarise_round

mpmath = pytest.importorskip("mpmath")
CLIENTS = np.arange(6)
Rounds = list[RoundScalars]


def draw_rounds(seed: int, rounds: int, lowest: float, highest: float, zero_every: int = 0) -> Rounds:
    """Draw random L for the absent and for each participant, and random increments; every client
    takes part sometimes.
    """
    generator = np.random.default_rng(seed)
    drawn = []
    for number in range(rounds):
        who = np.flatnonzero(generator.random(CLIENTS.size) < 0.3)
        absent = 0.0 if zero_every and number % zero_every == zero_every - 1 else generator.uniform(lowest, highest)
        own = generator.uniform(lowest, highest, who.size)
        drawn.append(RoundScalars(who, 10.0 ** generator.uniform(-6, 2, who.size), own, float(absent), 0.0, 1.0))
    return drawn


def dense(rounds: Rounds) -> list[mpmath.mpf]:
    """Return Psi by the naive recursion over all clients."""
    with mpmath.workdps(40):
        values = [mpmath.mpf(0)] * CLIENTS.size
        for scalars in rounds:
            own = dict(zip(scalars.participants.tolist(), scalars.own_contractions.tolist(), strict=True))
            increments = dict(zip(scalars.participants.tolist(), scalars.increments.tolist(), strict=True))
            values = [
                values[c] * mpmath.mpf(own.get(c, scalars.absent_contraction)) + mpmath.mpf(increments.get(c, 0.0))
                for c in range(CLIENTS.size)
            ]
        return values


def compare(rounds: Rounds) -> tuple[float, float]:
    """Return the largest relative shortfall and excess of the tracker against the reference; both must be tiny."""
    tracker = SensitivityTracker(CLIENTS.size)
    for scalars in rounds:
        tracker.update(scalars)
    short = excess = 0.0
    for tracked, truth in zip(tracker.total(CLIENTS).tolist(), dense(rounds), strict=True):
        if truth > 1e307:
            assert tracked > 1e307  # beyond float64 only infinity is an upper bound
        elif truth > 0:
            short = max(short, float((truth - mpmath.mpf(tracked)) / truth))
            excess = max(excess, float((mpmath.mpf(tracked) - truth) / truth))
    return short, excess


@pytest.mark.parametrize(
    ("lowest", "highest"),
    [(0.5, 0.95), (0.9, 1.1), (0.2, 1.9), (1.0, 1.2), (0.9, 0.99)],
    ids=["shrinking", "around one", "wild", "growing", "slowly shrinking"],
)
def test_five_thousand_rounds_are_never_below_the_dense_recursion(lowest: float, highest: float) -> None:
    """In all but the second case the scale leaves its range [1e-100, 1e100], sometimes many times."""
    short, excess = compare(draw_rounds(11, 5000, lowest, highest))
    assert short <= 0.0
    assert excess <= 1e-9


@pytest.mark.parametrize("rounds", [600, 5000])
def test_overflow_ends_at_infinity(rounds: int) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        short, excess = compare(draw_rounds(5, rounds, 1.5, 3.0))
    assert short <= 0.0
    assert excess <= 1e-9


@given(st.integers(0, 10_000), st.integers(2, 9))
def test_a_zero_factor_loses_nothing_that_came_after(seed: int, zero_every: int) -> None:
    rounds = draw_rounds(seed, 30, 0.3, 1.4, zero_every)
    tracker = SensitivityTracker(CLIENTS.size)
    for scalars in rounds:
        tracker.update(scalars)
    for tracked, truth in zip(tracker.total(CLIENTS).tolist(), dense(rounds), strict=True):
        assert mpmath.mpf(tracked) >= truth
        assert mpmath.mpf(tracked) <= truth * (1 + 1e-9) + mpmath.mpf(10) ** -12


def test_control_a_lost_rescaling_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a tracker that resets its scale without multiplying the values is found."""

    def careless(self: SensitivityTracker, factor: float) -> None:
        self._scale *= factor
        if not 1e-100 < self._scale < 1e100:
            self._scale = 1.0

    monkeypatch.setattr(SensitivityTracker, "_rescale", careless)
    rounds = draw_rounds(11, 5000, 1.0, 1.2)
    assert compare(rounds)[0] > 1e-6


def test_control_plain_rounding_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without rounding up, some value falls below the exact one."""
    monkeypatch.setattr("sifu.theory.tracking.ROUNDED_UP", 1.0)
    assert compare(draw_rounds(0, 5000, 0.9, 1.1))[0] > 0.0


def test_a_round_touches_its_participants_only() -> None:
    """A round costs O(participants): no other entry is rewritten, and the array is not replaced."""
    tracker = SensitivityTracker(CLIENTS.size)
    for scalars in draw_rounds(3, 40, 0.8, 1.2):
        array, before = tracker._values, tracker._values.copy()
        tracker.update(scalars)
        assert tracker._values is array
        others = np.setdiff1d(CLIENTS, scalars.participants)
        assert tracker._values[others].tobytes() == before[others].tobytes()


def test_update_returns_what_crossed() -> None:
    """`update` returns the participants' Psi before and after the round, in their order, as
    `crosses_a_level` needs it.
    """
    tracker = SensitivityTracker(CLIENTS.size)
    for scalars in draw_rounds(4, 60, 0.8, 1.2):
        expected = tracker.bare(scalars.participants)
        before, after = tracker.update(scalars)
        np.testing.assert_array_equal(before, expected)
        np.testing.assert_allclose(after, tracker.bare(scalars.participants), rtol=1e-14)


def hand_made(factors: list[float | None], increments: dict[int, float], rounding: float = 0.0) -> tuple:
    """Return a path of one round per entry: `factors[k]` is P of both bystanders in round k + 1, or None if it is
    empty.

    Client 0 (10 of 30 samples, P = 1) takes part at the depths of `increments`, with that drift times 1/2 as Delta.

    """
    nodes = [PathNode(0, None, "initial", 0, 0)]
    for depth, factor in enumerate(factors, start=1):
        samples, rates = [10, 10], [factor, factor]
        if depth in increments:
            samples, rates = [10, *samples], [1.0, *rates]
        regularity = RoundRegularity.of(
            np.array([] if factor is None else samples, dtype=np.int64),
            np.array([] if factor is None else rates, dtype=np.float64),
        )
        nodes.append(PathNode(depth, depth - 1, "round", 0, depth, regularity, 1.0, rounding))
    depths = np.array(sorted(increments), dtype=np.int64)
    drifts = np.array([2.0 * increments[d] for d in depths.tolist()])
    path = ActivePath(nodes)
    return path, TakenPart(depths, np.full(depths.size, 10), drifts, 1.0)


def test_hand_made_paths_are_read_right() -> None:
    path, part = hand_made([2.0, 2.0, None, 3.0], {1: 1.0, 4: 10.0})
    curve = client_curve(path, part)
    # Delta 1, doubled by round 2, unchanged by the empty round, then 3 * 2 + 10.
    np.testing.assert_allclose(curve.at(np.arange(5)), [0.0, 1.0, 2.0, 2.0, 16.0], rtol=1e-12)
    assert curve.one(0) == 0.0


@pytest.mark.parametrize("zero", [0.0, 1e-300])
def test_a_round_that_forgets_everything_does_not_hide_what_comes_after_it(zero: float) -> None:
    """After a round with L = 0, or so small that the running product underflows, later Psi values are correct."""
    path, part = hand_made([1.0, zero, zero, 1.0, 2.0, 1.0], {1: 1.0, 4: 5.0})
    values = client_curve(path, part).at(np.arange(7))
    np.testing.assert_allclose(values[4:], [5.0, 10.0, 10.0], rtol=1e-9)
    assert np.all(values[2:4] < 1e-12)


@pytest.mark.parametrize("rounding", [0.0, 1e-13])
@pytest.mark.parametrize("depths", [(1,), (3,), (1, 3)])
def test_infinite_growth_makes_psi_infinite(depths: tuple[int, ...], rounding: float) -> None:
    """Rounds 2 and 4 expand without bound; Psi after them is neither NaN nor zero, which would read as `exact`."""
    with np.errstate(invalid="ignore", over="ignore"):
        path, part = hand_made([1.0, math.inf, 1.0, math.inf], dict.fromkeys(depths, 1.0), rounding)
        curve = client_curve(path, part)
        assert curve.one(0) == 0.0
        assert curve.one(4) == math.inf
        assert curve.one(1) == (pytest.approx(1.0) if 1 in depths else 0.0)
        assert curve.one(3) == math.inf or (1 not in depths and curve.one(3) == pytest.approx(1.0))


def test_a_client_of_unbounded_growth_itself_has_infinite_psi() -> None:
    """If both participants expand without bound, leaving one out does not turn inf - inf into a small number."""
    samples, factors = np.array([10, 10]), np.array([math.inf, math.inf])
    with np.errstate(invalid="ignore"):
        regularity = RoundRegularity.of(samples, factors)
        nodes = [PathNode(0, None, "initial", 0, 0)]
        nodes += [PathNode(d, d - 1, "round", 0, d, regularity, 1.0, 0.0) for d in (1, 2, 3)]
        part = TakenPart(np.array([1, 2, 3]), np.full(3, 10), np.ones(3), math.inf)
        curve = client_curve(ActivePath(nodes), part)
        assert curve.one(3) == math.inf
        assert curve.one(2) == math.inf


def test_the_tracker_of_unbounded_growth_is_infinite() -> None:
    with np.errstate(invalid="ignore"):
        _, scalars = summarise_round(
            np.arange(2),
            np.array([10, 10]),
            np.ones(2),
            1.0,
            1e-13,
            factors=np.full(2, math.inf),
        )
        tracker = SensitivityTracker(3)
        for _ in range(3):
            tracker.update(scalars)
        assert tracker.total(np.arange(3)).tolist() == [math.inf, math.inf, 0.0]


def test_psi_of_a_participant_never_becomes_exactly_zero() -> None:
    """An underflow never makes a participant's Psi zero, because zero means "never touched" and is certified as
    `exact`.
    """
    path, part = hand_made([0.5] * 1200, {1: 1.0})
    assert client_curve(path, part).one(1200) > 0.0
    tracker = SensitivityTracker(2)
    tracker.update(RoundScalars(np.array([0]), np.ones(1), np.ones(1), 1.0, 0.0, 1.0))
    for _ in range(1200):
        tracker.update(RoundScalars(np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0), 0.5, 0.0, 1.0))
    assert tracker.total(np.array([0]))[0] > 0.0
    assert tracker.total(np.array([1]))[0] == 0.0  # this one never took part


def test_the_rounding_allowance_stays_when_the_drift_was_zero() -> None:
    """A client whose update equalled the mean bit for bit still took part and may have left a trace of rounding."""
    path, part = hand_made([1.0, 1.0], {1: 0.0}, rounding=1e-13)
    assert client_curve(path, part).one(0) == 0.0
    assert client_curve(path, part).one(2) >= 2e-13
    tracker = SensitivityTracker(2)
    tracker.update(RoundScalars(np.array([0]), np.zeros(1), np.ones(1), 1.0, 1e-13, 1.0))
    assert tracker.total(np.array([0]))[0] >= 1e-13
    assert tracker.total(np.array([1]))[0] == 0.0


def test_equal_clients_leave_a_trace_of_rounding() -> None:
    """The allowance is needed: three clients have the same update, yet the means with and without one of them differ.

    Drift and Delta are zero in exact arithmetic, yet the two float64 models differ by an ulp.
    """
    update = np.full(64, 0.1) + np.arange(64) * 0.07
    weights = np.array([1, 1, 1]) / 3
    real = sum(w * update for w in weights)
    without = sum(w * update for w in np.array([1, 1]) / 2)
    assert np.any(real != without)
    assert np.linalg.norm(real - without) <= 1e-13


def test_rounding_grows_with_the_rounds() -> None:
    """R' = growth R + r holds in the tracker and along the path, and is never below the exact value."""
    path, part = hand_made([1.5, 0.5, 2.0, None, 1.0], {1: 1.0}, rounding=1e-10)
    exact = [0.0]
    for growth in (1.5, 1.0, 2.0, 1.0, 1.0):
        exact.append(exact[-1] * growth + 1e-10)
    np.testing.assert_allclose(path.rounding, exact, rtol=1e-12)
    assert np.all(path.rounding >= np.array(exact) * (1.0 - 2.0**-52))
    assert client_curve(path, part).one(5) >= 1.0 + exact[-1]


def test_the_largest_psi_on_the_way_may_lie_between_participations() -> None:
    """If rounds without the client first grow and then shrink, the peak lies at no depth of its participation."""
    path, part = hand_made([1.0, 2.0, 2.0, 0.1, 0.1], {1: 1.0})
    curve = client_curve(path, part)
    assert curve.largest_until(5) == pytest.approx(4.0)
    assert curve.largest_until(2) == pytest.approx(2.0)


def test_the_history_of_five_thousand_rounds_is_never_below_the_dense_recursion() -> None:
    generator = np.random.default_rng(9)
    factors: list[float | None] = generator.uniform(0.7, 1.3, 5000).tolist()
    increments = {int(d): float(generator.uniform(0.1, 2.0)) for d in np.flatnonzero(generator.random(5000) < 0.01) + 1}
    path, part = hand_made(factors, increments)
    bounds = client_curve(path, part).at(np.array([1000, 2500, 5000]))
    with mpmath.workdps(40):
        psi, wanted = mpmath.mpf(0), []
        for depth, factor in enumerate(factors, start=1):
            psi = psi * mpmath.mpf(factor) + mpmath.mpf(increments.get(depth, 0.0))
            if depth in (1000, 2500, 5000):
                wanted.append(psi)
    for value, truth in zip(bounds.tolist(), wanted, strict=True):
        assert mpmath.mpf(value) >= truth
        assert mpmath.mpf(value) <= truth * (1 + mpmath.mpf(10) ** -8)
