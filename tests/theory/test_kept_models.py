"""Choice of the models that are kept and erased (docs/theory.md, sections 9.5 and 9.6)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_psi_dominates import draw_run
from tiny_federation import part_of, path_of, scalars_of

from sifu.errors import InputError
from sifu.theory.history import client_curve
from sifu.theory.rollback import Exposure, Subject, choose_node, crosses_a_level, depths_to_erase, level_ladder, thin
from sifu.theory.tracking import SensitivityTracker

LEVELS = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8, unique=True).map(sorted)
PSI = st.one_of(st.just(0.0), st.floats(0.0, 1e7))


@given(LEVELS, st.data())
def test_crossing_is_what_it_says(levels: list[float], data: st.DataObject) -> None:
    """`crosses_a_level` agrees with Psi(n) <= level < Psi(n+1) by brute force, also at the levels themselves."""
    values = st.one_of(PSI, st.sampled_from(levels))
    pairs = data.draw(st.lists(st.tuples(values, values), max_size=5))
    before = np.array([min(pair) for pair in pairs])
    after = np.array([max(pair) for pair in pairs])
    expected = any(b <= level < a for b, a in zip(before, after, strict=True) for level in levels)
    assert crosses_a_level(np.array(levels), before, after) is expected


def test_control_crossing_at_the_level_itself() -> None:
    """Negative control: reaching a level is not crossing it, so strict and loose comparisons must not be swapped."""
    level = np.array([1.0])
    assert crosses_a_level(level, np.array([1.0]), np.array([1.5]))
    assert not crosses_a_level(level, np.array([0.5]), np.array([1.0]))
    assert not crosses_a_level(level, np.array([1.5]), np.array([2.5]))
    swapped = np.searchsorted(level, [1.5], side="right") > np.searchsorted(level, [1.0], side="right")
    assert not swapped[0]


@given(st.integers(0, 2**32 - 1), st.floats(0.01, 3.0))
def test_one_level_keeps_at_most_one_model_a_client(seed: int, share: float) -> None:
    """With L >= 1 each client keeps at most one model per level, and these suffice for every client's request."""
    run = draw_run(seed, ("convex", "growing")[seed % 2])
    path, count = path_of(run), len(run.federation.clients)
    curves = [client_curve(path, part_of(run.federation, run.records, c)) for c in range(count)]
    level = share * float(np.median([curve.one(path.tip) for curve in curves]))
    if level == 0.0 or not all(node.regularity.absent >= 1.0 for node in path.nodes[1:]):
        return
    tracker, everyone, kept = SensitivityTracker(count), np.arange(count), {0}
    for depth, record in enumerate(run.records):
        before = tracker.total(everyone)
        tracker.update(scalars_of(run.federation, record))
        if crosses_a_level(np.array([level]), before, tracker.total(everyone)):
            kept.add(depth)
    assert len(kept - {0}) <= count
    for client, curve in enumerate(curves):
        # multiplier 1 and sigma = level hide exactly Psi <= level, up to a rounding margin
        exposure = Exposure(Subject(0, (client,), 1.0, 1), path, lambda curve=curve: curve)
        choice = choose_node([exposure], {*kept, path.tip}, level * (1.0 + 1e-9))
        assert choice.depth == choice.wanted_depth or curve.one(choice.depth) >= level * (1.0 - 1e-6)


def test_control_with_contraction_one_client_crosses_often() -> None:
    """With L < 1 Psi falls and rises again, so the bound of one model per client holds only for L >= 1."""
    crossings, psi = 0, 0.0
    for number in range(20):
        after = psi + 1.0 if number % 2 == 0 else 0.5 * psi
        crossings += crosses_a_level(np.array([1.2]), np.array([psi]), np.array([after]))
        psi = after
    assert crossings > 1


DEPTHS = st.lists(st.integers(0, 500), min_size=1, max_size=30, unique=True)


@given(DEPTHS, st.sets(st.integers(0, 500), max_size=6), st.integers(2, 12))
def test_thinning_keeps_what_is_protected_and_reaches_the_limit(
    depths: list[int], protected: set[int], limit: int
) -> None:
    """Thinning never drops the first, the last or a protected depth; the others are dropped until
    the limit is reached.
    """
    dropped = thin(depths, protected, limit)
    kept = sorted(set(depths) - set(dropped))
    assert set(dropped) <= set(depths)
    assert len(set(dropped)) == len(dropped)
    assert not set(dropped) & protected
    untouchable = (protected & set(depths)) | {min(depths), max(depths)}
    assert untouchable <= set(kept)
    assert len(kept) <= max(limit, len(untouchable))
    if len(depths) <= limit:
        assert dropped == []


def test_thinning_spreads_what_it_keeps() -> None:
    kept = sorted(set(range(101)) - set(thin(range(101), {0}, 12)))
    gaps = np.diff(kept)
    assert len(kept) == 12
    assert (kept[0], kept[-1]) == (0, 100)
    assert gaps[0] <= gaps[len(gaps) // 2] <= gaps[-2] * 2  # denser early, where rounds gain most
    assert gaps.max() <= 40


@given(st.floats(1e-6, 1.0), st.floats(1.0, 1e6), st.floats(1.01, 3.0))
def test_ladder(lowest: float, factor: float, ratio: float) -> None:
    levels = level_ladder(lowest, lowest * factor, ratio)
    assert levels[0] == lowest
    np.testing.assert_allclose(levels[1:] / levels[:-1], ratio, rtol=1e-9)
    assert levels[-1] <= lowest * factor * (1.0 + 1e-6)
    assert levels[-1] * ratio > lowest * factor * (1.0 - 1e-6)


@pytest.mark.parametrize("bad", [(0.0, 1.0, 2.0), (2.0, 1.0, 2.0), (1.0, 2.0, 1.0), (1.0, float("inf"), 2.0)])
def test_a_bad_ladder_is_named(bad: tuple[float, float, float]) -> None:
    with pytest.raises(InputError, match="levels need 0 < lowest <= highest and ratio > 1, found"):
        level_ladder(*bad)


@given(DEPTHS, st.integers(0, 500), st.sets(st.integers(0, 500)))
def test_erasing(depths: list[int], cut_after: int, traced: set[int]) -> None:
    paper = depths_to_erase(depths, cut_after, "paper", traced.__contains__)
    strict = depths_to_erase(depths, cut_after, "strict", traced.__contains__)
    assert set(paper) == {d for d in depths if d > cut_after}
    assert set(strict) == set(paper) | (set(depths) & traced)
