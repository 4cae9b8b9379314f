"""The promise itself, on random runs: replay every run with and without the forgotten, and measure.

Both worlds share everything that is random (schedule, batches, initial models, noise); only the forgotten are
missing from one of them. The true distance of the two models must stay below the recorded Psi at every node, and
what it costs at the noise edges below what was charged. Nothing here trusts the bounds: distances come from training.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
import sifu.methods.noised as noised
from run_tools import connect, copy_run, small_spec
from sifu.api.federation import clients_from_spec
from sifu.api.run import Run
from sifu.core.engine import Position
from sifu.core.history import PathNode
from sifu.core.layout import Vector
from sifu.core.noise import NormalSource, noise_source
from sifu.core.spec import Spec
from sifu.methods.view import RunView
from sifu.store.reader import RunReader

FAST = range(20, 28)  # in the run of seed 24 two noise edges are charged to one subject
SLOW = sorted(set(range(68)) - set(FAST))
Distances = dict[tuple[int, int], float]
"""||theta - theta without the subject||, by (subject, node)."""


@pytest.fixture(autouse=True)
def replayable_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise that can be drawn again, in runs that otherwise go the way of certified ones."""

    def seeded(_: str, seed: int, branch: int) -> NormalSource:
        return noise_source("seeded", seed, branch)

    monkeypatch.setattr(noised, "noise_source", seeded)


# -- random runs ----------------------------------------------------------------------------------------------


def random_spec(dice: random.Random, seed: int) -> dict[str, Any]:
    """Any training that can be certified, on a federation of a few digits."""
    return {
        "seed": seed,
        "data": {
            "clients": dice.randint(8, 14),
            "samples_per_client": dice.choice([2, 5, 10]),
            "partition": dice.choice(["iid", "one_class"]),
            "preprocessing": "fixed",
        },
        "model": {
            "kind": dice.choice(["softmax", "logistic", "least_squares"]),
            "init": dice.choice(["zeros", "random"]),
        },
        "local": {
            "rate": dice.choice(["auto", "auto", 0.03, 0.3]),
            "steps": dice.choice([1, 2, 4]),
            "batch": dice.choice([0, 0, 1, 3]),
            "momentum": dice.choice([0.0, 0.0, 0.5, 0.9]),
            "weight_decay": dice.choice([0.0, 0.0, 0.01, 0.5]),
        },
        "server": {
            "rate": dice.choice([1.0, 1.0, 0.3, 0.7, 1.3, 2.0, 2.5]),
            "participation": dice.choice(["all", "poisson(0.15)", "poisson(0.5)", "poisson(0.9)"]),
        },
        "stop": {"target": 0.0, "max_rounds": dice.randint(3, 8)},
        "keep": {"gram_clients": dice.choice([0, 0, 20]), "models": dice.choice([3, 6, 64])},
    }


def random_terms(dice: random.Random, strict: bool) -> dict[str, Any]:
    """Any terms of a request; Scratch every now and then."""
    return {
        "epsilon": dice.choice([1.0, 10.0, 100.0]),
        "delta": dice.choice([1e-2, 1e-5]),
        "sigma": dice.choice(["auto", 0.01, 0.1, 0.3, 1.0, 10.0]),
        "unit": dice.choice(["client", "joint"]),
        "scope": dice.choice(["all", "all", "latest"]),
        "reserve": dice.choice([0.0, 0.5]),
        "retention": dice.choice(["paper", "strict"]) if strict else "paper",
        "method": dice.choice(["sifu"] * 5 + ["scratch"]),
    }


def own_clients(spec: dict[str, Any]) -> list[Any]:
    """The spec's clients with unequal numbers of samples, and two classes."""
    clients = clients_from_spec(Spec.from_mapping(spec))
    kept = [1 + number % one.samples for number, one in enumerate(clients)]
    return [replace(one, x=one.x[:rows], y=one.y[:rows] % 2) for one, rows in zip(clients, kept, strict=True)]


def random_run(seed: int, folder: Path) -> Run:
    """A run of `random_spec` with two to four requests of one or two clients each."""
    spec = random_spec(dice := random.Random(seed), seed)
    own = spec["model"]["kind"] == "logistic" or dice.random() < 0.3
    run = sifu.train(spec, run=folder, clients=own_clients(spec) if own else None)
    left = [one.name for one in run.engine().clients]
    dice.shuffle(left)
    for _ in range(dice.randint(2, 4)):
        who = [left.pop() for _ in range(min(dice.randint(1, 2), len(left) - 1))]
        run.forget(who, min_level="none", **random_terms(dice, strict=spec["keep"]["gram_clients"] == 0))
    return run


# -- the audit ------------------------------------------------------------------------------------------------


