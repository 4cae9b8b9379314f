"""Negative controls: three cheating operators and an honest one, on a task that makes cheating detectable.

The task is designed so that Psi equals the true distance. One client moves the model in a direction that no other
client's data affect, so nothing pulls the model back and every round adds its full Delta (docs/theory.md, section 3.1).
The request uses the whole budget. The honest run must pass with an empirical epsilon near the certified epsilon. Each
of three cheats must be caught: half of the noise, the release of a later node than the budget allows, and sensitivities
computed with shares of the whole federation although few clients take part (the accounting of the authors' code).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sifu.api.run import Run
from sifu.api.start_run import train
from sifu.audit.audit_report import AuditOptions
from sifu.audit.releases import Replays
from sifu.audit.run_audit import audit_run
from sifu.core.engine import Engine
from sifu.core.request_terms import RequestTerms
from sifu.methods.base import Method, Start
from sifu.methods.registry import METHODS
from sifu.methods.sifu import Sifu
from sifu.planning.plan import Plan
from sifu.run.run_view import RunView
from sifu.theory.calibration import exact_multiplier
from sifu.theory.rollback import Subject

LEAVING, HONEST = "the-one-who-leaves", "honest"
DELTA = 0.01


@dataclass(frozen=True)
class Control:
    """Result for one operator: the deviation, the certified figures, and the findings of the audit."""

    name: str
    what: str
    must_be_caught: bool
    epsilon_certified: float
    epsilon_true: float
    epsilon_shown: float
    caught: bool
    findings: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """True if all findings, and the empirical epsilon alone, catch a cheat but not an honest run."""
        shown = self.epsilon_shown > self.epsilon_certified
        return self.caught == self.must_be_caught == shown


class HalfNoise(Sifu):
    """Method that records sigma but adds noise of sigma/2."""

    def starting_model(self, view: RunView, plan: Plan, engine: Engine) -> Start:
        """Return the starting model of the method `sifu` with half of the noise."""
        return super().starting_model(view, replace(plan, noise_std=plan.noise_std / 2.0), engine)


class LaterNode(Sifu):
    """Method that records the Psi of the node that `sifu` chooses, but continues from the current model."""

    def plan(self, view: RunView, terms: RequestTerms) -> Plan:
        """Return the plan of the method `sifu` with the current model as its source."""
        tip = view.path.tip
        node = view.path.nodes[tip].node
        rounds = view.path.rounds_until(tip)
        return replace(
            super().plan(view, terms), source_node=node, source_depth=tip, source_rounds=rounds, wanted_node=node
        )


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


def designed_run(
    folder: Path, epsilon: float, *, clients: int = 5, participation: str = "all", accounting: str = "round"
) -> Run:
    """Train forty rounds of the designed task, then execute a request whose noise suffices up to the middle node.

    Args:
        folder: Folder of the run.
        epsilon: Epsilon of the request's budget.
        clients: Number of clients.
        participation: Value of `server.participation`.
        accounting: Value of `privacy.accounting`.
    """
    run = train(
        {
            "seed": 5,
            "data": {"preprocessing": "fixed"},
            "model": {"kind": "least_squares"},
            "local": {"rate": 5e-4, "steps": 2},
            "server": {"participation": participation},
            "stop": {"target": 0.0, "max_rounds": 40},
            "privacy": {"accounting": accounting},
            "keep": {"ratio": 1.01, "lowest_sigma": 1e-6},
        },
        run=folder,
        clients=designed_clients(clients),
    )
    multiplier = exact_multiplier(epsilon, DELTA)
    with run.reader() as reader:
        view = RunView(reader)
        curve = view.curve(Subject(1, (0,), multiplier, "all", 1))
        psi = float(curve.at(view.path.tip // 2)[0])
    run.forget(
        [LEAVING],
        method="sifu",
        sigma=multiplier * psi * (1.0 + 1e-6),
        epsilon=epsilon,
        delta=DELTA,
        max_rounds=1,
        level="none",
    )
    return run


@contextmanager
def executed_by(method: type[Method]) -> Iterator[None]:
    """Replace the method `sifu` by another method within the `with` block."""
    before = METHODS["sifu"]
    METHODS["sifu"] = method
    try:
        yield
    finally:
        METHODS["sifu"] = before


def run_controls(
    epsilon: float = 1.0, seed: int | None = None, progress: Callable[[str, int, int], None] | None = None
) -> list[Control]:
    """Run every control in temporary folders, and return the results.

    Args:
        epsilon: Epsilon of the request's budget.
        seed: Seed of the audit's draws; None draws from the operating system.
        progress: Callback that receives the name of the step, the work done, and the total work.
    """
    a_fifth: dict[str, Any] = {"clients": 40, "participation": "poisson(0.2)", "accounting": "population"}
    cases: list[tuple[str, str, type[Method], dict[str, Any]]] = [
        (HONEST, "nothing is wrong", Sifu, {}),
        ("half the noise", "sigma is recorded, sigma/2 is added", HalfNoise, {}),
        ("later node", "the noise of the allowed node is added to the current model", LaterNode, {}),
        (
            "population accounting",
            "sensitivities by shares of the whole federation, a fifth of which takes part",
            Sifu,
            a_fifth,
        ),
    ]
    controls = []
    options = AuditOptions(attacks=False, replays=Replays(losses=0), seed=seed, as_if_certified=True)
    for number, (name, what, method, task) in enumerate(cases):
        with tempfile.TemporaryDirectory(prefix="sifu-control-") as folder:
            with executed_by(method):
                run = designed_run(Path(folder) / "run", epsilon, **task)
            report = audit_run(run, options)
        releases = report.subjects[0].releases
        true, shown = (0.0, 0.0) if releases is None else (releases.epsilon_true, releases.epsilon_shown)
        controls.append(
            Control(name, what, name != HONEST, epsilon, true, shown, not report.holds, report.contradictions)
        )
        if progress:
            progress("controls", number + 1, len(cases))
    return controls
