"""Drifts from Gram matrices, against extended precision: never below the truth and hardly above it, even with
cancellation.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sifu.core.engine import Position
from sifu.engines.sim import LocalTraining, SimulatedFederation
from sifu.engines.sim.client_blocks import Part, make_block
from sifu.engines.sim.client_updates import TOLERATED_EXCESS, DualUpdates, average
from sifu.engines.sim.embedded_clients import OBJECTIVES, CheckedClient
from suite_setup import examples

Extended = np.longdouble
pytestmark = pytest.mark.skipif(np.finfo(Extended).eps > 1e-18, reason="long double is no wider than double here")


def part_of(x: list[np.ndarray], outputs: int) -> Part:
    clients = [CheckedClient(f"{i}", rows, np.zeros(len(rows), int)) for i, rows in enumerate(x)]
    block = make_block(
        clients,
        np.arange(len(x)),
        max(map(len, x)),
        OBJECTIVES["softmax"],
        outputs,
        torch.float64,
        np.full(len(x), 0.1),
        between_samples=True,
    )
    everyone = np.arange(len(x))
    (part,) = block.parts(everyone, everyone)
    return part


def duals(x: list[np.ndarray], generator: np.random.Generator, outputs: int, scale: float) -> np.ndarray:
    """Return the dual coefficients V' (clients, outputs, rows), zero on padding."""
    dual = np.zeros((len(x), outputs, max(len(rows) for rows in x)))
    for place, samples in enumerate(x):
        dual[place, :, : len(samples)] = generator.standard_normal((outputs, len(samples))) * scale
    return dual


def exact_drifts(x: list[np.ndarray], dual: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return drifts and mean shift (from zero) of u_i = X_i' V_i in extended precision."""
    updates = np.array(
        [
            dual[place, :, : len(rows)].astype(Extended) @ np.column_stack([rows, np.ones(len(rows))]).astype(Extended)
            for place, rows in enumerate(x)
        ]
    )
    samples = np.array([len(rows) for rows in x]).astype(Extended)
    mean = (samples[:, None, None] * updates).sum(axis=0) / samples.sum()
    return np.sqrt(((updates - mean) ** 2).sum(axis=(1, 2))), np.sqrt((mean**2).sum())


def found_drifts(x: list[np.ndarray], dual: np.ndarray):
    part = part_of(x, dual.shape[1])
    assert part.gram is not None
    updates = DualUpdates(part, part.gram, torch.tensor(dual), True)
    size = dual.shape[1] * (x[0].shape[1] + 1)
    return average([updates], np.zeros(size), np.array([len(rows) for rows in x]))


class Overflowed:
    """Updates with one distance that overflowed."""

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        return torch.ones(4, dtype=torch.float64)

    def distances(self, mean: torch.Tensor, norms: np.ndarray) -> None:
        norms[:] = (np.nan, 1.0, 0.0)

    def sum_error(self, weights: np.ndarray, mean_norm: float) -> float:
        return 0.0


def test_a_distance_that_overflowed_bounds_nothing():
    """An overflowed distance becomes an infinite drift; NaN would compare as false and pass for no drift."""
    averaged = average([Overflowed()], None, np.array([1, 1, 1]))
    assert averaged.drifts.tolist() == [np.inf, np.nextafter(1.0, 2.0), 0.0]


@settings(max_examples=examples(150), deadline=None)
@given(
    st.integers(2, 12),
    st.integers(1, 60),
    st.integers(1, 5),
    st.integers(0, 10**6),
    st.floats(0.0, 16.0),
    st.sampled_from([1e-170, 1e-100, 1e-3, 1.0, 1e100]),
)
def test_drifts_are_never_below_the_truth(count, features, outputs, seed, closeness, scale):
    """Drifts are upper bounds for clients whose updates agree to `closeness` digits, so that the squares cancel."""
    generator = np.random.default_rng(seed)
    rows = int(generator.integers(1, 9))
    common = generator.standard_normal((rows, features))
    x = [common + generator.standard_normal((rows, features)) * 10.0**-closeness for _ in range(count)]
    dual = duals(x[:1], generator, outputs, scale).repeat(count, axis=0)
    measured = found_drifts(x, dual)
    drifts, shift = exact_drifts(x, dual)
    assert (measured.drifts >= drifts).all()
    assert measured.mean_shift >= shift
    size = np.linalg.norm(dual[0]) * np.linalg.norm(common) if scale > 1e-100 else 0.0
    if closeness < 4.0 and scale > 1e-100:
        assert (measured.drifts <= drifts * (1.0 + TOLERATED_EXCESS)).all()
    if scale > 1e-100:
        assert (measured.drifts <= drifts * (1.0 + TOLERATED_EXCESS) + 1e-12 * size * (1 + rows)).all()


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(5, 10), min_size=2, max_size=20), st.integers(1, 60), st.integers(0, 10**6))
def test_unequal_clients_with_updates_of_their_own_are_tight(sizes, features, seed):
    generator = np.random.default_rng(seed)
    x = [generator.standard_normal((size, features)) for size in sizes]
    dual = duals(x, generator, 3, 1.0)
    measured = found_drifts(x, dual)
    drifts, shift = exact_drifts(x, dual)
    assert (measured.drifts >= drifts).all()
    assert (measured.drifts <= drifts * (1.0 + TOLERATED_EXCESS)).all()
    assert shift <= measured.mean_shift <= shift * (1.0 + 1e-6) + 1e-9


