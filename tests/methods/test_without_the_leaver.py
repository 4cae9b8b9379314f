"""Accepted modules with state, against a federation that the leaver never belonged to.

The other federation has fewer clients and fewer samples, and the clients after the leaver have other indices. Networks
of groups without the leaver, heads on frozen features and models trained from scratch must have the same bits.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sifu
import stateful_modules
from sifu.data.client_data import ClientData
from sifu.data.forked import in_this_process
from sifu.engines.sim.plain_loop import LoopTrainer
from sifu.errors import InputError
from sifu.store.reader import RunReader
from sifu.theory.merging import group_of
from stateful_modules import Kind

GROUPS = 2
SEED = 1
KEY = hashlib.sha256(f"{SEED}:groups".encode()).digest()
DRAWS_NOTHING = {
    "no state": Kind("nowhere", "forward", "scale"),
    "a step counter": Kind("attribute", "training", "unfreeze", 1),
    "a running maximum in a hook": Kind("hook", "backward", "gradient"),
    "a memory bank": Kind("attribute", "training", "bank"),
    "memory while gradients are on": Kind("closure", "gradients on", "scale"),
}
"""Accepted networks whose results do not depend on a client's index, so the leaver may have any index."""
HEAD: dict[str, Any] = {
    "model": {"kind": "ridge", "outputs": 3},
    "data": {"preprocessing": "fixed"},
    "ridge": {"regularisation": 0.01},
    "features": {"kind": "module", "module": "stateful_modules:make"},
    "privacy": {"noise": "seeded"},
    "seed": SEED,
}
TUNED: dict[str, Any] = HEAD | {
    "features": HEAD["features"] | {"tune": "blocks", "block": 4},
    "groups": {"count": GROUPS, "rounds": 2, "rebuild": "later"},
    "local": {"rate": 0.5, "steps": 2, "momentum": 0.9},
}
OWN: dict[str, Any] = {
    "data": {"preprocessing": "fixed"},
    "local": {"rate": 0.1, "steps": 3, "momentum": 0.9},
    "regularity": {"kind": "assumed"},
    "stop": {"max_rounds": 2, "target": 0.0},
}


def clients_of(leaver: int, count: int = 5, seed: int = 0) -> list[ClientData]:
    """Return clients of 5 to 7 samples; the leaver has 40 samples, the largest ones."""
    clients = []
    for number in range(count):
        generator, rows = np.random.default_rng([seed, number]), 40 if number == leaver else 5 + number % 3
        x = (3.0 if number == leaver else 1.0) * generator.random((rows, 1, 8, 8))
        clients.append(ClientData(f"client-{number}", x, np.arange(rows) % 3))
    return clients


def networks(folder: Path, groups: set[int]) -> dict[tuple[int, int], bytes]:
    """Return the stored networks of some groups, by group and number of rounds."""
    with RunReader(folder) as reader:
        return {
            (row.grp, row.rounds): reader.load_model(row.node).tobytes()
            for row in reader.group_models().values()
            if row.grp in groups and row.node in reader.models()
        }


def tuned_outcome(clients: Sequence[ClientData], leaver: str, folder: Path) -> str:
    """Return `refused`, or whether the groups without the leaver have the `same` networks as if it never existed."""
    sifu.allow_code("stateful_modules:make")
    hit = group_of(KEY, leaver, GROUPS)
    others = [client for client in clients if client.name != leaver]
    stay = {group_of(KEY, client.name, GROUPS) for client in others} - {hit}
    assert stay  # otherwise nothing is compared
    try:
        run = sifu.train(TUNED, run=folder / "run", clients=list(clients))
    except InputError:
        return "refused"
    before = networks(folder / "run", stay)
    (outcome,) = run.forget([leaver], "gone")
    assert outcome.level == "exact"
    stateful_modules.choose(stateful_modules.CHOSEN)
    sifu.train(TUNED, run=folder / "never", clients=others)
    never = networks(folder / "never", stay)
    assert never
    return "same" if before == never == networks(folder / "run", stay) else "different"


@pytest.mark.parametrize("leaver", [0, 2])
@pytest.mark.parametrize("kind", DRAWS_NOTHING.values(), ids=DRAWS_NOTHING.keys())
def test_groups_tune_the_same_networks_as_if_the_leaver_never_existed(kind: Kind, leaver: int, tmp_path: Path) -> None:
    stateful_modules.choose(kind)
    assert tuned_outcome(clients_of(leaver), f"client-{leaver}", tmp_path) == "same"


