"""sifu against the plain loop on a small workload A, as a ratio: a guard against becoming slow, not a measurement.

Both run alternately in this process on one thread, and the best turn of each counts. The test compares processor time,
which hardly depends on other work on the machine, not elapsed time.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from peers.contest import total_loss
from peers.ours import Ours
from peers.plain import Plain
from peers.workloads import A, Workload, make

SMALL = dataclasses.replace(A, clients=20)
TURNS, ROUNDS, AT_LEAST = 5, 1, 2.0


@pytest.fixture
def workload(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Workload:
    """Make synthetic data in the shape of workload A, whatever data this machine has."""
    monkeypatch.delenv("SIFU_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return make(SMALL)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def best_times(*contestants: Callable[[int], None]) -> list[float]:
    """Return the shortest turn of each contestant; a turn is ROUNDS rounds, and turns alternate."""
    best = [float("inf")] * len(contestants)
    for turn in range(TURNS):
        for place, contestant in enumerate(contestants):
            started = time.process_time()
            for number in range(ROUNDS):
                contestant(turn * ROUNDS + number)
            best[place] = min(best[place], time.process_time() - started)
    return best


def test_tracked_rounds_are_at_least_twice_as_fast_as_the_plain_loop(workload: Workload) -> None:
    plain, ours = Plain(workload), Ours(workload, tracking=True)
    plain_time, our_time = best_times(
        lambda number: plain.round(workload.participants(number)),
        lambda number: ours.round(np.array(workload.participants(number))),
    )
    # Both did the same rounds with the same clients, so the times compare the same work.
    assert total_loss(workload, ours.parameters()) == pytest.approx(total_loss(workload, plain.model), rel=1e-4)
    assert plain_time / our_time >= AT_LEAST


def test_the_guard_notices_an_engine_that_is_no_faster(workload: Workload) -> None:
    plain, slow = Plain(workload), Plain(workload)

    def twice(number: int) -> None:
        for _ in range(2):
            slow.round(workload.participants(number))

    plain_time, slow_time = best_times(lambda number: plain.round(workload.participants(number)), twice)
    assert plain_time / slow_time < AT_LEAST
