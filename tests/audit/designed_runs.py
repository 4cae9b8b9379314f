"""Negative controls of the audit: cheating operators, on a task that makes cheating detectable.

The task is designed so that Psi equals the true distance. One client moves the model in a direction that no other
client's data affect, so nothing pulls the model back and every round adds its full Delta (docs/theory.md, section 3.1).
The request uses the whole budget: an honest run shows an empirical epsilon near the certified one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sifu.api.run import Run
from sifu.api.start_run import train
from sifu.core.engine import Engine
from sifu.core.request_terms import Terms
from sifu.methods.base import Method, Start
from sifu.methods.registry import METHODS
from sifu.methods.sifu import Sifu
from sifu.planning.plan import Plan
from sifu.run.run_view import RunView
from sifu.theory.calibration import exact_multiplier
from sifu.theory.rollback import Subject

LEAVING, DELTA = "the-one-who-leaves", 0.01


class HalfNoise(Sifu):
    """Method that records sigma but adds noise of sigma/2."""

    def starting_model(self, view: RunView, plan: Plan, engine: Engine) -> Start:
        return super().starting_model(view, replace(plan, noise_std=plan.noise_std / 2.0), engine)


class LaterNode(Sifu):
    """Method that records the Psi of the node that `sifu` chooses, but continues from the current model."""

    def plan(self, view: RunView, terms: Terms) -> Plan:
        tip = view.path.tip
        node, rounds = view.path.nodes[tip].node, view.path.rounds_until(tip)
        plan = super().plan(view, terms)
        return replace(plan, source_node=node, source_depth=tip, source_rounds=rounds, wanted_node=node)


@contextmanager
def executed_by(method: type[Method]) -> Iterator[None]:
    """Replace the method `sifu` by another method within the `with` block."""
    before = METHODS["sifu"]
    METHODS["sifu"] = method
    try:
        yield
    finally:
        METHODS["sifu"] = before


def designed_clients(count: int) -> dict[str, tuple[Any, Any]]:
    """Return one client with target 1 on its own feature, and others with target 0, the initial model's prediction.

    Features are large compared with the bias, the only shared parameter, so that the other clients hardly reduce the
    influence of the one client.
    """
    features, samples, large = 128, 4, 10.0

    def rows(feature: int) -> Any:
        x = np.zeros((samples, features))
        x[:, feature] = large
        return x

    others = {f"other-{k:02d}": (rows(1 + k % (features - 1)), np.zeros(samples)) for k in range(count - 1)}
    return {LEAVING: (rows(0), np.ones(samples)), **others}


def designed_run(folder: Path, epsilon: float, clients: int = 5) -> Run:
    """Train forty rounds of the designed task, then execute a request whose noise suffices up to the middle node.

    A first run finds that noise; the second one keeps the model at which its budget is used up.
    """
    spec: dict[str, Any] = {
        "seed": 5,
        "data": {"preprocessing": "fixed"},
        "model": {"kind": "least_squares"},
        "local": {"rate": 5e-4, "steps": 2},
        "stop": {"target": 0.0, "max_rounds": 40},
        "privacy": {"epsilon": epsilon, "delta": DELTA},
    }
    multiplier = exact_multiplier(epsilon, DELTA)
    first = train(spec, run=folder.with_name(f"{folder.name}-first"), clients=designed_clients(clients))
    with first.reader() as reader:
        view = RunView(reader)
        psi = float(view.curve(Subject(1, (0,), multiplier, 1)).at(view.path.tip // 2)[0])
    spec["privacy"]["sigma"] = sigma = multiplier * psi * (1.0 + 1e-6)
    run = train(spec, run=folder, clients=designed_clients(clients))
    run.forget([LEAVING], method="sifu", sigma=sigma, level="none")
    return run