def models_without(run: Run, reader: RunReader, gone: Collection[int]) -> dict[int, Vector]:
    """The model of every node, the cut ones too, had the clients `gone` never been there."""
    engine, took_part = run.engine(), reader.participation()
    models: dict[int, Vector] = {}
    for node in (row.node for row in reader.node_rows()):
        if node.kind == "initial":
            models[node.node] = engine.initial_model(node.branch)
            continue
        model = models[node.parent]  # type: ignore[index]
        if node.kind == "noise":
            normals = noise_source("seeded", run.spec.seed, node.order).standard_normal(model.size)
            model = model + node.noise_std * normals if node.noise_std else model
        else:
            there = [who for who in took_part.between(node.node, node.node).clients if who not in gone]
            result = engine.run_round(model, Position(node.branch, node.position - 1), np.array(there, dtype=np.int64))
            assert result.participants.tolist() == there, f"node {node.node} was drawn differently"
            model = result.model
        models[node.node] = model
    return models


def true_distances(run: Run) -> Distances:
    """How far the forgotten moved every model; the replay must first meet every model on disk, bit for bit."""
    with closing(run.reader()) as reader:
        real = models_without(run, reader, ())
        for node in reader.models():
            assert np.array_equal(real[node], reader.load_model(node)), f"node {node} was not replayed"
        return {
            (one.subject, node): float(np.linalg.norm(real[node] - model))
            for one in reader.subjects()
            for node, model in models_without(run, reader, one.clients).items()
        }


def violations(folder: Path, distances: Distances) -> list[str]:
    """Every statement among the records that the true distances contradict."""
    with closing(RunReader(folder)) as reader:
        return [*too_small_psi(reader, distances), *too_small_charges(reader, distances)]


def too_small_psi(reader: RunReader, distances: Distances) -> Iterator[str]:
    """Nodes where a forgotten subject is further away than Psi says."""
    nodes = [row.node for row in reader.node_rows()]
    for leaf in {one.node for one in nodes} - {one.parent for one in nodes}:
        view = RunView(reader, tip=leaf)
        for subject in view.earlier_subjects():
            psi = view.curve(subject).at(np.arange(len(view.path)))
            for node, bound in zip(view.path.nodes, psi, strict=True):
                if not (distance := distances[subject.subject, node.node]) <= bound:
                    yield f"subject {subject.subject} at node {node.node}: distance {distance}, Psi {bound}"


def too_small_charges(reader: RunReader, distances: Distances) -> Iterator[str]:
    """Subjects that lost more than they were charged, or were charged more than they allowed."""
    nodes = {row.node.node: row.node for row in reader.node_rows()}
    charged = {(one.noise_node, one.subject): one.charge for one in reader.charges()}
    requests = {one.request: one for one in reader.requests()}

    def covered(node: PathNode, order: int) -> bool:
        here = node.kind == "noise" and node.order >= order
        return here or (node.parent is not None and covered(nodes[node.parent], order))

    for subject in reader.subjects():
        request, name = requests[subject.request], f"subject {subject.subject}"
        order, budget = request.request_order or 0, 1.0 / (request.multiplier or np.inf) ** 2
        if request.noise_std == 0.0 and distances[subject.subject, request.final_node or 0] != 0.0:
            yield f"{name}: the release is called exact and is not"
        spent = paid = 0.0
        for edge in (one for one in nodes.values() if one.kind == "noise" and one.order >= order):
            source = nodes[edge.parent]  # type: ignore[index]
            if covered(source, order):
                continue
            distance, charge = distances[subject.subject, source.node], charged.get((edge.node, subject.subject), 0.0)
            if edge.noise_std == 0.0:
                if distance != 0.0:
                    yield f"{name}: a restart without noise at node {edge.node} shows it"
                continue
            cost, share = (distance / edge.noise_std) ** 2, 1.0 - request.reserve if edge.order == order else 1.0
            spent, paid = spent + cost, paid + charge
            if not cost <= charge <= budget * share:
                yield f"{name} at node {edge.node}: cost {cost}, charge {charge}, budget {budget * share}"
        if request.scope == "all" and not spent <= paid <= budget:
            yield f"{name} in all: cost {spent}, charges {paid}, budget {budget}"


@pytest.mark.parametrize("seed", [*FAST, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW)])
def test_no_forgotten_client_is_further_away_than_certified(tmp_path: Path, seed: int) -> None:
    run = random_run(seed, tmp_path / "run")
    assert violations(run.folder, true_distances(run)) == []
    assert run.verify().problems == []


def test_the_audit_notices_drifts_that_were_halved(tmp_path: Path) -> None:
    """The negative control: one client reports half of how far it went, and its Psi is caught."""
    run = sifu.train(small_spec(), run=tmp_path / "run")
    run.forget(["client-000"], sigma=1.0)
    distances = true_distances(run)
    assert violations(run.folder, distances) == []
    with closing(connect(changed := copy_run(run.folder, tmp_path / "changed"))) as connection:
        connection.execute("UPDATE participation SET drift = drift / 2 WHERE client = 0")
    assert violations(changed, distances)