def test_control_without_the_allowance_cancellation_would_under_report():
    """Negative control: the plain formula sqrt(s - 2c + q) is below the truth in many cases; the reported drift never
    is.
    """
    below = 0
    for seed in range(40):
        generator = np.random.default_rng(seed)
        common = generator.standard_normal((6, 30))
        x = [common + 1e-9 * generator.standard_normal((6, 30)) for _ in range(8)]
        dual = duals(x[:1], generator, 3, 1.0).repeat(8, axis=0)
        extended = np.array([np.column_stack([rows, np.ones(6)]) for rows in x])
        updates = dual @ extended
        mean = updates.mean(axis=0)
        own = np.einsum("kci,kij,kcj->k", dual, extended @ extended.transpose(0, 2, 1), dual)
        along = (dual * (extended @ mean.T).transpose(0, 2, 1)).sum(axis=(1, 2))
        plain = np.sqrt(np.maximum(own - 2 * along + (mean**2).sum(), 0.0))
        drifts, _ = exact_drifts(x, dual)
        below += int((plain < drifts).sum())
        reported = found_drifts(x, dual).drifts
        assert (reported >= drifts).all()
        assert (reported <= drifts * (1 + 1e-4)).all()
    assert below > 50


def test_whole_rounds_are_between_the_truth_and_a_millionth_more(make_clients):
    """Drifts of whole rounds agree with extended-precision averages of the trainer's local models."""
    clients = make_clients("softmax", sizes=(5, 6, 8, 9, 10), features=40)
    federation = SimulatedFederation(clients, "softmax", LocalTraining(0.01, 5, weight_decay=0.1))
    start = np.random.default_rng(0).standard_normal(federation.layout.size)
    who = np.arange(5)
    result = federation.run_round(start, Position(0, 0), who)
    local = np.zeros((5, start.size), dtype=Extended)
    for places, rows in federation._trainer.train(start, Position(0, 0), who):
        local[places] = rows.numpy()
    samples = np.array([5, 6, 8, 9, 10], dtype=Extended)
    mean = (samples[:, None] * local).sum(axis=0) / samples.sum()
    drifts = np.sqrt(((local - mean) ** 2).sum(axis=1)).astype(float)
    assert result.drifts == pytest.approx(drifts, rel=1e-6)
    assert result.mean_shift == pytest.approx(float(np.sqrt(((mean - start) ** 2).sum())), rel=1e-9)
    assert result.model == pytest.approx(mean.astype(float), rel=1e-12, abs=1e-13)


def test_one_participant_is_its_own_mean(make_federation):
    federation = make_federation(features=40, rate=0.01)
    result = federation.run_round(np.zeros(federation.layout.size), Position(0, 0), np.array([1]))
    assert result.drifts.tolist() == [0.0]
