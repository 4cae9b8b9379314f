"""Groups as lanes: groups trained separately in one program get the bits of groups trained one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sifu.core.engine import Position
from sifu.core.round_stream import RoundsWanted, stream_group_rounds
from sifu.core.spec import StopSpec
from sifu.engines.sim.networks import ConvNet, Convolution
from sifu.theory.participation import Participation
from sifu_kernels import lane_group
from sifu_kernels.lanes import lane_engines
from sifu_kernels.schedule import Packing, rounded_up, width_for

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NETWORK = ConvNet((1, 4, 4), (Convolution(2, 1),), (3,), 2, dropout=0.2)
GROUPS = [np.array([0, 3, 4]), np.array([1]), np.array([2, 5])]
ROUNDS = 2


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_group, "CHUNK", 1)
    monkeypatch.setattr(lane_group, "LONE_CHUNK", 1)


def all_rounds(engine: Any, models: list[np.ndarray], groups: list[np.ndarray]) -> list[list[tuple[Any, ...]]]:
    """Return participants, drifts, shift and the model's bits, for every round and group."""
    wanted = RoundsWanted(StopSpec(0.0, 0, ROUNDS, 2**40), models[0].astype(np.float64))
    return [
        [
            (done.participants.tolist(), done.drifts.tolist(), done.mean_shift, done.fetch_model().tobytes())
            for done in together
        ]
        for together in stream_group_rounds(engine, models, Position(0, 0), groups, wanted)
    ]


@pytest.mark.parametrize("participation", ["all", "poisson(0.6)"])
def test_groups_together_have_the_bits_of_each_alone(make_federation: Any, participation: str) -> None:
    federation, data = make_federation(NETWORK, clients=6, samples=4, participation=participation)
    start = federation.initial_model(0)
    models = [start, start * np.float32(0.5), start * np.float32(1.5)]
    (engine,) = lane_engines([federation], [data], DEVICE)
    together = all_rounds(engine, models, GROUPS)
    separate = [all_rounds(engine, [model], [members]) for model, members in zip(models, GROUPS, strict=True)]
    assert together == [[group[number][0] for group in separate] for number in range(ROUNDS)]
    # One group by `run_rounds`, with slots for all clients, has the same bits.
    wanted = RoundsWanted(StopSpec(0.0, 0, ROUNDS, 2**40), start.astype(np.float64))
    plain = [done.fetch_model().tobytes() for done in engine.run_rounds(start, Position(0, 0), GROUPS[0], wanted)]
    assert plain == [rounds[0][3] for rounds in together]
    # Negative control: different groups have different bits.
    assert together[0][0][3] != together[0][2][3]
    engine.close()


def test_groups_agree_with_the_embedded_engine(make_federation: Any) -> None:
    federation, data = make_federation(NETWORK, clients=6, participation="all")
    start = federation.initial_model(0)
    nobody = np.zeros(0, dtype=np.int64)  # groups are not evaluated while they train separately
    wanted = RoundsWanted(StopSpec(0.0, 0, ROUNDS, 2), start.astype(np.float64), evaluated=nobody)
    (engine,) = lane_engines([federation], [data], DEVICE)
    lanes = list(stream_group_rounds(engine, [start] * 3, Position(1, 0), GROUPS, wanted))
    plain = list(stream_group_rounds(federation, [start] * 3, Position(1, 0), GROUPS, wanted))
    assert len(lanes) == len(plain) == ROUNDS
    for mine, theirs in zip(lanes, plain, strict=True):
        for done, expected in zip(mine, theirs, strict=True):
            reference = expected.fetch_model()
            assert done.participants.tolist() == expected.participants.tolist()
            assert np.abs(done.fetch_model() - reference).max() <= 1e-5 * np.abs(reference).max()
            assert done.drifts == pytest.approx(expected.drifts, rel=1e-3, abs=1e-9)
            assert done.evaluation is expected.evaluation is None
    engine.close()


@pytest.mark.slow
def test_two_runs_with_groups_share_a_program_and_do_not_touch(make_federation: Any) -> None:
    federations = [make_federation(NETWORK, seed=seed, clients=6, samples=4, participation="all") for seed in (1, 2)]
    engines = lane_engines([federation for federation, _ in federations], [data for _, data in federations], DEVICE)
    starts = [federation.initial_model(0) for federation, _ in federations]
    wanted = RoundsWanted(StopSpec(0.0, 0, ROUNDS, 2**40), starts[0].astype(np.float64))
    streams = [
        stream_group_rounds(engine, [start] * 3, Position(0, 0), GROUPS, wanted)
        for engine, start in zip(engines, starts, strict=True)
    ]
    both = [
        [[done.fetch_model().tobytes() for done in groups] for groups in pair] for pair in zip(*streams, strict=True)
    ]
    for engine in engines:
        engine.close()
    for place, (federation, data) in enumerate(federations):
        (alone,) = lane_engines([federation], [data], DEVICE)
        lone = all_rounds(alone, [starts[place]] * 3, GROUPS)
        assert [[group[3] for group in groups] for groups in lone] == [pair[place] for pair in both]
        alone.close()


def test_only_filled_slots_are_trained(make_federation: Any) -> None:
    """Three groups of six clients need six slots, not three times the largest group."""
    federation, data = make_federation(NETWORK, clients=6, samples=4, participation="all")
    (engine,) = lane_engines([federation], [data], DEVICE)
    all_rounds(engine, [federation.initial_model(0)] * 3, GROUPS)
    assert [program.width for program in engine._group._programs.values()] == [6]
    engine.close()


def test_packing_is_a_permutation_that_puts_clients_first() -> None:
    generator = torch.Generator().manual_seed(1)
    participants = torch.randint(-1, 3, (4, 5, 6), generator=generator)
    most = int((participants >= 0).flatten(1).sum(dim=1).max())
    packing = Packing.of(participants, most)
    for at in range(4):
        flat, places = participants[at].flatten(), packing.places[at].flatten()
        real = torch.nonzero(flat >= 0).flatten()
        assert packing.order[at, : real.numel()].tolist() == real.tolist()
        assert places[real].tolist() == list(range(real.numel()))
        assert (places[flat < 0] == -1).all()


def test_widths_hold_every_client_and_waste_little() -> None:
    for needed in range(1, 2000):
        assert needed <= rounded_up(needed) <= needed * 1.0625
    everyone, few = Participation("all"), Participation("poisson", rate=0.2)
    assert width_for(everyone, [10] * 10) == 100
    assert width_for(few, [10] * 50) < 50 * 10
