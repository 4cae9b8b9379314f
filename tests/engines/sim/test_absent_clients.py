"""A round has the same bits as in a federation without the absent clients (docs/theory.md, section 6.6).

The counterfactual has other sample counts and fewer clients: its engine receives nothing from the leaver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sifu.core.engine import Position
from sifu.engines.sim import (
    ConvNet,
    Convolution,
    LinearModel,
    LocalTraining,
    ModuleModel,
    SimulatedFederation,
    SimulationSettings,
    client_blocks,
    linear,
)
from sifu.engines.sim.models import Model
from sifu.theory.participation import Participation
from suite_setup import examples

ROUNDS = 3
SIZES = (9, 30, 17, 5, 64, 21, 33, 12)
"""Default sizes of the clients: the fifth is far larger than the others and could determine everyone's padding."""


@dataclass(frozen=True)
class Client:
    name: str
    x: np.ndarray
    y: np.ndarray


def clients_of(sizes: Sequence[int], shape: tuple[int, ...], outputs: int = 3) -> list[Client]:
    """Return clients whose samples depend only on their own number."""
    clients = []
    for number, size in enumerate(sizes):
        generator = np.random.default_rng(number)
        clients.append(
            Client(f"client-{number}", generator.normal(size=(size, *shape)), generator.integers(0, outputs, size))
        )
    return clients


def small_module() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3))


@dataclass(frozen=True)
class MethodOption:
    """Training configuration on the CPU."""

    model: Callable[[], Model]
    training: LocalTraining
    shape: tuple[int, ...] = (6,)
    options: dict[str, Any] | None = None


SOFTMAX = LinearModel("softmax", 6, 3, "random")
WIDE = LinearModel("softmax", 700, 3, "random")
NETWORK = ConvNet((1, 8, 8), (Convolution(4),), (8,), 3, dropout=0.3)
WAYS = {
    "between features": MethodOption(lambda: SOFTMAX, LocalTraining(0.1, 4)),
    "between features, float32": MethodOption(lambda: SOFTMAX, LocalTraining(0.1, 4), options={"dtype": "float32"}),
    "mini-batches, momentum": MethodOption(lambda: SOFTMAX, LocalTraining(0.1, 5, 8, momentum=0.9, weight_decay=0.01)),
    "small mini-batches": MethodOption(lambda: SOFTMAX, LocalTraining(0.1, 5, 3)),
    "logistic": MethodOption(lambda: LinearModel("logistic", 6, 1), LocalTraining(0.1, 4)),
    "least squares": MethodOption(lambda: LinearModel("least_squares", 6, 1), LocalTraining(0.01, 4)),
    "between samples": MethodOption(lambda: WIDE, LocalTraining(0.002, 6), (700,)),
    "between samples, float32": MethodOption(lambda: WIDE, LocalTraining(0.002, 6), (700,), {"dtype": "float32"}),
    "between samples, mini-batches": MethodOption(
        lambda: WIDE, LocalTraining(0.002, 6, 4), (700,), {"dtype": "float32"}
    ),
    "sampled": MethodOption(
        lambda: SOFTMAX, LocalTraining(0.1, 4, 8), options={"participation": Participation("poisson", 0.6)}
    ),
    "linear loop": MethodOption(lambda: SOFTMAX, LocalTraining(0.1, 4, 8), options={"strategy": "loop"}),
    "module": MethodOption(lambda: ModuleModel(small_module), LocalTraining(0.1, 3, 8), options={"dtype": "float32"}),
    "network": MethodOption(lambda: ModuleModel(NETWORK), LocalTraining(0.1, 3, 8), (1, 8, 8), {"dtype": "float32"}),
}


def federation(way: MethodOption, clients: Sequence[Client], there: Sequence[int]) -> SimulatedFederation:
    """Return a federation of the clients in `there`, with their numbers in the whole federation."""
    chosen = [clients[number] for number in there]
    return SimulatedFederation(
        chosen, way.model(), way.training, SimulationSettings(seed=5, numbers=there, **(way.options or {}))
    )


def rounds(engine: SimulatedFederation, active: np.ndarray, count: int = ROUNDS) -> np.ndarray:
    """Return models and scalars of some rounds as one array of bits."""
    model, seen = engine.initial_model(1), []
    for place in range(count):
        done = engine.run_round(model, Position(1, place), active)
        model = done.model
        seen += [model.astype(np.float64), done.drifts, done.samples.astype(np.float64), np.array([done.mean_shift])]
    return np.concatenate([*seen, engine.evaluate(model, active).loss_sum])


