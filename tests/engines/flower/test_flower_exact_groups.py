"""Groups on four real SuperNodes with TLS and node authentication: a user's models, and adapters of a language model.

Each run forgets a client, the server is killed by SIGKILL meanwhile, and the run verifies. In the second run, SuperLink
is also killed during a round.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from deployment import Deployment
from test_flower_deployment import SERVER, finish, numpy_client, query
from test_flower_exact_ways import NODES, exact_app, forget_with_a_kill, nodes

import public_backbone
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
    "groups": {"count": 2, "rounds": 2, "rebuild": "never"},
    "server": {"rejected": "reply"},
    "data": {"preprocessing": "fixed"},
    "stop": {"max_rounds": 3, "target": 0.0, "evaluate_every": 100},
}

TUNED_CLIENT = '''"""Random text, and which of three authors wrote it. A group is tuned once GATE is there."""

import time
from pathlib import Path

import numpy as np

import sifu
from sifu.engines.flower.client import client_app
from sifu.engines.flower.ready import ReadyClient

sifu.allow_code("federation.backbone:make_language")


class Held(ReadyClient):
    def train(self, model, instruction):
        Path(GATE).with_suffix(".reached").touch()
        while not Path(GATE).exists():
            time.sleep(0.1)
        return super().train(model, instruction)


def load(context):
    part = int(context.node_config["partition-id"])
    random = np.random.default_rng(part)
    return Held(f"site-{part}", random.integers(0, 17, size=(30, 6)), random.integers(0, 3, size=30))


app = client_app(load)
'''
TUNED = {
    "model": {"kind": "ridge", "outputs": 3},
    "features": {
        "kind": "module",
        "module": "federation.backbone:make_language",
        "trainable": "mix.down,mix.up",
        "tune": "blocks",
        "block": 4,
    },
    "groups": {"count": 2, "rounds": 1, "rebuild": "never"},
    "local": {"rate": 0.05, "steps": 2},
    "ridge": {"regularisation": 0.01},
    "server": {"rejected": "reply"},
    "data": {"preprocessing": "fixed"},
    "keep": {"statistics": "clients"},
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


def test_groups_tune_adapters_of_a_language_model_and_forget_without_a_round_whatever_is_killed(
    nodes: Deployment, tmp_path: Path
) -> None:
    marker, gate = tmp_path / "killed", tmp_path / "gate"
    client = TUNED_CLIENT.replace("GATE", repr(str(gate)))
    allowed = 'sifu.allow_code("federation.backbone:make_language")\n'
    server = SERVER.rpartition("app = ")[0] + f"{allowed}app = server_app()\n"
    server = server.replace("import numpy as np\n", "import numpy as np\n\nimport sifu\n", 1)
    app, run = exact_app(nodes, tmp_path, TUNED, client, server, marker, masked_statistics="false")
    (app / "federation" / "backbone.py").write_text(Path(public_backbone.__file__).read_text())
    nodes.flwr_run(app, "tuned-1")
    nodes.wait_for(gate.with_suffix(".reached").exists, "the round of the groups")
    nodes.kill("superlink", signal.SIGKILL)
    nodes.kill("tuned-1", signal.SIGKILL)
    gate.touch()
    nodes.superlink()
    nodes.flwr_run(app, "tuned")
    finish(nodes, "tuned")
    forget_with_a_kill(nodes, app, run, marker, "tuned")
    (outcome,) = sifu.open_run(run).outcomes()
    assert (outcome.method, outcome.cost.rounds, outcome.cost.bytes_sent) == ("closed_form", 0, 0)
    with sifu.open_run(run).reader() as reader:
        solves = [event.content["solve"]["asked"] for event in reader.events() if "solve" in event.content]
        size = reader.group_layout.size
    assert solves == [NODES, 0]  # statistics were sent once
    assert size == 8 * 2 + 2 * 8 + 8 * 3 + 3  # the adapter and a last layer that is discarded
    # The groups' round and both solves: no run of the app repeated the work of another.
    assert query(run, "SELECT COUNT(*) FROM events WHERE kind IN ('group rounds', 'rounds')") == [(3,)]
