"""Whole batches of softmax regression in one call: the same bits with any number of threads, compiled or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from sifu.core.engine import Position
from sifu.engines.sim import LocalTraining, SimulatedFederation, SimulationSettings, linear
from sifu.theory.participation import Participation

HERE = Position(0, 3)


@dataclass(frozen=True)
class Client:
    """Client whose samples are large enough to be multiplied in place."""

    name: str
    x: np.ndarray
    y: np.ndarray


def federation(rate: float = 0.05, strategy: Any = "auto", dtype: Any = "float32") -> SimulatedFederation:
    """Return a federation in which ten of twelve clients take part, so that they are not contiguous in memory."""
    generator = np.random.default_rng(5)
    clients = [
        Client(f"{number}", generator.standard_normal((60, 600)), generator.integers(0, 3, 60)) for number in range(12)
    ]
    return SimulatedFederation(
        clients,
        "softmax",
        LocalTraining(rate, 4),
        SimulationSettings(participation=Participation.parse("fixed(10)"), dtype=dtype, seed=2, strategy=strategy),
    )


def step_and_drifts(used: SimulatedFederation) -> np.ndarray:
    """Return the change of a nonzero model in a round, with the drifts and the mean shift."""
    start = np.linspace(-0.01, 0.01, used.layout.size).astype(used.layout.dtype)
    done = used.run_round(start, HERE, np.arange(12))
    return np.concatenate([(done.model - start).astype(np.float64), done.drifts, [done.mean_shift]])


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Yield a function that sets the number of torch's threads; rounds of any size then use them."""
    before = torch.get_num_threads()
    monkeypatch.setattr(linear, "SMALL_ROUND", 0)
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_threads_and_compiling_change_no_bit(monkeypatch: pytest.MonkeyPatch, threads: Any, dtype: str) -> None:
    threads(1)
    expected = step_and_drifts(federation(dtype=dtype))
    for count in (2, 3):
        threads(count)
        assert np.array_equal(step_and_drifts(federation(dtype=dtype)), expected)
        assert torch.get_num_threads() == count
    monkeypatch.setattr(linear, "SCRIPT_AFTER", 1)
    assert np.array_equal(step_and_drifts(federation(dtype=dtype)), expected)
    assert not np.array_equal(step_and_drifts(federation(rate=0.05 * (1 + 2e-7), dtype=dtype)), expected)


def test_gram_matrices_are_products_of_one_thread(monkeypatch: pytest.MonkeyPatch, threads: Any) -> None:
    """Gram matrices are computed with one thread; the tests above cannot show this if BLAS is limited to one thread."""
    used, product = [], torch.bmm

    def watched(*factors: Any, **options: Any) -> Any:
        used.append(torch.get_num_threads())
        return product(*factors, **options)

    threads(2)
    monkeypatch.setattr(torch, "bmm", watched)
    federation()
    assert set(used) == {1}
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("gathered", [True, False])
def test_it_is_what_the_other_ways_compute(monkeypatch: pytest.MonkeyPatch, threads: Any, gathered: bool) -> None:
    threads(2)
    monkeypatch.setattr(linear, "GATHERED", gathered)
    used: list[int] = []
    updates = linear.WholeBatches.updates

    def counted(self: Any, *arguments: Any) -> Any:
        used.append(1)
        return updates(self, *arguments)

    monkeypatch.setattr(linear.WholeBatches, "updates", counted)
    step = step_and_drifts(federation())
    assert used
    monkeypatch.setattr(linear.VectorisedTrainer, "_whole_batches", lambda *_: None)
    for other in (federation(), federation(strategy="loop")):
        assert step == pytest.approx(step_and_drifts(other), rel=1e-4, abs=1e-6 * np.abs(step).max())
    assert len(used) == 1


def test_what_goes_wrong_in_another_thread_is_said(monkeypatch: pytest.MonkeyPatch, threads: Any) -> None:
    threads(2)
    train = linear.WholeBatches._train

    def fails(self: Any, block: Any, model: Any, rows: list[int], into: Any) -> None:
        if rows[0] > 2:
            raise RuntimeError("no memory")
        train(self, block, model, rows, into)

    monkeypatch.setattr(linear.WholeBatches, "_train", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        step_and_drifts(federation())
