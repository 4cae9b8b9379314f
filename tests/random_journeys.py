"""Random journeys of random runs through the public API alone: any training, any requests, any operator commands.

A journey is a federation of a few clients with one of four kinds of training (a linear model, a network, groups, a head
in closed form) and two to five requests of any method and terms. Some requests are for single records, some come from
clients with forgotten records, and some need approvals. Between them there are new keys, purges, restored backups and
newcomers. A witness is notified of every command. One seed determines everything except the operator's keys;
`replayable_noise` also derives certified noise from it, so that a run can be executed again.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import numpy as np
from torch import nn

import sifu
import sifu.methods.base as noised
from sifu.api.run import Run
from sifu.core.engine import Engine
from sifu.core.layout import Vector
from sifu.data import ClientData
from sifu.engines.sim import LinearModel
from sifu.errors import InputError, SifuError
from sifu.planning.plan import Plan
from sifu.run.clients_and_engine import engine_from_spec
from sifu.run.given import as_model
from sifu.run.run_view import RunView
from sifu.store.given_approvals import NEEDED
from sifu.store.kept_heads import WITNESSES

FAMILIES = (*["linear"] * 6, *["closed form"] * 2, *["groups"] * 3, *["network"] * 2)
"""Families, weighted by their frequency."""
MASKED = "masked"
"""Family of masked rounds over Flower's messages, where the server sees no single update; needs Flower."""
INPUTS, CLASSES = 5, 3
FILED_BY = "desk"
PEOPLE = ("Ann", "Bob")
"""People who may approve requests."""


def normals_of(seed: int, order: int) -> np.random.Generator:
    """Return the noise source of a request, which depends only on the seed and the request's order."""
    return np.random.default_rng([seed, 1, order])


@contextmanager
def replayable_noise(seed: int) -> Iterator[None]:
    """Replace noise by noise that can be drawn again, in runs that are otherwise treated as certified ones."""

    def noised_model(view: RunView, plan: Plan, model: Vector) -> Vector:
        normals = normals_of(seed, plan.order)
        return noised.add_noise(model, plan.noise_std, normals) if plan.noise_std else model

    with mock.patch.object(noised, "noised_model", noised_model):
        yield


@dataclass
class Journey:
    """Run with everything needed to execute it again: its clients' data and its model."""

    seed: int
    family: str
    spec: dict[str, Any]
    clients: list[ClientData]
    newcomers: list[ClientData]
    model: Any
    folder: Path
    steps: list[str] = field(default_factory=list)
    """Descriptions of the events, in order."""
    refused: int = 0
    flower: Any = None
    """Engine of masked rounds, or None."""
    hands_engine_over: bool = False
    """True if the caller passes an engine when opening the run."""
    gone: dict[str, set[int]] = field(default_factory=dict)
    """Forgotten rows, by the first name of their client."""
    small: bool = False
    """True for few rounds, so that thousands of requests take an hour."""

    @property
    def approvals(self) -> int:
        """Number of people who approve a request before it is executed."""
        return NEEDED[self.spec.get("requests", {}).get("approval", "none")]

    @property
    def witness(self) -> Path:
        """File of this folder's witness; a restored run gets another witness, because both runs may continue."""
        return self.folder.with_name(f"{self.folder.name}.witness")

    @property
    def can_forget_records(self) -> bool:
        """True unless the caller passes an engine, or masked clients are on nodes."""
        return not self.hands_engine_over and self.family != MASKED

    def open(self) -> Run:
        """Open the run with its engine."""
        if self.flower is not None:
            return sifu.open_run(self.folder, engine=self.flower)
        if self.hands_engine_over:
            return sifu.open_run(self.folder, engine=self.engine(sifu.open_run(self.folder).spec))
        return sifu.open_run(self.folder, model=self.model, clients=self.clients)

    def engine(self, spec: sifu.Spec, clients: list[ClientData] | None = None) -> Engine:
        """Return the engine of `spec`, optionally on other data."""
        built, _ = engine_from_spec(spec, clients or self.clients, as_model(self.model))
        return built


def tables(generator: np.random.Generator, count: int, first: int, outputs: int, shape: tuple[int, ...]) -> list[Any]:
    """Return clients of unequal sizes whose classes are Gaussian clusters."""
    clients = []
    for number in range(first, first + count):
        y = generator.integers(0, outputs, int(generator.integers(2, 9)))
        x = generator.normal(size=(y.size, *shape)) + y.reshape(-1, *[1] * len(shape)) / 2
        clients.append(ClientData(f"client-{number:03d}", x, y))
    return clients


def without_rows(client: ClientData, rows: Collection[int], name: str) -> ClientData:
    """Return a client without some rows, under another name."""
    stays = np.setdiff1d(np.arange(len(client.y)), sorted(rows))
    return ClientData(name, client.x[stays], client.y[stays])


