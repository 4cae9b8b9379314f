"""Exact methods on four real SuperNodes with TLS and node authentication: heads with plain and masked sums.

Each run forgets a client, a process is killed by SIGKILL at a bad moment, and the run verifies.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from deployment import Deployment, make_node_key
from flower_heads import embedded_sum, kept_sum
from test_flower_deployment import SERVER, admit, check, finish, new_app, query, started, statuses

from sifu.core.spec import Spec, commented_toml
from sifu.data import ClientData

pytestmark = pytest.mark.flower
NODES = 4
HEAD_CLIENT = '''"""A ready client with its own data, whose statistics are sent once GATE is there."""

import time
from pathlib import Path

import numpy as np

from sifu.engines.flower.client import client_app
from sifu.engines.ready import ReadyClient


class Held(ReadyClient):
    def statistics(self, instruction):
        Path(GATE).with_suffix(".reached").touch()
        while not Path(GATE).exists():
            time.sleep(0.1)
        return super().statistics(instruction)


def load(context):
    part = int(context.node_config["partition-id"])
    random = np.random.default_rng(part)
    return Held(f"site-{part}", random.normal(size=(30, 6)), random.integers(0, 3, size=30))


app = client_app(load)
'''
HEADS = {
    "model": {"kind": "ridge", "outputs": 3},
    "features": {"kind": "random_fourier", "count": 8, "bandwidth": 3.0},
    "server": {"rejected": "reply"},
    "data": {"preprocessing": "fixed"},
}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with started(tmp_path_factory.mktemp("federation"), NODES) as deployment:
        yield deployment


def exact_app(
    nodes: Deployment, folder: Path, spec: dict, client: str, server: str, marker: Path, **config: str
) -> tuple[Path, Path]:
    """Write an app for a spec, whose server kills itself once during a rollback; admit every node."""
    app, run = new_app(nodes, folder, 1, **config)
    (app / "spec.toml").write_text(commented_toml(Spec.from_mapping(spec)))
    (app / "federation" / "client_app.py").write_text(client)
    (app / "federation" / "server_app.py").write_text(server.replace("MARKER", repr(str(marker))))
    admit(nodes, run, NODES)
    return app, run


def head_app(nodes: Deployment, folder: Path, marker: Path, gate: Path, masked: bool) -> tuple[Path, Path]:
    client = HEAD_CLIENT.replace("GATE", repr(str(gate)))
    server = SERVER.rpartition("app = ")[0] + "app = server_app()\n"
    return exact_app(nodes, folder, HEADS, client, server, marker, masked_statistics=str(masked).lower())


def true_digest(numbers: list[int]) -> str:
    """Return the digest of the sum over these clients, computed from their data without Flower."""
    clients = []
    for number in numbers:
        random = np.random.default_rng(number)
        clients.append(ClientData(f"site-{number}", random.normal(size=(30, 6)), random.integers(0, 3, size=30)))
    return embedded_sum(Spec.from_mapping(HEADS), clients).digest()


def levels(run: Path) -> list[tuple]:
    return query(run, "SELECT request, status, level FROM requests")


def forget_with_a_kill(nodes: Deployment, app: Path, run: Path, marker: Path, name: str) -> None:
    """Forget a client; the server is killed during the rollback, and the next one executes the request."""
    assert nodes.sifu("request", run, "--clients", "site-1", "--id", "leave").returncode == 0
    nodes.flwr_run(app, f"{name}-killed")
    nodes.wait_for(marker.exists, "the kill in the forget")
    nodes.kill(f"{name}-killed", signal.SIGKILL)  # SuperLink would take a minute to notice
    check(run)
    assert statuses(run) == {"leave": "planned"}
    nodes.flwr_run(app, f"{name}-again")
    finish(nodes, f"{name}-again")
    assert levels(run) == [("leave", "done", "exact")]
    check(run)


def test_masked_heads_forget_exactly_though_the_server_is_killed_in_the_forget(
    nodes: Deployment, tmp_path: Path
) -> None:
    marker, gate = tmp_path / "killed", tmp_path / "gate"
    gate.touch()
    app, run = head_app(nodes, tmp_path, marker, gate, masked=True)
    nodes.flwr_run(app, "masked")
    finish(nodes, "masked")
    assert kept_sum(run).digest() == true_digest([0, 1, 2, 3])
    forget_with_a_kill(nodes, app, run, marker, "masked")
    assert kept_sum(run).digest() == true_digest([0, 2, 3]) != true_digest([0, 1, 2, 3])


@pytest.mark.slow
def test_plain_heads_survive_a_killed_superlink_and_do_without_a_node_that_never_returns(
    nodes: Deployment, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    app, run = head_app(nodes, tmp_path, tmp_path / "killed", gate, masked=False)
    (tmp_path / "killed").touch()  # the server does not kill itself in this test
    nodes.flwr_run(app, "plain-1")
    nodes.wait_for(gate.with_suffix(".reached").exists, "the message for statistics")
    nodes.kill("superlink", signal.SIGKILL)
    nodes.kill("plain-1", signal.SIGKILL)
    gate.touch()
    nodes.superlink()
    nodes.flwr_run(app, "plain-2")
    finish(nodes, "plain-2")
    assert kept_sum(run).digest() == true_digest([0, 1, 2, 3])
    check(run)
    # Node 3 never returns; its replacement has a key that is not on the list of clients.
    nodes.kill("node3", signal.SIGKILL)
    make_node_key(nodes.folder / "fresh")
    nodes.register("fresh")
    nodes.supernode("fresh", f"partition-id=3 num-partitions={NODES}")
    assert nodes.sifu("request", run, "--clients", "site-1", "--id", "leave").returncode == 0
    nodes.flwr_run(app, "plain-3")
    finish(nodes, "plain-3")
    assert levels(run) == [("leave", "done", "exact")]
    assert kept_sum(run).digest() == true_digest([0, 2])
    check(run)
