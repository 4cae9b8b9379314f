"""Rounds in branches of a graph: they agree with the plain loop, and depend on nothing but a group's own members.

Without a GPU the same functions run without a graph. `make test-gpu` runs them on a GPU, in graphs.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sifu.core.engine import Position
from sifu.core.round_stream import RoundsWanted, stream_group_rounds, stream_rounds
from sifu.core.spec import StopSpec
from sifu.data.client_data import ClientData
from sifu.engines.sim import (
    ConvNet,
    Convolution,
    LinearModel,
    LocalTraining,
    ModuleModel,
    SimulatedFederation,
    SimulationSettings,
    make_model,
)
from sifu.engines.sim.gpu import branches, graph_engine
from sifu.engines.sim.gpu.branches import is_captured
from sifu.engines.sim.gpu.graph_engine import GraphEngine
from sifu.errors import InputError, RoundRejectedError
from sifu.theory.participation import Participation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = (2, 8, 8)
SIZES = (7, 4, 40, 5, 33, 12)
NETWORK = ConvNet(SHAPE, (Convolution(4, 1), Convolution(6, 1, pool=False)), (5,), 3)

MODELS: dict[str, Any] = {
    "network": ModuleModel(NETWORK),
    "norms": ModuleModel(
        lambda: nn.Sequential(
            nn.Conv2d(SHAPE[0], 8, 3),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.AvgPool2d(6),
            nn.Flatten(),
            nn.Linear(8, 3),
        )
    ),
    "mlp": make_model("mlp", SHAPE, 3),
    "linear": LinearModel("softmax", 128, 3),
    "layers of torch": ModuleModel(lambda: nn.Sequential(nn.Flatten(), nn.Linear(128, 4), nn.Tanh(), nn.Linear(4, 3))),
}
TRAININGS = {
    "whole data": LocalTraining(0.05, 3),
    "momentum": LocalTraining(0.05, 4, 4, 0.9),
    "batches larger than some clients, decay": LocalTraining(0.05, 2, 6, 0.5, weight_decay=0.1),
    "more steps than a graph": LocalTraining(0.02, 13, 5),
}


def clients_of(sizes: tuple[int, ...] = SIZES, seed: int = 0) -> list[ClientData]:
    """Return clients whose data depend on their place and `seed` only."""
    clients = []
    for number, rows in enumerate(sizes):
        generator = np.random.default_rng([seed, number])
        clients.append(
            ClientData(f"client-{number}", generator.standard_normal((rows, *SHAPE)), generator.integers(0, 3, rows))
        )
    return clients


def engines(
    model: Any, training: LocalTraining, clients: list[ClientData] | None = None, dtype: str = "float64", **more: Any
) -> tuple[GraphEngine, SimulatedFederation]:
    """Return the engine on the device, and the plain loop on the CPU."""
    settings = SimulationSettings(dtype=dtype, seed=3, strategy="loop", **more)  # type: ignore[arg-type]
    federation = SimulatedFederation(clients or clients_of(), model, training, settings)
    return GraphEngine(federation, DEVICE), federation


def rounds_of(engine: Any, rounds: int, groups: list[np.ndarray], evaluated: Any = None) -> list[list[Any]]:
    """Return the streamed rounds of some groups from the initial model."""
    start = engine.initial_model(0)
    stop = StopSpec(target=0.0, min_rounds=0, max_rounds=rounds, evaluate_every=2)
    wanted = RoundsWanted(stop, start.astype(np.float64), evaluated=evaluated)
    return list(stream_group_rounds(engine, [start] * len(groups), Position(1, 0), groups, wanted))


def bits_of(rounds: list[list[Any]], group: int = 0) -> list[bytes]:
    """Return the models of a group after each round."""
    return [together[group].fetch_model().tobytes() for together in rounds]


def compare(mine: Any, reference: Any, tolerance: float) -> None:
    """Compare two streamed rounds up to rounding."""
    model = reference.fetch_model()
    assert mine.participants.tolist() == reference.participants.tolist()
    assert np.abs(mine.fetch_model() - model).max() <= tolerance * np.abs(model).max()
    assert mine.drifts == pytest.approx(reference.drifts, rel=1e3 * tolerance, abs=1e-12)
    assert (mine.mean_shift, mine.distance) == pytest.approx(
        (reference.mean_shift, reference.distance), rel=1e3 * tolerance
    )
    assert mine.rounding == pytest.approx(reference.rounding, rel=1e-6)
    if reference.evaluation is not None:  # the plain loop evaluates no group
        assert mine.evaluation.clients.tolist() == reference.evaluation.clients.tolist()
        assert mine.evaluation.correct.tolist() == reference.evaluation.correct.tolist()
        assert mine.evaluation.loss_sum == pytest.approx(reference.evaluation.loss_sum, rel=1e3 * tolerance)


@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS.keys())
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_rounds_agree_with_the_plain_loop(model: Any, training: LocalTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds with a random number of participants, more of them than branches."""
    monkeypatch.setattr(branches, "BRANCHES", 3)
    engine, loop = engines(model, training, participation=Participation("poisson", rate=0.7))
    start = loop.initial_model(0)
    wanted = RoundsWanted(StopSpec(0.0, 0, 3, 2), start.astype(np.float64))
    streams = (stream_rounds(each, start, Position(0, 0), np.arange(6)[::-1], wanted) for each in (engine, loop))
    pairs = list(zip(*streams, strict=True))
    assert len(pairs) == 3
    for mine, reference in pairs:
        compare(mine, reference, 1e-12)