@contextmanager
def witnessed(folder: Path) -> Iterator[None]:
    """Notify a witness, a file next to the run, of every command; a restored run has its own witness."""
    with mock.patch.dict(os.environ, {WITNESSES: str(folder / "run.witness")}):
        yield


def small_network() -> nn.Module:
    """Return a network as a user's own model."""
    return nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, 4), nn.Tanh(), nn.Linear(4, CLASSES))


def normalised_network() -> nn.Module:
    """Return another network as a user's own model, with a layer outside the theory."""
    return nn.Sequential(nn.Linear(INPUTS, 6), nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, CLASSES))


def random_journey_spec(dice: random.Random, seed: int, family: str) -> tuple[dict[str, Any], tuple[int, ...], Any]:
    """Return a spec, the shape of its clients' samples, and a user's model (None: the model of the spec)."""
    shape: tuple[int, ...] = (INPUTS,)
    model: Any = None
    kind = dice.choice(["softmax", "softmax", "logistic", "least_squares"])
    spec: dict[str, Any] = {
        "seed": seed,
        "data": {"preprocessing": "fixed"},
        "model": {"kind": kind, "init": dice.choice(["zeros", "random"])},
        "local": {
            "rate": dice.choice(["auto", "auto", 0.01, 0.03, 0.3]),
            "steps": dice.choice([1, 2, 4]),
            "batch": dice.choice([0, 0, 1, 3]),
            "momentum": dice.choice([0.0, 0.0, 0.5, 0.9]),
            "weight_decay": dice.choice([0.0, 0.0, 0.01, 0.5]),
        },
        "server": {
            "participation": dice.choice(["all", "poisson(0.15)", "poisson(0.5)", "poisson(0.9)"]),
        },
        "stop": {"target": 0.0, "max_rounds": dice.randint(2, 6)},
        "keep": {
            "models": dice.choice([3, 6, 64]),
        },
    }
    if kind == "softmax" and dice.random() < 0.9:
        spec["model"]["outputs"] = CLASSES
    special = dice.randint(0, 20)
    if special == 4:
        spec["server"]["participation"] = "fixed(3)"
    elif special == 6:
        spec["model"]["dtype"] = "float32"
    elif special in (7, 8):
        spec["server"] |= {"update_bound": dice.choice([0.1, 1.0]), "rejected": dice.choice(["reply", "round"])}
    elif special in (9, 10):
        spec["features"] = {"kind": "random_fourier", "count": 8}
    elif special == 12:
        spec["data"]["preprocessing"] = "unknown"

    if family == "linear" and kind == "softmax" and "features" not in spec and dice.random() < 0.15:
        model, spec["model"] = LinearModel("softmax", INPUTS, CLASSES), {"dtype": spec["model"].get("dtype", "float64")}
    network = family == "network" or (family == "groups" and dice.random() < 0.4)
    if network:
        spec.pop("features", None)
        spec["local"] |= {"rate": dice.choice([0.01, 0.1])}
        spec["regularity"] = {"kind": "assumed", "factor": dice.choice([1.0, 1.05])}
        chosen = dice.choice(["mlp", "cnn", "own", "own"])
        spec["model"] = {"outputs": CLASSES, "dtype": dice.choice(["float64", "float32"])}
        if chosen == "own":
            model = dice.choice([small_network, normalised_network])
            spec["model"].pop("outputs")
        else:
            spec["model"]["kind"] = chosen
            shape = (1, 8, 8) if chosen == "cnn" else (INPUTS,)
    if family == "groups":
        spec["groups"] = {
            "count": dice.randint(2, 4),
            "rounds": dice.randint(1, 2),
        }
        spec["stop"]["max_rounds"] = dice.randint(3, 5)
        if spec["server"]["participation"] == "fixed(3)":
            spec["server"]["participation"] = "all"
    if family == MASKED:
        spec["model"] |= {"dtype": "float64"} | ({"outputs": CLASSES} if kind == "softmax" else {})
        spec["server"].pop("update_bound", None)
        spec.pop("features", None)
    approval = dice.choice(["none"] * 4 + ["one", "two"])
    if family == "closed form":
        spec = {
            "seed": seed,
            "data": spec["data"],
            "model": {"kind": "ridge", "outputs": dice.choice([CLASSES, CLASSES, CLASSES, 0])},
            "features": dice.choice([{"norm": 8.0}, {"kind": "random_fourier", "count": 8}]),
            "ridge": {"regularisation": dice.choice(["auto", 0.01])},
            "keep": {"statistics": dice.choice(["clients", "sum"])},
        }
    return spec | {"requests": {"approval": approval}}, shape, model


