"""A new method in one file: go half of the way back to the initial model, then continue without the client.

    python examples/new_method.py

It is a heuristic: nothing bounds the client's influence on that model. It must not certify anything, and it cannot: its
first premise fails, and the level follows from the premises alone. docs/new-method.md explains every line.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import ClassVar

import sifu
from sifu.core.engine import Engine
from sifu.core.method_info import MethodInfo
from sifu.core.request_terms import RequestTerms
from sifu.methods.base import Method, Start, plan_from
from sifu.planning.plan import Plan
from sifu.run.run_view import RunView


class Halfway(Method):
    """Method that continues from the mean of the initial and the current model without the client."""

    info: ClassVar[MethodInfo] = MethodInfo(
        "halfway",
        "go half of the way back to the initial model: an example, proves nothing",
        certifies=False,
        protection="nothing",
        starts_from="current",
    )

    def plan(self, view: RunView, terms: RequestTerms) -> Plan:
        """Return the plan of the request; the run is not changed."""
        return plan_from(self, view, terms, view.path.tip)

    def starting_model(self, view: RunView, plan: Plan, engine: Engine) -> Start:
        """Return the model that retraining starts from."""
        first = view.reader.load_model(view.path.nodes[0].node)
        current = view.reader.load_model(view.reader.tip)
        return Start(((first + current) / 2.0).astype(current.dtype))


sifu.register(Halfway)  # an installed package uses an entry point instead


def main(folder: Path) -> sifu.Run:
    """Train, forget by the new method and by sifu, verify; return the run."""
    spec = {"data": {"clients": 40}, "stop": {"target": 0.8, "max_rounds": 60}}
    run = sifu.train(spec, run=folder)
    for client, method in (("client-003", "halfway"), ("client-007", "sifu")):
        (outcome,) = run.forget([client], method=method)
        print(f"{method}: {outcome.rounds} rounds, level {outcome.level}, {outcome.cost.bytes_sent / 1e6:.1f} MB sent")
    print("verified:", run.verify().holds)
    return run


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary) / "run")