def test_shared_memory_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without forked processes and refusals, a bank that all clients share gives other networks."""
    monkeypatch.setattr(LoopTrainer, "forks", False)
    monkeypatch.setattr("sifu.data.feature_maps.fixed_networks.forked", in_this_process)
    for name in ("refuse_changed_state", "refuse_another_result"):
        monkeypatch.setattr(f"sifu.engines.sim.plain_loop.{name}", lambda *given: None)
    monkeypatch.setattr("sifu.data.feature_maps.fixed_networks.refuse_changed_state", lambda *given: None)
    stateful_modules.choose(Kind("global", "training", "bank"))
    assert tuned_outcome(clients_of(0), "client-0", tmp_path) == "different"


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 40))])
def test_no_drawn_network_depends_on_whether_the_leaver_existed(seed: int, tmp_path: Path) -> None:
    """No randomly drawn network, number of clients and leaver gives a result that depends on the leaver."""
    draw = random.Random(f"never {seed}")
    kind = stateful_modules.drawn_kind(seed, tmp_path)
    stateful_modules.choose(kind)
    count = draw.randrange(4, 9)
    group = {number: group_of(KEY, f"client-{number}", GROUPS) for number in range(count)}
    leaver = draw.choice([number for number in group if len(set(group.values()) - {group[number]})])
    outcome = tuned_outcome(clients_of(leaver, count, seed), f"client-{leaver}", tmp_path)
    assert outcome in ("refused", "same"), (kind, leaver, count)


def released(folder: Path) -> bytes:
    with RunReader(folder) as reader:
        return reader.load_model(reader.tip).tobytes()


@pytest.mark.parametrize("leaver", [0, 2])
def test_a_head_on_frozen_features_is_that_of_the_others_alone(leaver: int, tmp_path: Path) -> None:
    stateful_modules.choose(Kind("attribute", "training", "bank"))
    sifu.allow_code("stateful_modules:make")
    clients = clients_of(leaver)
    run = sifu.train(HEAD, run=tmp_path / "run", clients=clients)
    (outcome,) = run.forget([f"client-{leaver}"], "gone")
    assert outcome.level == "exact"
    sifu.train(HEAD, run=tmp_path / "never", clients=clients[:leaver] + clients[leaver + 1 :])
    assert released(tmp_path / "run") == released(tmp_path / "never")


class Remembering(nn.Module):
    """Linear model with memory in an attribute, a late buffer, a closure or an attribute of a parameter."""

    def __init__(self, place: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer, self.place, self.held = nn.Linear(64, 3), place, [0.0]
        held = 0.0

        def largest(value: float) -> float:
            nonlocal held
            held = max(held, value)
            return held

        self.largest = largest

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores, divided by a function of the largest sample so far."""
        value = float(x.max())
        if self.place == "attribute":
            self.held.append(value)
            value = max(self.held)
        elif self.place == "closure":
            value = self.largest(value)
        elif self.place == "buffer":
            self.register_buffer("late", torch.as_tensor(max(float(getattr(self, "late", 0.0)), value)))
            value = float(self.late)  # type: ignore[arg-type]
        elif self.place == "parameter":
            value = self.layer.weight.largest = max(getattr(self.layer.weight, "largest", 0.0), value)  # type: ignore[assignment]
        scores: Tensor = self.layer(x.flatten(1))
        return scores / (1.0 + value)


@pytest.mark.parametrize("leaver", [0, 2])
@pytest.mark.parametrize("place", ["attribute", "closure", "buffer", "parameter"])
def test_a_model_from_scratch_is_that_of_the_others_alone(place: str, leaver: int, tmp_path: Path) -> None:
    clients = {client.name: (client.x, client.y) for client in clients_of(leaver)}
    make: Callable[[], nn.Module] = lambda: Remembering(place)  # noqa: E731
    run = sifu.train(OWN, run=tmp_path / "run", model=make, clients=clients)
    (outcome,) = run.forget([f"client-{leaver}"], "gone", method="scratch")
    assert outcome.level == "exact"
    del clients[f"client-{leaver}"]
    sifu.train(OWN, run=tmp_path / "never", model=make, clients=clients)
    assert released(tmp_path / "run") == released(tmp_path / "never")