def counterfactuals(
    way: MethodOption, clients: Sequence[Client], leavers: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return rounds of the remaining clients, with the leavers present in the federation and without them."""
    stay = [number for number in range(len(clients)) if number not in leavers]
    with_them = federation(way, clients, range(len(clients)))
    return rounds(with_them, np.array(stay)), rounds(federation(way, clients, stay), np.arange(len(stay)))


def targets_for(way: MethodOption, clients: list[Client]) -> list[Client]:
    """Return clients with two-class labels or real targets, as the objective requires."""
    model = way.model()
    if isinstance(model, LinearModel) and model.kind == "logistic":
        return [Client(client.name, client.x, client.y % 2) for client in clients]
    if isinstance(model, LinearModel) and model.kind == "least_squares":
        return [Client(client.name, client.x, client.x[:, 0] + client.y) for client in clients]
    return clients


@pytest.mark.parametrize("leavers", [[4], [0], [3], [7], [1, 4, 6]])
@pytest.mark.parametrize("name", WAYS)
def test_a_round_has_the_bits_of_a_federation_that_never_had_the_leaver(name: str, leavers: list[int]) -> None:
    way = WAYS[name]
    here, never = counterfactuals(way, targets_for(way, clients_of(SIZES, way.shape)), leavers)
    assert np.array_equal(here, never)


@pytest.mark.parametrize("name", ["mini-batches, momentum", "between samples, float32", "module", "network"])
def test_a_group_has_the_bits_of_its_members_alone(name: str) -> None:
    """The bits of a group without the leaver depend neither on the leaver nor on other groups."""
    way, members = WAYS[name], [1, 2, 5, 7]
    clients = clients_of(SIZES, way.shape)
    with_all = rounds(federation(way, clients, range(len(SIZES))), np.array(members))
    assert np.array_equal(with_all, rounds(federation(way, clients, members), np.arange(len(members))))


def test_clients_that_were_moved_together_train_as_before() -> None:
    """A round without a few of many clients moves clients in memory; later rounds with everyone keep their bits."""
    way, sizes = WAYS["between features"], [20] * 12
    clients = clients_of(sizes, way.shape)
    fresh, used = (federation(way, clients, range(12)) for _ in range(2))
    everyone, some = np.arange(12), np.array([0, 1, 2, 4, 5, 6, 7, 9, 10, 11])
    expected = rounds(fresh, everyone)
    rounds(used, some)
    rounds(used, np.array([3, 8]))
    assert np.array_equal(rounds(used, everyone), expected)


@pytest.mark.parametrize("name", ["between features", "mini-batches, momentum", "between samples", "linear loop"])
def test_large_rows_of_another_client_change_no_bit(name: str) -> None:
    """A client whose samples are a hundred times longer takes a far smaller step, and only its own models change."""
    way, clients = WAYS[name], clients_of(SIZES, WAYS[name].shape)
    stretched = [*clients[:4], Client("large", 100.0 * clients[4].x, clients[4].y), *clients[5:]]
    usual, other = (federation(way, some, range(len(SIZES))) for some in (clients, stretched))
    changed = usual.plan.rates != other.plan.rates
    assert changed.tolist() == [number == 4 for number in range(len(SIZES))]
    stay = np.array([0, 1, 2, 3, 5, 6, 7])
    assert np.array_equal(rounds(usual, stay), rounds(other, stay))
    start = usual.initial_model(1)
    here, there = (engine.local_models(start, Position(1, 0), np.arange(8)) for engine in (usual, other))
    assert np.array_equal(here[stay], there[stay])
    assert not np.array_equal(here[4], there[4])


@settings(max_examples=examples(40), deadline=None)
@given(
    sizes=st.lists(st.integers(1, 90), min_size=3, max_size=9),
    name=st.sampled_from([name for name in WAYS if name not in ("network", "module")]),
    data=st.data(),
)
def test_any_leaver_of_any_size_leaves_no_bit(sizes: list[int], name: str, data: st.DataObject) -> None:
    leaver = data.draw(st.integers(0, len(sizes) - 1))
    way = WAYS[name]
    here, never = counterfactuals(way, targets_for(way, clients_of(sizes, way.shape)), [leaver])
    assert np.array_equal(here, never)


def test_padding_to_the_largest_client_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: if all clients' counts determine the layout, the bits change without the leaver.

    The clients are large, because on some processors zero rows do not change the bits of a sum of few rows.
    """

    def by_the_largest(samples: np.ndarray, batch_size: int | None = None) -> np.ndarray:
        return np.full_like(samples, samples.max())

    def differing() -> list[str]:
        names = ("between features", "mini-batches, momentum", "between samples", "between samples, float32")
        large = [20 * size for size in SIZES]
        pairs = {name: counterfactuals(WAYS[name], clients_of(large, WAYS[name].shape), [4]) for name in names}
        return [name for name, (here, never) in pairs.items() if not np.array_equal(here, never)]

    assert differing() == []
    monkeypatch.setattr(linear, "padded_rows", by_the_largest)
    assert len(differing()) > 0


@given(samples=st.integers(1, 10**6), batch=st.integers(1, 5000))
def test_padding_is_small_and_says_whose_batches_are_whole(samples: int, batch: int) -> None:
    (rows,) = client_blocks.padded_rows(np.array([samples]))
    assert samples <= rows <= 1.25 * samples
    (rows,) = client_blocks.padded_rows(np.array([samples]), batch)
    assert samples <= rows <= 1.5 * samples
    assert (rows <= batch) == (samples <= batch)