def random_journey_terms(dice: random.Random, journey: Journey) -> dict[str, Any]:
    """Return any terms and any method that the run allows."""
    terms: dict[str, Any] = {
        "epsilon": dice.choice([0.5, 1.0, 10.0, 100.0]),
        "delta": dice.choice([1e-2, 1e-5]),
        "sigma": dice.choice(["auto", 0.01, 0.1, 0.3, 1.0, 10.0]),
        "retention": dice.choice(["paper", "strict"]),
    }
    if journey.family == "closed form":
        return terms
    methods = ["sifu"] * 8 + ["auto"] * 2 + ["scratch"]
    if journey.family == "groups":
        methods += ["groups"] * 12
    terms["method"] = dice.choice(methods)
    return terms


def fewer_rounds(spec: dict[str, Any]) -> None:
    """Shorten training to two or three rounds of one or two steps."""
    if "stop" in spec:
        spec["stop"]["max_rounds"] = min(spec["stop"]["max_rounds"], 3 if "groups" in spec else 2)
        spec["local"]["steps"] = min(spec["local"]["steps"], 2)
    if "groups" in spec:
        spec["groups"] |= {"count": 2, "rounds": 1}


def start_journey(seed: int, folder: Path, families: Sequence[str] = FAMILIES, small: bool = False) -> Journey:
    """Train the run of a journey; call it inside `replayable_noise`."""
    dice = random.Random(f"journey {seed}")
    family = dice.choice(families)
    spec, shape, model = random_journey_spec(dice, seed, family)
    if small:
        fewer_rounds(spec)
    generator = np.random.default_rng(seed)
    outputs = 2 if spec["model"].get("kind") in ("logistic", "least_squares") else CLASSES
    count = dice.randint(6, 10)
    clients = tables(generator, count, 0, outputs, shape)
    for number, client in enumerate(clients):  # classes are counted from all clients if the spec does not give them
        client.y[0] = number % outputs
    newcomers = tables(generator, 2, count, outputs, shape)
    journey = Journey(seed, family, spec, clients, newcomers, model, folder / "run", small=small)
    journey.hands_engine_over = family not in (MASKED, "closed form") and dice.random() < 0.2
    if family == MASKED:
        journey.flower = masked_engine(sifu.Spec.from_mapping(spec), clients)
        sifu.train(spec, run=journey.folder, engine=journey.flower)
    else:
        sifu.train(spec, run=journey.folder, model=model, clients=clients)
    return journey


def masked_engine(spec: sifu.Spec, clients: list[ClientData]) -> Engine:
    """Return an engine of clients on nodes of a grid in memory, whose updates are masked."""
    sys.path.insert(0, str(Path(__file__).parent / "engines" / "flower"))
    from flower_federation import HASTY, grid_of, profiles_of

    from sifu.engines.flower.exchange import ClaimedRoster
    from sifu.engines.flower.flower_engine import FlowerFederation
    from sifu.engines.ready import blueprint
    from sifu.theory.facts import CLAIMED

    grid = grid_of(list(clients))
    profiles = profiles_of(grid, spec)
    ordered = sorted(profiles.values(), key=lambda profile: profile.name)
    design, _ = blueprint(spec, ordered, identity=CLAIMED, preprocessing="fixed constants")
    roster = ClaimedRoster(grid, {node: profile.name for node, profile in profiles.items()})
    return FlowerFederation(grid, roster, design, HASTY, masked=True)


class Observer(Protocol):
    """Observer of a journey while it runs."""

    def executed(self, journey: Journey, requests: Collection[str]) -> None:
        """Observe that these requests were just executed."""

    def left(self, journey: Journey) -> None:
        """Observe that the journey leaves its folder."""


def random_request(dice: random.Random, journey: Journey) -> list[str]:
    """Make one request of one or two clients; return the ids of executed requests. A refusal is part of the journey."""
    run = journey.open()
    left = [client.name for client in run.status().clients if client.state == "active"]
    if len(left) < 3:
        return []
    who = dice.sample(left, dice.choice([1, 1, 1, 2]))
    terms = random_journey_terms(dice, journey) | {"level": "none"}  # the approved terms are executed
    again = [name for name in left if first_name(name) in journey.gone]
    if again and dice.random() < 0.6:  # a client with forgotten records asks again, perhaps with another client
        name = dice.choice(again)
        who = [name, *[other for other in who if other != name][: len(who) - 1]]
    if journey.can_forget_records and dice.random() < (0.3 if again else 0.4) and rows_left(journey, who[0]) > 1:
        who = who[:1]
        terms["records"] = random_rows(dice, journey, who[0])
    if dice.random() < 0.5:
        who = [first_name(name) for name in who]  # by the names that people use
    name = f"r{len(journey.steps)}"
    try:
        if journey.approvals:
            run.request(who, name, actor=FILED_BY, **terms)
            done = approve_and_execute(dice, journey, name)
        elif dice.random() < 0.2:
            run.request(who, name, **terms)
            done = run.forget()
        else:
            done = run.forget(who, name, **terms)
    except SifuError as error:
        journey.refused += 1
        journey.steps.append(f"refused: {error}"[:120])
        if run.request_record(name).waits:
            run.decide(name, "withdrawn", actor="desk")
        return []
    if name not in {outcome.request for outcome in done}:
        journey.steps.append("withdrawn")
        return []
    if "records" in terms:
        journey.gone.setdefault(first_name(who[0]), set()).update(terms["records"])
    journey.steps.append(f"forget {name} {terms.get('method', 'closed_form')}")
    return [outcome.request for outcome in done]