def test_float32_agrees_and_single_rounds_have_the_bits_of_a_stream() -> None:
    engine, loop = engines(MODELS["network"], TRAININGS["momentum"], dtype="float32")
    model, everyone = engine.initial_model(0), np.arange(6)
    streamed = rounds_of(engine, 2, [everyone])
    for at in range(2):
        model = engine.run_round(model, Position(1, at), everyone).model
        assert model.dtype == np.float32
        assert model.tobytes() == streamed[at][0].fetch_model().tobytes()
    for (mine,), (reference,) in zip(streamed, rounds_of(loop, 2, [everyone]), strict=True):
        compare(mine, reference, 1e-5)


@pytest.mark.parametrize("training", [TRAININGS["whole data"], TRAININGS["momentum"]], ids=["whole data", "momentum"])
@pytest.mark.parametrize("model", [MODELS["network"], MODELS["norms"], MODELS["linear"]])
def test_a_group_has_the_same_bits_whoever_trains_beside_it(
    model: Any, training: LocalTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other clients have other data and sizes, another slot, other graphs, or are not there at all."""
    group, others = np.array([0, 2, 3]), np.array([1, 4, 5])
    engine, _ = engines(model, training, dtype="float32")
    expected = bits_of(rounds_of(engine, 3, [group, others]))
    assert bits_of(rounds_of(engine, 3, [others, group]), 1) == expected
    changed = clients_of((7, 90, 40, 5, 3, 130), seed=1)
    for place in group:
        changed[place] = clients_of()[place]
    beside, _ = engines(model, training, changed, dtype="float32")
    assert bits_of(rounds_of(beside, 3, [others, group]), 1) == expected
    alone, _ = engines(model, training, [clients_of()[place] for place in group], dtype="float32", numbers=group)
    assert bits_of(rounds_of(alone, 3, [np.arange(3)])) == expected
    monkeypatch.setattr(branches, "BRANCHES", 2)
    narrow, _ = engines(model, training, dtype="float32")
    assert bits_of(rounds_of(narrow, 3, [others, group]), 1) == expected
    # Negative control: a single label of a member changes the bits.
    wrong = clients_of()
    wrong[2] = replace(wrong[2], y=np.roll(wrong[2].y, 1))
    control, _ = engines(model, training, wrong, dtype="float32")
    assert bits_of(rounds_of(control, 3, [group, others])) != expected


def test_a_clients_values_reach_no_other_group() -> None:
    """A client whose samples overflow spoils its own group's model and no other."""
    clients = clients_of()
    clients[1] = replace(clients[1], x=np.full_like(clients[1].x, 3e38))
    group, others = np.array([0, 2, 3]), np.array([1, 4, 5])
    engine, _ = engines(MODELS["network"], TRAININGS["momentum"], clients, dtype="float32")
    sound, _ = engines(MODELS["network"], TRAININGS["momentum"], dtype="float32")
    starts = [torch.from_numpy(engine.initial_model(0)).to(DEVICE)] * 6
    mine, reference = (each._train(starts, Position(0, 0), np.arange(6)).cpu().numpy() for each in (engine, sound))
    assert not np.isfinite(mine[1]).all()
    assert np.delete(mine, 1, 0).tobytes() == np.delete(reference, 1, 0).tobytes()
    with pytest.raises(RoundRejectedError, match="NaN or Inf"):
        rounds_of(engine, 1, [group, others])


def test_an_empty_round_changes_nothing() -> None:
    engine, _ = engines(MODELS["network"], TRAININGS["momentum"], dtype="float32")
    start = engine.initial_model(0)
    empty = engine.run_round(start, Position(0, 0), np.zeros(0, dtype=np.int64))
    assert (empty.model.tobytes(), empty.participants.size, empty.mean_shift) == (start.tobytes(), 0, 0.0)


def test_evaluations_do_not_depend_on_who_else_is_evaluated() -> None:
    engine, loop = engines(MODELS["network"], TRAININGS["momentum"], clients_of((300, 4, 129, 128)), dtype="float32")
    model = engine.initial_model(0)
    whole = engine.evaluate(model, np.arange(4))
    assert whole.correct.tolist() == loop.evaluate(model, np.arange(4)).correct.tolist()
    for client in range(4):
        alone = engine.evaluate(model, np.array([client]))
        assert (alone.correct[0], alone.loss_sum[0]) == (whole.correct[client], whole.loss_sum[client])


def test_bits_that_do_not_repeat_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    train, calls = branches.Branches.train, []

    def noisy(self: Any, starts: Any, rows: Any, rates: Any, shares: Any, into: torch.Tensor) -> None:
        train(self, starts, rows, rates, shares, into)
        calls.append(into.add_(1e-6 * len(calls)))

    monkeypatch.setattr(branches.Branches, "train", noisy)
    engine, _ = engines(MODELS["network"], TRAININGS["momentum"], dtype="float32")
    with pytest.raises(InputError, match="other bits when"):
        rounds_of(engine, 1, [np.arange(6)])


@pytest.mark.parametrize("ahead", [1, 3])
def test_rounds_submitted_ahead_change_nothing(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engines(MODELS["network"], TRAININGS["momentum"], dtype="float32")
    expected = bits_of(rounds_of(engine, 4, [np.arange(6)]))
    monkeypatch.setattr(graph_engine, "AHEAD", ahead)
    assert bits_of(rounds_of(engine, 4, [np.arange(6)])) == expected


class Branching(nn.Module):
    """Module that branches on a computed number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(128, 3)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the scores, with a sign that depends on the data."""
        scores: torch.Tensor = self.layer(values.flatten(1))
        return scores if float(scores.sum()) > 0.0 else -scores


@pytest.mark.parametrize(
    "model",
    [
        ModuleModel(Branching),
        ModuleModel(lambda: nn.Sequential(nn.Flatten(), nn.Linear(128, 3), nn.BatchNorm1d(3))),
        ModuleModel(lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(128, 3))),
        ModuleModel(lambda: nn.Sequential(nn.Flatten(), nn.Linear(128, 3)), custom_loss=nn.functional.cross_entropy),
        ModuleModel(replace(NETWORK, dropout=0.1)),
    ],
    ids=["control flow", "batch statistics", "dropout", "loss", "keyed dropout"],
)
def test_what_a_graph_cannot_replay_is_not_captured(model: Any) -> None:
    assert not is_captured(model)


def test_every_model_above_is_captured() -> None:
    assert all(map(is_captured, MODELS.values()))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_with_nearly_full_memory_bits_are_the_same_or_the_run_is_refused() -> None:
    """An allocation that fails is an error, never another algorithm."""
    network = ModuleModel(
        ConvNet((3, 32, 32), (Convolution(32), Convolution(64), Convolution(64, pool=False)), (64,), 10)
    )
    generator = np.random.default_rng(1)
    clients = [
        ClientData(f"{number}", generator.standard_normal((100, 3, 32, 32)), generator.integers(0, 10, 100))
        for number in range(8)
    ]

    def bits() -> list[bytes]:
        settings = SimulationSettings(dtype="float32", seed=3, strategy="loop")
        engine = GraphEngine(SimulatedFederation(clients, network, LocalTraining(0.01, 5, 20, 0.9), settings), DEVICE)
        return bits_of(rounds_of(engine, 3, [np.arange(8)]))

    expected, refused = bits(), []
    for left in (2**26, 2**28, 2**29, 2**30, 2**31, 2**32, 2**33):
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        filling = torch.empty(torch.cuda.mem_get_info()[0] - left, dtype=torch.uint8, device=DEVICE)
        try:
            assert bits() == expected
            refused.append(False)
        except (InputError, torch.OutOfMemoryError):
            refused.append(True)
        del filling
    print(f"refused with 64 MiB to 8 GiB left: {refused}")
    assert refused[0]
    assert not refused[-1]
