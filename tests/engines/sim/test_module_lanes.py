"""Any module as lanes of one program: compared with the plain loop, with groups as lanes, and modules that cannot be
mapped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sifu.core.engine import Position
from sifu.core.round_stream import RoundsWanted, stream_group_rounds
from sifu.core.spec import StopSpec
from sifu.engines.sim import LocalTraining, ModuleModel, SimulatedFederation, SimulationSettings, make_model
from sifu.engines.sim.client_updates import Clipping
from sifu.engines.sim.gpu import lane_group
from sifu.engines.sim.gpu.module_program import refuse_other_gradients
from sifu.engines.sim.lanes import lane_engines
from sifu.errors import InputError
from sifu.theory.participation import Participation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HERE = Position(1, 3)
SHAPE = (2, 6, 5)


@dataclass(frozen=True)
class SomeClient:
    """Client with random images."""

    name: str
    x: np.ndarray
    y: np.ndarray


def some_clients(seed: int) -> tuple[SomeClient, ...]:
    """Return six clients of three classes; every second one has a sample less."""
    generator = np.random.default_rng(seed)
    sizes = [5 - number % 2 for number in range(6)]
    return tuple(
        SomeClient(f"c{number}", generator.standard_normal((size, *SHAPE)), generator.integers(0, 3, size))
        for number, size in enumerate(sizes)
    )


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_group, "CHUNK", 2)
    monkeypatch.setattr(lane_group, "LONE_CHUNK", 2)


def plain_convolutions() -> nn.Module:
    """Return a network with strides, dilation, padding and biases; torch computes its grouped convolution."""
    return nn.Sequential(
        nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 0)), nn.Tanh(),
        nn.Conv2d(4, 4, 3, padding="same", groups=2), nn.Tanh(),
        nn.Conv2d(4, 3, 2, dilation=2), nn.Flatten(), nn.LazyLinear(3),
    )  # fmt: skip


def convolutions() -> nn.Module:
    module = plain_convolutions()
    module(torch.zeros(1, *SHAPE))
    return module


def federation_of(
    model: Any, training: LocalTraining, participation: str = "all", seed: int = 1, **more: Any
) -> tuple[SimulatedFederation, tuple[SomeClient, ...]]:
    data = some_clients(seed)
    rule = Participation.parse(participation)
    return SimulatedFederation(
        data,
        model,
        training,
        SimulationSettings(participation=rule, dtype="float32", seed=seed, strategy="auto", **more),
    ), data


TRAININGS = {
    "momentum": LocalTraining(0.05, 3, 2, 0.9),
    "nesterov, decay, clipped": LocalTraining(0.05, 2, 2, 0.5, nesterov=True, weight_decay=0.1, clip=0.3),
    "whole batches": LocalTraining(0.05, 2),
}


@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)
@pytest.mark.parametrize("participation", ["all", "poisson(0.5)"])
@pytest.mark.parametrize(
    "model", [make_model("resnet_small", SHAPE, 3), ModuleModel(convolutions)], ids=["resnet_small", "convolutions"]
)
def test_rounds_are_those_of_the_plain_loop(model: ModuleModel, participation: str, training: LocalTraining) -> None:
    federation, data = federation_of(model, training, participation)
    start, everyone = federation.initial_model(0), np.arange(6)
    (engine,) = lane_engines([federation], [data], DEVICE)
    mine = engine.run_round(start, HERE, everyone, want_updates=True)
    loop = federation.run_round(start, HERE, everyone, want_updates=True)
    scale = np.abs(loop.model - start).max()
    assert mine.participants.tolist() == loop.participants.tolist()
    assert np.abs(mine.model - loop.model).max() <= 1e-5 * scale
    assert np.allclose(mine.drifts, loop.drifts, rtol=1e-4)
    assert np.allclose(mine.mean_shift, loop.mean_shift, rtol=1e-4)
    assert mine.updates is not None
    assert loop.updates is not None
    assert np.abs(mine.updates - loop.updates).max() <= 1e-5 * np.abs(loop.updates).max()
    looked, expected = engine.evaluate(mine.model, everyone), federation.evaluate(mine.model, everyone)
    assert looked.correct.tolist() == expected.correct.tolist()
    assert np.allclose(looked.loss_sum, expected.loss_sum, rtol=1e-5)
    # Negative control: another rate gives another step.
    other, _ = federation_of(model, replace(training, rate=training.rate * 1.01), participation)
    assert np.abs(mine.model - other.run_round(start, HERE, everyone).model).max() > 1e-4 * scale
    engine.close()


def test_groups_are_lanes() -> None:
    federation, data = federation_of(make_model("resnet_small", SHAPE, 3), TRAININGS["momentum"], "poisson(0.7)")
    start = federation.initial_model(0)
    models = [start, start * np.float32(0.5), start * np.float32(1.5)]
    groups = [np.array([0, 3, 4]), np.array([1]), np.array([2, 5])]
    wanted = RoundsWanted(StopSpec(0.0, 0, 3, 2), start.astype(np.float64), evaluated=np.array([0, 5]))
    (engine,) = lane_engines([federation], [data], DEVICE)
    lanes = list(stream_group_rounds(engine, models, Position(0, 0), groups, wanted))
    loop = list(stream_group_rounds(federation, models, Position(0, 0), groups, wanted))
    for mine, theirs in zip(lanes, loop, strict=True):
        for done, expected in zip(mine, theirs, strict=True):
            reference = expected.fetch_model()
            assert done.participants.tolist() == expected.participants.tolist()
            assert np.abs(done.fetch_model() - reference).max() <= 1e-5 * np.abs(reference).max()
            assert (done.evaluation is None) == (expected.evaluation is None)
            if done.evaluation is not None and expected.evaluation is not None:
                assert done.evaluation.correct.tolist() == expected.evaluation.correct.tolist()
    engine.close()


def test_seeds_share_a_program() -> None:
    """Two runs of the same model in a spec are lanes of one program, each with its own data."""
    pairs = [federation_of(make_model("mlp", SHAPE, 3), TRAININGS["momentum"], seed=seed) for seed in (1, 2)]
    engines = lane_engines([federation for federation, _ in pairs], [data for _, data in pairs], DEVICE)
    for engine, (federation, _) in zip(engines, pairs, strict=True):
        start = federation.initial_model(0)
        mine = engine.run_round(start, HERE, np.arange(6)).model
        assert np.abs(mine - federation.run_round(start, HERE, np.arange(6)).model).max() <= 1e-6
    for engine in engines:
        engine.close()


class Counting(nn.Module):
    """Module that counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(60, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, values: Tensor) -> Tensor:
        self.calls = self.calls + 1.0
        return self.layer(values.flatten(1))