def first_name(name: str) -> str:
    """Return the name that a client first joined under."""
    return name.partition("~")[0]


def rows_left(journey: Journey, client: str) -> int:
    """Return the number of rows a client has left."""
    (data,) = (given for given in journey.clients if given.name == first_name(client))
    return len(data.y) - len(journey.gone.get(data.name, ()))


def random_rows(dice: random.Random, journey: Journey, client: str) -> list[int]:
    """Return some of a client's remaining rows, never all; often few, so that it can ask again."""
    (data,) = (given for given in journey.clients if given.name == first_name(client))
    rows = sorted(set(range(len(data.y))) - journey.gone.get(data.name, set()))
    return dice.sample(rows, dice.choice([1, dice.randint(1, max(1, len(rows) - 1))]))


def approve_and_execute(dice: random.Random, journey: Journey, name: str) -> Sequence[Any]:
    """Hold a request until all approvals are there, then execute it; sometimes withdraw it before."""
    run = journey.open()
    for count in range(journey.approvals):
        if run.forget():
            raise AssertionError(f"request {name} was executed with {count} of {journey.approvals} approvals")
        if dice.random() < 0.1:
            run.decide(name, "withdrawn", actor=FILED_BY)
            with suppress(InputError):
                run.decide(name, "approved", actor=PEOPLE[count])
                raise AssertionError(f"request {name} was approved after it was withdrawn")
            return run.forget()
        with suppress(InputError):
            run.decide(name, "approved", actor=f" {FILED_BY.upper()} ")
            raise AssertionError(f"request {name} was approved by the person who filed it")
        run.decide(name, "approved", actor=PEOPLE[count])
        run.decide(name, "approved", actor=PEOPLE[count].lower())  # the same person approves again
    return run.forget()


def restore_in_the_middle(dice: random.Random, journey: Journey, observer: Observer) -> None:
    """Back up, perhaps forget another client, and continue from the backup; what the backup lacks is filed again."""
    number = len(journey.steps)
    file, back = journey.folder.with_name(f"backup-{number}.zip"), journey.folder.with_name(f"back-{number}")
    journey.open().backup(file)
    issued: list[Path] = []
    if dice.random() < 0.4:
        done = random_request(dice, journey)
        if done:
            observer.executed(journey, done)
        issued = [journey.folder / "certificates" / f"{name}.auditor.json" for name in done]
    observer.left(journey)
    given = issued if dice.random() < 0.7 else []
    journey.folder = back
    os.environ[WITNESSES] = str(journey.witness)  # the old witness knows what came after the backup
    lost = sifu.restore(file, back, certificates=given).requests
    journey.steps.append("restored" + (" with a certificate issued since" if given else ""))
    if len(lost) != len(given):
        raise AssertionError(f"{len(given)} certificates were given, and the restored run lacks {lost}")


def go_on(journey: Journey, observer: Observer, most_requests: int = 6) -> None:
    """Make the requests of a journey and the events between them."""
    dice = random.Random(f"requests {journey.seed}")
    for _ in range(min(dice.randint(3, 6), most_requests)):
        done = random_request(dice, journey)
        if done:
            observer.executed(journey, done)
        if journey.open().status().phase != "ready":  # a network diverged: nothing more can be done
            break
        chance = dice.random()
        if chance < 0.12:
            restore_in_the_middle(dice, journey, observer)
        elif chance < 0.2:
            journey.open().purge()
            journey.steps.append("purged")
        elif chance < 0.28:
            journey.open().rotate_key()
            journey.steps.append("new key")
        elif chance < 0.55 and journey.family == "closed form" and journey.newcomers:
            journey.clients = [*journey.clients, journey.newcomers.pop(0)]
            journey.open().join()
            journey.steps.append("joined")
    observer.left(journey)
