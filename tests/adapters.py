"""Small federations of every kind behind the same calls, for the laws of `test_conformance.py`."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

import sifu

LAST, COMPANION = "ward-6", "ward-1"
NAMES = ("ward-0", COMPANION, "ward-2", "ward-3", "ward-4", "ward-5", "ward-7", LAST)
"""Clients of every federation. `secret_draws.fix_groups` puts the named two and ward-5 in one group, ward-2 and 4 in
another, and the others in a third.
"""
LOCAL = {"rate": 0.01, "steps": 2}
ROUNDS = 4
Rows = tuple[np.ndarray, np.ndarray]


def rows_of(name: str, count: int = 0, seed: int = 3) -> Rows:
    """Return rows and labels of a client, which follow from its name; clients have unequal counts."""
    place = NAMES.index(name)
    draw = np.random.default_rng([seed, place])
    y = draw.integers(0, 3, count or 5 + place)
    return draw.normal(size=(y.size, 4)) + 2.0 * np.eye(4)[(y + place) % 4], y


class Federation:
    """A federation of one kind that forgets by one method.

    Attributes:
        folder: Its run folder.
        data: Rows of each client that exists.
        noise: Source of noise, or None for the system's.
        asked: Clients that were asked in each task, for kinds in which a program asks them; otherwise empty.
    """

    has_records = False
    """True if records of a client can be forgotten."""
    evaluates = False
    """True if retraining is evaluated on the rows of the remaining clients."""

    def __init__(self, folder: Path, method: str, data: dict[str, Rows], noise: Any = None) -> None:
        self.folder, self.method, self.data, self.noise = folder, method, dict(data), noise
        self.asked = list[set[str]]()
        self.spec: dict[str, Any] = {"data": {"preprocessing": "fixed"}, **self.sections()}
        if method == "closed_form":
            self.spec |= {"model": {"kind": "ridge", "outputs": 3}, "features": {"norm": 8.0}}
        else:
            self.spec |= {"local": LOCAL, "stop": {"max_rounds": ROUNDS, "target": 0.0}}
        if method == "groups":
            self.spec["groups"] = {"count": 3, "rounds": 2}

    def sections(self) -> dict[str, Any]:
        """Return the sections of the spec that this kind needs."""
        return {}

    def run(self) -> sifu.Run:
        """Open the run, to read it and to file requests."""
        return sifu.open_run(self.folder)

    def work(self, stop: int = 0) -> bool:
        """Train, and execute what waits; with `stop`, be interrupted in that step. Return whether it ended."""
        raise NotImplementedError

    def request(self, *clients: str, **terms: Any) -> str:
        """File a request, and return its id."""
        return self.run().request(list(clients), method=self.method, **{"level": "none"} | terms)

    def forget(self, *clients: str, **terms: Any) -> Any:
        """File a request and work; return the outcome."""
        request = self.request(*clients, **terms)
        assert self.work()
        (outcome,) = (outcome for outcome in self.run().outcomes() if outcome.request == request)
        return outcome


class Linear(Federation):
    """A linear model, or a head in closed form, on the embedded engine."""

    has_records = True
    module: Any = None

    @property
    def evaluates(self) -> bool:  # type: ignore[override]
        return self.method != "closed_form"

    def sections(self) -> dict[str, Any]:
        return {"model": {"kind": "softmax", "outputs": 3}}

    def run(self) -> sifu.Run:
        return sifu.open_run(self.folder, clients=self.data, model=self.module, noise=self.noise)

    def work(self, stop: int = 0) -> bool:
        steps = itertools.count(1)

        def progress(update: Any) -> None:
            if next(steps) == stop:
                raise KeyboardInterrupt

        given: dict[str, Any] = {"clients": self.data, "model": self.module, "noise": self.noise, "progress": progress}
        try:
            sifu.train(self.spec, run=self.folder, **given).forget(progress=progress)
        except KeyboardInterrupt:
            return False
        return True


def own_module() -> Any:
    """Make a user's network."""
    from torch import nn

    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


class Module(Linear):
    """A torch module of the user's own on the embedded engine, with batches that are drawn."""

    module = staticmethod(own_module)

    def __init__(self, folder: Path, method: str, data: dict[str, Rows], noise: Any = None) -> None:
        super().__init__(folder, method, data, noise)
        self.spec["local"] = LOCAL | {"batch": 3}

    def sections(self) -> dict[str, Any]:
        return {"regularity": {"kind": "assumed", "factor": 1.0}}


class Loop(Federation):
    """A loop of the user's own, whose clients step towards the mean of their rows, or send statistics of a head."""

    masked = False

    def __init__(self, folder: Path, method: str, data: dict[str, Rows], noise: Any = None) -> None:
        super().__init__(folder, method, data, noise)
        self.heads = {name: sifu.LoopClient(name, x, y) for name, (x, y) in self.data.items()}

    def sections(self) -> dict[str, Any]:
        return {} if self.method == "closed_form" else {"regularity": {"kind": "assumed", "factor": 1.0}}

    def work(self, stop: int = 0) -> bool:
        solved = self.method == "closed_form"
        model: dict[str, Any] = {"initial": lambda: {"w": np.zeros(4)}}
        if solved:
            model = {"sample_shape": (4,), "masked_statistics": self.masked}
        samples = {name: len(y) for name, (_, y) in self.data.items()}
        with sifu.ServerLoop(self.folder, self.spec, samples, authenticated=True, noise=self.noise, **model) as server:
            for step in itertools.count():
                if (task := server.next()) is None:
                    return True
                self.asked.append(set(task.models))
                if step + 1 == stop:
                    return False  # closed before anybody answered
                server.take({name: self.reply(name, task, arrays) for name, arrays in task.models.items()})
        raise AssertionError

    def reply(self, name: str, task: Any, arrays: Any) -> Any:
        """Return the reply of an honest client; instructions are passed as JSON."""
        if self.method == "closed_form":
            return self.heads[name].answer(arrays, json.loads(json.dumps(task.instructions[name])))
        rate = LOCAL["rate"] * LOCAL["steps"]
        return {"w": arrays["w"] + rate * (self.data[name][0].mean(axis=0) - arrays["w"])}


class MaskedLoop(Loop):
    """A loop whose server learns nothing but the sum of the clients' statistics."""

    masked = True


KINDS: dict[str, type[Federation]] = {"linear": Linear, "module": Module, "loop": Loop, "masked loop": MaskedLoop}
METHODS = ("closed_form", "groups", "scratch", "sifu")
ABSENT = {
    ("module", "closed_form"): "a head in closed form is linear in features that do not change",
    ("masked loop", "groups"): "a loop masks statistics, not updates; Flower masks both",
    ("masked loop", "scratch"): "as above",
    ("masked loop", "sifu"): "as above",
}
"""Pairs of a kind and a method that do not exist, with the reason."""
