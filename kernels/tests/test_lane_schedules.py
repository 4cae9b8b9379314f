"""Schedules drawn on the device: the same as on every other engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sifu.core.engine import Position
from sifu.engines.sim.local_training import batch_sequence
from sifu.engines.sim.networks import ConvNet, Convolution, dropout_key
from sifu.theory.participation import Participation, base_key, place_key
from sifu_kernels.conv_plan import ALIGNMENT, DeviceLayout
from sifu_kernels.schedule import Drawing, LaneTables, draw_schedule, mix

CLIENTS, MOST = 7, 6
SIZES = np.array([[6, 5, 3, 6, 2, 4, 6], [1, 2, 3, 4, 5, 6, 6]])


def tables(seeds: tuple[int, ...] = (3, 9)) -> LaneTables:
    def keys(purpose: str) -> torch.Tensor:
        return torch.from_numpy(np.array([base_key(seed, purpose) for seed in seeds], dtype=np.uint64).view(np.int64))

    rows = np.arange(2 * CLIENTS).reshape(2, CLIENTS, 1) * MOST + np.arange(MOST)
    rows = np.where(np.arange(MOST) < SIZES[..., None], rows, -1)
    return LaneTables(
        torch.from_numpy(rows),
        torch.from_numpy(SIZES),
        keys("participation"),
        keys("batches"),
        keys("dropout"),
        int(SIZES.min()),
    )


@pytest.mark.parametrize("participation", ["all", "fixed(3)", "poisson(0.5)"])
@pytest.mark.parametrize("batch", [2, 4, 6])
def test_participants_batches_and_dropout_are_those_of_the_other_engines(participation: str, batch: int) -> None:
    rule, steps, rounds, seeds = Participation.parse(participation), 5, 4, (3, 9)
    active = np.ones((2, CLIENTS), dtype=bool)
    active[1, 2] = False
    drawing = Drawing(CLIENTS, rule, batch, steps, 2)
    schedule = draw_schedule(
        tables(),
        torch.from_numpy(active),
        torch.tensor([0, 2]),
        torch.tensor([5, 0]),
        rounds,
        drawing,
    )
    for lane, (branch, first) in enumerate([(0, 5), (2, 0)]):
        for ahead in range(rounds):
            position = Position(branch, first + ahead)
            key = place_key(base_key(seeds[lane], "participation"), position.branch, position.round)
            drawn = rule.draw(np.flatnonzero(active[lane]), key).tolist()
            who = schedule.participants[ahead, lane].numpy()
            assert who[who >= 0].tolist() == drawn
            for slot, client in enumerate(drawn):
                assert float(schedule.weights[ahead, lane, slot]) == SIZES[lane, client] / SIZES[lane, drawn].sum()
                batches = batch_sequence(batch, int(SIZES[lane, client]), seeds[lane], position, int(client), steps)
                for step, expected in enumerate(batches):
                    rows = schedule.rows[ahead, step, lane * CLIENTS + slot].numpy()
                    places = rows[rows >= 0] - (lane * CLIENTS + client) * MOST
                    assert places.tolist() == expected.tolist()
                    for layer in range(2):
                        wanted = int(dropout_key(seeds[lane], position, int(client), step, layer))
                        assert int(schedule.dropout[ahead, step, layer, lane * CLIENTS + slot]) % 2**64 == wanted


def test_another_seed_draws_others() -> None:
    """Negative control: another seed draws other participants."""
    drawing = Drawing(3, Participation("fixed", count=3), 2, 2, 0)
    everyone = torch.ones((2, CLIENTS), dtype=torch.bool)
    zero = torch.zeros(2, dtype=torch.int64)
    first, second = (draw_schedule(tables(seeds), everyone, zero, zero, 8, drawing) for seeds in ((3, 9), (4, 9)))
    assert not bool((first.participants[:, 0] == second.participants[:, 0]).all())
    assert bool((first.participants[:, 1] == second.participants[:, 1]).all())


def test_more_participants_than_slots_are_counted() -> None:
    drawing = Drawing(2, Participation("all"), 2, 2, 0)
    everyone = torch.ones((2, CLIENTS), dtype=torch.bool)
    zero = torch.zeros(2, dtype=torch.int64)
    assert int(draw_schedule(tables(), everyone, zero, zero, 1, drawing).drawn.max()) == CLIENTS


def test_the_hash_is_that_of_core() -> None:
    from sifu.theory import participation as draws

    values = np.random.default_rng(0).integers(0, 2**64, 1000, dtype=np.uint64)
    assert (mix(torch.from_numpy(values.view(np.int64))).numpy().view(np.uint64) == draws.mix(values)).all()


@pytest.mark.parametrize(
    "network",
    [
        ConvNet((3, 8, 8), (Convolution(5, 1), Convolution(6, 0, pool=False)), (7, 4), 3),
        ConvNet((1, 9, 9), (Convolution(4),), (), 2),
    ],
)
def test_every_parameter_has_one_aligned_place(network: ConvNet) -> None:
    layout = DeviceLayout.of(network)
    assert np.unique(layout.entries).size == network.parameters == layout.entries.size
    assert layout.entries.min() >= 0
    assert layout.entries.max() < layout.size
    places = [
        at for layer in (*layout.convolutions, *layout.hidden, layout.last) for at in (layer.weight_at, layer.bias_at)
    ]
    assert all(at % ALIGNMENT == 0 for at in places)
    assert layout.size % ALIGNMENT == 0
