"""Groups on four real SuperNodes with TLS and node authentication, with a user's own models.

The run forgets a client, the server is killed by SIGKILL meanwhile, and the run verifies.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from deployment import Deployment
from test_flower_deployment import SERVER, finish, numpy_client
from test_flower_exact_ways import exact_app, forget_with_a_kill, nodes

import sifu

__all__ = ["nodes"]  # a fixture: this file starts its own processes

pytestmark = pytest.mark.flower
TROUBLE = """
from sifu.core.engine import Position

usual = FunctionClient.train


def train(self, model, instruction):
    arrays, samples = usual(self, model, instruction)
    if self.name == "site-3" and instruction.position == Position(0, 0):
        arrays = {"w": np.full(4, np.nan)}
    if self.name == "site-3" and instruction.position == Position(0, 1):
        arrays = {"w": np.zeros(5)}
    return arrays, samples


FunctionClient.train = train
"""
GROUPS = {
    "model": {"kind": "python"},
    "local": {"rate": 0.1, "steps": 1},
    "regularity": {"kind": "assumed", "factor": 1.0},
    "groups": {"count": 2, "rounds": 2},
    "server": {"rejected": "reply"},
    "data": {"preprocessing": "fixed"},
    "stop": {"max_rounds": 3, "target": 0.0, "evaluate_every": 100},
}


def test_groups_forget_exactly_and_refuse_what_cannot_be_used(nodes: Deployment, tmp_path: Path) -> None:
    marker = tmp_path / "killed"
    client = numpy_client().replace("\napp =", f"{TROUBLE}\n\napp =")
    app, run = exact_app(nodes, tmp_path, GROUPS, client, SERVER, marker)
    nodes.flwr_run(app, "groups-1")
    finish(nodes, "groups-1")
    with sifu.open_run(run).reader() as reader:
        refusals = [row for event in reader.events() for row in event.content.get("refusals", ())]
    assert [(row["client"], row["reason"]) for row in refusals] == [("site-3", "not finite"), ("site-3", "wrong shape")]
    forget_with_a_kill(nodes, app, run, marker, "groups")
    assert sifu.open_run(run).outcomes()[0].method == "groups"
