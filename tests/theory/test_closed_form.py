"""Closed-form heads: exact integer sums, and heads and penalties against independent computations."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.linear_model import Ridge

from made_statistics import made_statistics
from sifu.errors import InputError
from sifu.theory.arrays import Integers
from sifu.theory.closed_form import (
    FixedPoint,
    Statistics,
    Targets,
    fit_head,
    penalty,
    ridge,
    statistics_check,
    statistics_of,
    total,
)
from sifu.theory.closed_form.ridge import GRID, gcv_scores, relative_penalty_by_gcv
from sifu.theory.closed_form.rows import exact_blocks
from sifu.theory.closed_form.statistics_check import (
    Flaw,
    find_flaw,
    is_semi_definite,
)
from sifu.theory.closed_form.sums import RunningSum, statistics_of_chunks
from suite_setup import examples

Floats = NDArray[np.float64]
FIXED = FixedPoint(features=4, outputs=3)


def samples(count: int, seed: int, fixed: FixedPoint = FIXED) -> tuple[Floats, Floats]:
    """Return features of norm at most c and one-hot targets."""
    generator = np.random.default_rng(seed)
    phi = generator.normal(size=(count, fixed.features)) * 10.0 ** generator.uniform(-3, 0.5, size=(count, 1))
    phi *= np.minimum(1.0, fixed.norm / np.maximum(np.linalg.norm(phi, axis=1, keepdims=True), 1e-9))
    return phi, Targets("classification", fixed.outputs).encode(generator.integers(fixed.outputs, size=count))


# ---- exact integers


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 40), st.integers(0, 2**32), st.integers(2, 20), st.integers(2, 20))
def test_statistics_are_those_of_python_integers(count: int, seed: int, feature_bits: int, target_bits: int) -> None:
    fixed = replace(FIXED, feature_bits=feature_bits, target_bits=target_bits)
    phi, targets = samples(count, seed, fixed)
    features = [[round(float(x) * 2**feature_bits) for x in row] + [2**feature_bits] for row in phi]
    wanted = [[round(float(x) * 2**target_bits) for x in row] for row in targets]
    computed = statistics_of(fixed, phi, targets)
    for j in range(fixed.width):
        assert computed.gram[j].tolist() == [sum(row[j] * row[i] for row in features) for i in range(fixed.width)]
        products = [sum(f[j] * t[o] for f, t in zip(features, wanted, strict=True)) for o in range(fixed.outputs)]
        assert computed.cross[j].tolist() == products
    assert computed.samples == count
    assert computed.target_energy == sum(t * t for row in wanted for t in row)
    assert find_flaw(computed) == (None, "")


Operation = tuple[str, int, int]
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["join", "leave", "records"]), st.integers(0, 5), st.integers(0, 10**6)), max_size=25
)


def follow(operations: list[Operation]) -> tuple[Statistics, Floats, dict[int, tuple[Floats, Floats]]]:
    """Apply joins, leaves and lost records in order; return the running sum, a float64 sum, and the remaining data."""
    held: dict[int, tuple[Floats, Floats]] = {}
    sums, floats = Statistics.empty(FIXED), np.zeros((FIXED.width, FIXED.width))
    for kind, client, seed in operations:
        before = held.get(client)
        if (kind == "join") == (before is not None):
            continue
        after = None
        if kind == "join":
            after = samples(1 + seed % 7, seed)
        elif kind == "records" and before is not None:
            kept = np.random.default_rng(seed).random(len(before[0])) < 0.5
            after = (before[0][kept], before[1][kept])
        for data, sign in ((before, -1), (after, 1)):
            if data is not None:
                statistics = statistics_of(FIXED, *data)
                sums = sums + statistics if sign > 0 else sums - statistics
                rows = np.column_stack([data[0], np.ones(len(data[0]))])
                floats = floats + sign * (rows.T @ rows)
        if after is None:
            del held[client]
        else:
            held[client] = after
    return sums, floats, held


def never_had_it(held: dict[int, tuple[Floats, Floats]]) -> Statistics:
    """Return the sum of a federation that only ever had these data."""
    return total(FIXED, (statistics_of(FIXED, *held[client]) for client in sorted(held)))


@settings(max_examples=examples(80), deadline=None)
@given(OPERATIONS)
def test_whatever_left_leaves_no_bit(operations: list[Operation]) -> None:
    sums, _, held = follow(operations)
    fresh = never_had_it(held)
    assert sums == fresh
    assert sums.digest() == fresh.digest()
    if fresh.samples:
        assert fit_head(sums, 0.01).weights.tobytes() == fit_head(fresh, 0.01).weights.tobytes()


def test_negative_control_float64_sums_keep_traces() -> None:
    operations: list[Operation] = [("join", client, 17 + client) for client in range(6)]
    operations += [("leave", client, 0) for client in (1, 4, 2)]
    sums, floats, held = follow(operations)
    fresh = np.zeros_like(floats)
    for client in sorted(held):
        rows = np.column_stack([held[client][0], np.ones(len(held[client][0]))])
        fresh += rows.T @ rows
    assert sums == never_had_it(held)
    np.testing.assert_allclose(floats, fresh, atol=1e-10)
    assert not np.array_equal(floats, fresh)


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 30), st.data())
def test_neither_order_nor_pieces_matter(seed: int, count: int, data: st.DataObject) -> None:
    phi, targets = samples(count, seed)
    order = data.draw(st.permutations(range(count)))
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=4)))
    pieces = [order[a:b] for a, b in zip([0, *cuts], [*cuts, count], strict=True)]
    chunks = ((phi[list(piece)], targets[list(piece)]) for piece in pieces)
    assert statistics_of_chunks(FIXED, chunks) == statistics_of(FIXED, phi, targets)


def test_samples_are_cut_into_blocks_that_are_exact() -> None:
    """The products of these samples exceed 2^53 many times over, so a single float64 product would round."""
    fixed = replace(FIXED, feature_bits=22, norm=20.0)
    phi = np.random.default_rng(1).normal(size=(64, 4))
    phi *= 20.0 / np.linalg.norm(phi, axis=1, keepdims=True)
    targets = np.zeros((64, 3))
    features = fixed.quantised_features(phi)
    assert len(list(exact_blocks(features, targets))) > 5
    exact = [[sum(int(a) * int(b) for a, b in zip(x, y, strict=True)) for y in features.T] for x in features.T]
    assert statistics_of(fixed, phi, targets).gram.tolist() == exact
    assert (features.T @ features).astype(np.int64).tolist() != exact  # negative control


def test_words_and_digest_have_the_documented_form() -> None:
    statistics = statistics_of(FIXED, *samples(9, 3))
    words = [int(statistics.gram[row, column]) for row in range(5) for column in range(row + 1)]
    words += [int(entry) for row in statistics.cross for entry in row] + [9, statistics.target_energy]
    assert statistics.words.tolist() == words
    assert Statistics(FIXED, statistics.words) == statistics
    line = "sifu statistics 1 features=4 outputs=3 feature_bits=16 target_bits=16 norm=10.0 target_norm=1.0\n"
    raw = line.encode() + b"".join(word.to_bytes(8, "little", signed=True) for word in words)
    assert statistics.digest() == hashlib.sha256(raw).hexdigest()
    assert statistics.digest() != Statistics(FIXED, np.append(statistics.words[:-2], [8, words[-1]])).digest()


def test_words_add_up_modulo_2_to_the_64() -> None:
    """Words may wrap around in between, and their sum is still right, which masks rely on."""
    parts = [statistics_of(FIXED, *samples(5, seed)) for seed in range(3)]
    mask = np.random.default_rng(0).integers(2**64, size=parts[0].words.size, dtype=np.uint64)
    words = parts[0].words.view(np.uint64) + mask + parts[1].words.view(np.uint64)
    words = words + parts[2].words.view(np.uint64) - mask
    assert Statistics(FIXED, words.view(np.int64)) == total(FIXED, parts)


def test_a_sum_in_place_is_that_of_a_copy() -> None:
    parts = [statistics_of(FIXED, *samples(5, seed)) for seed in range(3)]
    for in_place in (False, True):
        start = total(FIXED, parts)
        result = RunningSum(FIXED, start, in_place=in_place)
        result.subtract(parts[1])
        assert result.statistics() == total(FIXED, [parts[0], parts[2]])
        assert (start == total(FIXED, parts)) != in_place


# ---- refusals


def test_overflow_is_refused_before_it_happens() -> None:
    statistics = statistics_of(FIXED, *samples(5, 1))
    large = np.full_like(statistics.gram, 2**62)
    full = made_statistics(FIXED, large, statistics.cross, 5, 0)
    with pytest.raises(InputError, match="beyond int64"):
        full + full
    with pytest.raises(InputError, match="beyond int64"):
        total(FIXED, [full, statistics, full])
    smallest = made_statistics(FIXED, np.full_like(large, -(2**63)), statistics.cross, 5, 0)
    with pytest.raises(InputError, match="beyond int64"):
        total(FIXED, [smallest])
    wide = FixedPoint(features=4, outputs=3, feature_bits=22, norm=20.0)
    assert wide.samples_at_most < 2000
    with pytest.raises(InputError, match="could overflow"):
        statistics_of(wide, np.zeros((2000, 4)), np.zeros((2000, 3)))
    with pytest.raises(InputError, match="fit 53 bits"):
        FixedPoint(features=4, outputs=3, feature_bits=30)


def test_what_does_not_belong_is_refused() -> None:
    statistics = statistics_of(FIXED, *samples(5, 1))
    with pytest.raises(InputError, match="not part of a sum"):
        Statistics.empty(FIXED) - statistics
    with pytest.raises(InputError, match="do not belong"):
        statistics + Statistics.empty(replace(FIXED, feature_bits=12))
    with pytest.raises(InputError, match="longer than norm"):
        statistics_of(FIXED, np.full((1, 4), 6.0), np.zeros((1, 3)))
    with pytest.raises(InputError, match="longer than target_norm"):
        statistics_of(FIXED, np.zeros((1, 4)), np.ones((1, 3)))
    with pytest.raises(InputError, match="NaN"):
        statistics_of(FIXED, np.full((1, 4), np.nan), np.zeros((1, 3)))
    with pytest.raises(InputError, match="no client is left"):
        fit_head(Statistics.empty(FIXED))


def changed(kind: Flaw) -> Statistics:
    """Return honest statistics with one flaw."""
    honest = statistics_of(FIXED, *samples(40, 5))
    gram, cross = honest.gram.copy(), honest.cross.copy()
    count, energy = honest.samples, honest.target_energy
    unit = FIXED.unit
    match kind:
        case Flaw.SAMPLES:
            count = -1
        case Flaw.CONSTANT:
            count += 1
        case Flaw.WHOLE_SUMS:
            gram[-1, 0] += 1
            gram[0, -1] += 1
        case Flaw.DIAGONAL:
            gram[0, 0] = -2
        case Flaw.PARITY:
            gram[0, 0] += 1
        case Flaw.COLUMN_SUM:
            gram[0, -1] = gram[-1, 0] = 2 * unit * (gram[0, 0] // 2) + unit * (gram[0, 0] % 2)
        case Flaw.TRACE:
            gram[0, 0] += 2 * count * FIXED.row_limit
        case Flaw.CAUCHY_SCHWARZ:
            gram[0, 1] = gram[1, 0] = int(np.sqrt(float(gram[0, 0]) * float(gram[1, 1]))) + 2
        case Flaw.SEMI_DEFINITE:  # each pair is possible, but not all three together
            for row, column in ((0, 1), (1, 2), (0, 2)):
                entry = int(0.9 * np.sqrt(float(gram[row, row]) * float(gram[column, column])))
                gram[row, column] = gram[column, row] = -entry
        case Flaw.TARGETS:
            energy = count * FIXED.target_limit + 1
        case Flaw.CROSS:
            cross[2, 1] = int(np.sqrt(float(gram[2, 2]) * float(energy))) + 2
    return made_statistics(FIXED, gram, cross, count, energy)


@pytest.mark.parametrize("flaw", list(Flaw))
def test_hostile_statistics_are_refused_and_named(flaw: Flaw) -> None:
    assert find_flaw(changed(flaw))[0] is flaw


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(0, 60), st.integers(0, 2**32), st.integers(0, 3))
def test_honest_statistics_pass_even_where_they_are_singular(count: int, seed: int, copies: int) -> None:
    phi, targets = samples(count, seed)
    phi[:, :copies] = phi[:, 3:]  # copies of the same feature
    phi *= 0.5
    assert find_flaw(statistics_of(FIXED, phi, targets)) == (None, "")


# ---- negative directions, by both methods

WIDE = FixedPoint(features=60, outputs=1)
TOLERANCE = 4.0 * WIDE.width**2 * np.finfo(np.float64).eps


def smallest_eigenvalue(gram: Integers) -> float:
    """Return the smallest eigenvalue of G scaled to ones on its diagonal, by another algorithm."""
    lengths = np.sqrt(np.diagonal(gram).astype(np.float64))
    return float(np.linalg.eigvalsh(gram / lengths[:, None] / lengths[None, :])[0])


def wide_gram(count: int, seed: int) -> Integers:
    """Return G of a few samples with many features, some of them small, nearly equal, or equal."""
    phi = np.random.default_rng(seed).normal(size=(count, WIDE.features)) * np.logspace(-2, 0, WIDE.features)
    phi[:, :10] = phi[:, 40:50] * (1.0 + 1e-4 * np.arange(10))
    phi *= 0.9 * WIDE.norm / np.linalg.norm(phi, axis=1, keepdims=True)
    return statistics_of(WIDE, phi, np.zeros((count, 1))).gram


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 6), st.integers(0, 2**32))
def test_data_have_no_negative_direction_by_either_way(count: int, seed: int) -> None:
    gram = wide_gram(count, seed)
    present = np.ix_(np.diagonal(gram) > 0, np.diagonal(gram) > 0)
    assert is_semi_definite(gram, count)
    assert is_semi_definite(gram, WIDE.width)
    with patch.object(statistics_check, "_has_factor", side_effect=AssertionError("the first way is enough")):
        assert is_semi_definite(gram, count)
    assert smallest_eigenvalue(gram[present]) > -TOLERANCE


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 6), st.integers(0, 2**32), st.floats(-13.0, 0.0), st.data())
def test_a_negative_direction_is_refused_wherever_it_lies(
    count: int, seed: int, magnitude: float, data: st.DataObject
) -> None:
    """A pair of entries moved by 10^magnitude of their bound is refused if the smallest eigenvalue is negative."""
    gram = wide_gram(count, seed).copy()
    row, column = data.draw(st.lists(st.integers(0, WIDE.features), min_size=2, max_size=2, unique=True))
    room = np.sqrt(float(gram[row, row])) * np.sqrt(float(gram[column, column]))
    gram[row, column] += int(data.draw(st.sampled_from([-1, 1])) * 10.0**magnitude * room)
    gram[column, row] = gram[row, column]
    present = np.ix_(np.diagonal(gram) > 0, np.diagonal(gram) > 0)
    smallest = smallest_eigenvalue(gram[present])
    for rank in (count, WIDE.width):
        if smallest < -2.0 * TOLERANCE:
            assert not is_semi_definite(gram, rank)
        elif smallest > -TOLERANCE / 8.0:
            assert is_semi_definite(gram, rank)


def test_what_is_left_beside_the_pivots_counts() -> None:
    """After one pivot only off-diagonal entries remain, and zero squares allow none."""
    gram = np.full((20, 20), 100, dtype=np.int64)
    assert is_semi_definite(gram, 1)
    gram[3, 7] = gram[7, 3] = 99
    assert not is_semi_definite(gram, 1)
    assert not is_semi_definite(gram, 20)
    # More positive directions than samples: the second method decides.
    assert is_semi_definite(np.diag(np.arange(1, 41)), 1)


# ---- the head


def test_the_head_is_that_of_other_libraries() -> None:
    phi, targets = samples(200, 7)
    statistics = statistics_of(FIXED, phi, targets)
    head = fit_head(statistics, 0.003)
    rows = FIXED.quantised_features(phi) / FIXED.unit
    wanted = FIXED.quantised_targets(targets) / 2**FIXED.target_bits
    ridge = Ridge(alpha=head.penalty, fit_intercept=False, solver="svd").fit(rows, wanted)
    np.testing.assert_allclose(head.weights, ridge.coef_.T, rtol=1e-9, atol=1e-12)
    stacked = np.vstack([rows, np.sqrt(head.penalty) * np.eye(FIXED.width)])
    least = np.linalg.lstsq(stacked, np.vstack([wanted, np.zeros((FIXED.width, 3))]), rcond=None)[0]
    np.testing.assert_allclose(head.weights, least, rtol=1e-9, atol=1e-12)
    assert head.residual <= 1e-9
    assert penalty(statistics, 0.003) == pytest.approx(0.003 * np.trace(rows.T @ rows) / FIXED.width, rel=1e-12)


@pytest.mark.parametrize(("count", "features"), [(300, 6), (40, 39), (30, 60), (8, 1)])
def test_cross_validation_needs_only_the_sums(count: int, features: int) -> None:
    """The sums agree with generalised cross-validation on the design matrix, whose hat matrix has n rows."""
    fixed = FixedPoint(features=features, outputs=3)
    phi, targets = samples(count, 11, fixed)
    statistics = statistics_of(fixed, phi, targets)
    rows = fixed.quantised_features(phi) / fixed.unit
    wanted = fixed.quantised_targets(targets) / 2**fixed.target_bits
    wanted += 0.0
    scores = gcv_scores(statistics)
    for relative, score in zip(GRID, scores, strict=True):
        inverse = np.linalg.inv(rows.T @ rows + penalty(statistics, relative) * np.eye(fixed.width))
        hat = rows @ inverse @ rows.T
        left = np.sum((wanted - hat @ wanted) ** 2)
        if relative >= 1e-4 and np.isfinite(score):
            assert score == pytest.approx(left / count / (1.0 - np.trace(hat) / count) ** 2, rel=1e-5)
    assert np.isfinite(scores).sum() > 40
    assert relative_penalty_by_gcv(statistics) == GRID[int(np.argmin(scores))]
    assert fit_head(statistics).relative_penalty == relative_penalty_by_gcv(statistics)


def test_the_penalty_is_chosen_by_those_who_stay() -> None:
    stay, leave = (statistics_of(FIXED, *samples(count, seed)) for count, seed in ((30, 1), (300, 2)))
    found = ((stay + leave) - leave, stay, stay + leave)
    left, never, together = (fit_head(statistics).weights.tobytes() for statistics in found)
    assert left == never != together


@pytest.mark.parametrize("relative", [1e-7, 1e-3, 10.0])
def test_wide_heads_solve_the_same_equations(relative: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide heads agree for more samples than features, for fewer, and for features that are zero in every sample."""
    for count, features, zeros in ((200, 40, 0), (20, 40, 0), (200, 40, 5)):
        fixed = FixedPoint(features=features, outputs=3)
        phi, targets = samples(count, 7, fixed)
        phi[:, :zeros] = 0.0
        statistics = statistics_of(fixed, phi, targets)
        narrow = fit_head(statistics, relative)
        monkeypatch.setattr(ridge, "WIDE", features - 1)
        wide = fit_head(statistics, relative)
        monkeypatch.undo()
        assert not np.array_equal(wide.weights, narrow.weights)  # otherwise the other solver was not used
        np.testing.assert_allclose(wide.weights, narrow.weights, rtol=0.0, atol=1e-7 * np.abs(narrow.weights).max())
        assert wide.residual <= 1e-9