class Branching(nn.Module):
    """Module that branches on a computed number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(60, 3)

    def forward(self, values: Tensor) -> Tensor:
        scores = self.layer(values.flatten(1))
        return scores if float(scores.sum()) > 0.0 else -scores


def flat(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(60, 3), *(type(layer)(*_arguments(layer)) for layer in layers))


def _arguments(layer: nn.Module) -> tuple[Any, ...]:
    return (layer.p,) if isinstance(layer, nn.Dropout) else (3,)


def tied() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(nn.Flatten(), nn.Linear(60, 3), layer, nn.Tanh(), layer)


REFUSED = {
    "statistics of a batch": ModuleModel(flat(nn.BatchNorm1d(3))),
    "drops units at random": ModuleModel(flat(nn.Dropout(0.5))),
    "its own loss": ModuleModel(flat(), custom_loss=lambda scores, targets: scores.square().mean()),
    "share parameters": ModuleModel(tied),
    "changes its buffers": ModuleModel(Counting),
    r"\(": ModuleModel(Branching),
}


@pytest.mark.parametrize(("reason", "model"), REFUSED.items(), ids=["norm", "drop", "loss", "tied", "buffer", "branch"])
def test_what_is_more_than_a_function_is_refused(reason: str, model: ModuleModel) -> None:
    federation, data = federation_of(model, TRAININGS["momentum"])
    with pytest.raises(InputError, match=rf"cannot be trained for many clients at once.*{reason}.*[Uu]se device cpu"):
        lane_engines([federation], [data], DEVICE)


def test_clipped_updates_and_other_precisions_are_refused() -> None:
    model = make_model("resnet_small", SHAPE, 3)
    federation, data = federation_of(model, TRAININGS["momentum"], clipping=Clipping(1.0, 0.0, "seeded", 1))
    with pytest.raises(InputError, match="cannot be clipped on a GPU"):
        lane_engines([federation], [data], DEVICE)
    federation, data = federation_of(model, TRAININGS["momentum"])
    with pytest.raises(InputError, match="found precision 'tf32x3'"):
        lane_engines([federation], [data], DEVICE, "tf32x3")


def test_a_device_that_computes_otherwise_is_refused() -> None:
    reference = torch.tensor([[1.0, -2.0, 0.5]])
    refuse_other_gradients(reference + 1e-4, reference, "float32")
    refuse_other_gradients(reference * 1.05, reference, "tf32")
    for wrong in (reference * 1.05, reference * torch.nan):
        with pytest.raises(InputError, match=r"the model's gradients on this device differ .* use device cpu"):
            refuse_other_gradients(wrong, reference, "float32")