def test_a_wide_head_that_does_not_converge_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = FixedPoint(features=40, outputs=3)
    statistics = statistics_of(fixed, *samples(200, 7, fixed))
    monkeypatch.setattr(ridge, "WIDE", 39)
    monkeypatch.setattr(ridge, "LARGEST_ITERATIONS", 1)
    with pytest.raises(InputError, match="relative residual"):
        fit_head(statistics, 1e-7)


def test_equations_that_cannot_be_solved_are_refused() -> None:
    phi, targets = samples(10, 1)
    with pytest.raises(InputError, match="positive number"):
        fit_head(statistics_of(FIXED, phi, targets), 0.0)


# ---- targets


def test_targets_and_back() -> None:
    generator = np.random.default_rng(0)
    classes = generator.integers(5, size=20)
    several = generator.integers(2, size=(20, 5))
    numbers = generator.normal(60.0, 8.0, size=(20, 2))
    regression = Targets("regression", 2, shift=(60.0, 50.0), scale=(10.0,))
    for targets, labels in (
        (Targets("classification", 5), classes),
        (Targets("multi_label", 5, shift=(0.2,)), several),
        (regression, numbers),
    ):
        encoded = targets.encode(labels)
        assert np.all(np.linalg.norm(encoded, axis=1) <= targets.norm)
        np.testing.assert_allclose(targets.decode(encoded), labels, rtol=1e-12)
    with pytest.raises(InputError, match="scales from the shift"):
        regression.encode(np.array([[60.0, 500.0]]))
    with pytest.raises(InputError, match="0 or 1"):
        Targets("multi_label", 5).encode(classes[:, None] * np.ones(5))
    with pytest.raises(InputError, match="0 to 4"):
        Targets("classification", 5).encode(np.array([5]))
