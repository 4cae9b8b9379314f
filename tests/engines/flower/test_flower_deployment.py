"""One SuperLink and four SuperNodes on loopback, with TLS and node authentication: `make test-flower`.

All tests share the processes, because starting them takes longer than the tests. Processes are killed by SIGKILL.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from deployment import PATIENCE, Deployment, make_node_key, running

import sifu
from sifu.api import verify_certificate
from sifu.requests.client_list import ask_for_change, fingerprint_of_file

pytestmark = pytest.mark.flower
NODES = 4

CLIENT = '''"""A least-squares client in numpy alone: its process starts five times as fast as one with torch.

HELD waits in its second round until GATE is there: what a test does in the middle of a round, it does at leisure.
"""

import time
from pathlib import Path

import numpy as np
from flwr.app import Context

from sifu.engines.flower.client import FunctionClient, client_app


def make(context: Context) -> FunctionClient:
    part = int(context.node_config["partition-id"])
    random = np.random.default_rng(part)
    x, y = random.normal(size=(20, 4)), random.normal(size=20) + part

    def train(arrays):
        if part == HELD and arrays["w"].any():
            Path(GATE).with_suffix(".reached").touch()
            while not Path(GATE).exists():
                time.sleep(0.1)
        return {"w": arrays["w"] - 0.1 * x.T @ (x @ arrays["w"] - y) / 20}

    def evaluate(arrays):
        return 0, float(np.square(x @ arrays["w"] - y).sum() / 2)

    return FunctionClient(f"site-{part}", 20, train, evaluate)


app = client_app(make, masked_only=MASKED)
'''

SERVER = '''"""The server of numpy clients; where MARKER is a path it kills itself once, in the middle of a rollback."""

import os
import signal
from functools import partial
from pathlib import Path

import numpy as np

from sifu.server.flower_app import server_app
from sifu.engines.own_models import own_blueprint
from sifu.store.writer import RunWriter

usual = RunWriter._record


def record(self, kind, *rest):
    event = usual(self, kind, *rest)  # files are written and rows are there, but nothing is committed yet
    if kind == "rolled back" and MARKER and not Path(MARKER).exists():
        Path(MARKER).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return event


RunWriter._record = record
app = server_app(partial(own_blueprint, lambda branch: {"w": np.zeros(4)}))
'''


@contextmanager
def started(folder: Path, nodes: int) -> Iterator[Deployment]:
    """Start a SuperLink and `nodes` SuperNodes, each registered with its own key."""
    deployment = Deployment(folder)
    try:
        deployment.superlink()
        for number in range(nodes):
            make_node_key(folder / f"node{number}")
            deployment.register(f"node{number}")
            start_node(deployment, number)
        yield deployment
    finally:
        deployment.close()


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with started(tmp_path_factory.mktemp("federation"), NODES) as deployment:
        yield deployment


def start_node(federation: Deployment, number: int) -> None:
    """Start a SuperNode with its share of the data."""
    federation.supernode(f"node{number}", f"partition-id={number} num-partitions={NODES}")


def numpy_client(masked: bool = False, held: int = -1, gate: Path = Path()) -> str:
    """Return the program CLIENT with these settings."""
    return CLIENT.replace("MASKED", str(masked)).replace("HELD", str(held)).replace("GATE", repr(str(gate)))


def new_app(federation: Deployment, folder: Path, rounds: int, **config: str) -> tuple[Path, Path]:
    """Write an app for `rounds` rounds with `sifu flower`; return it and the folder of its run."""
    app, run = folder / "app", folder / "run"
    assert federation.sifu("flower", app, "--run", run).returncode == 0
    spec = app / "spec.toml"
    text = spec.read_text().replace("max_rounds = 50", f"max_rounds = {rounds}").replace("target = 0.9", "target = 0.0")
    spec.write_text(text.replace("evaluate_every = 1", "evaluate_every = 100"))
    project = app / "pyproject.toml"
    lines = project.read_text().splitlines()
    keys = {line.split(" = ")[0]: place for place, line in enumerate(lines) if " = " in line}
    for key, value in {"wait": f"{PATIENCE}", **config}.items():
        lines[keys[key.replace("_", "-")]] = f"{key.replace('_', '-')} = {value}"
    project.write_text("\n".join(lines) + "\n")
    return app, run


def numpy_app(
    federation: Deployment, folder: Path, rounds: int, client: str, marker: str = "", nodes: int = NODES, **config: str
) -> tuple[Path, Path]:
    """Write an app with a model and clients in numpy, and admit every node."""
    app, run = new_app(federation, folder, rounds, **config)
    spec = app / "spec.toml"
    text = spec.read_text().replace('kind = "softmax"', 'kind = "python"').replace('rate = "auto"', "rate = 0.1")
    text = text.replace('kind = "measured"', 'kind = "assumed"').replace("outputs = 10", "outputs = 0")
    spec.write_text(text.replace("\nsteps = 10 ", "\nsteps = 1 "))
    (app / "federation" / "client_app.py").write_text(client)
    (app / "federation" / "server_app.py").write_text(SERVER.replace("MARKER", repr(marker)))
    admit(federation, run, nodes)
    return app, run


def admit(federation: Deployment, run: Path, nodes: int) -> None:
    """Add the first nodes to the run's client list."""
    for number in range(nodes):
        key = fingerprint_of_file(federation.folder / f"node{number}.pub")
        ask_for_change(run, {"do": "add", "name": f"site-{number}", "key": key})


def query(run: Path, sql: str) -> list[tuple]:
    """Return rows of the run's database; none if there is no database yet.

    A read that fails while a new server recovers the log of a killed one is repeated; `check` verifies the run.
    """
    if not (run / "run.db").exists():
        return []
    for wait in (0.2, 1.0, None):
        try:
            with sqlite3.connect(f"file:{run / 'run.db'}?mode=ro", uri=True) as database:
                return database.execute(sql).fetchall()
        except sqlite3.DatabaseError:
            if wait is None:
                raise
            time.sleep(wait)
    return []


def rounds(run: Path) -> int:
    """Return the number of rounds recorded so far."""
    return len(query(run, "SELECT node FROM nodes WHERE kind = 'round'"))


def statuses(run: Path) -> dict[str, str]:
    """Return the status of each request."""
    return dict(query(run, "SELECT request, status FROM requests"))


def clients_of_incidents(run: Path) -> set[str]:
    """Return the clients that incidents have named so far."""
    told = query(run, "SELECT payload FROM events WHERE kind = 'incidents'")
    return {incident["client"] for (payload,) in told for incident in json.loads(payload)["incidents"]}


def finish(federation: Deployment, name: str) -> None:
    """Wait until a run of the app has ended."""
    federation.wait_for(lambda: federation.processes[name].poll() is not None, name)


def check(run: Path) -> None:
    """Check that the run and its certificates verify offline, and that no round occurs twice."""
    result = sifu.open_run(run).verify()
    assert result.problems == [], result.problems
    for path in (run / "certificates").iterdir():
        assert verify_certificate(path).problems == []
    places = query(run, "SELECT branch, position FROM nodes WHERE kind = 'round'")
    assert len(places) == len(set(places))


def never_sampled_after(run: Path, client: int, request: str) -> bool:
    """Return whether a client took part in no round after the noise for its request."""
    noised = query(run, f"SELECT noise_node FROM requests WHERE request = '{request}'")[0][0]
    return not query(run, f"SELECT node FROM participation WHERE client = {client} AND node > {noised}")


def test_a_federation_forgets_twice_while_it_trains_whatever_is_killed(federation: Deployment, tmp_path: Path) -> None:
    marker, gate = tmp_path / "killed", tmp_path / "gate"
    app, run = numpy_app(federation, tmp_path, 3, numpy_client(held=0, gate=gate), marker=str(marker))
    federation.flwr_run(app, "first-run")
    federation.wait_for(lambda: rounds(run) >= 1, "the first round")
    ended = federation.sifu("request", run, "--clients", "site-1", "--id", "one")
    assert ended.returncode == 0, ended.stderr
    assert "in the inbox of the running server" in " ".join(ended.stdout.split())
    assert federation.sifu("request", run, "--clients", "site-3", "--id", "two").returncode == 0
    gate.touch()
    federation.wait_for(marker.exists, "the kill in mid-rollback")
    # SuperLink would take a minute to notice; the test does not wait for that
    federation.kill("first-run", signal.SIGKILL)
    check(run)
    assert statuses(run)["one"] == "planned"
    assert query(run, "SELECT COUNT(*) FROM nodes WHERE kind = 'noise'") == [(0,)]
    federation.flwr_run(app, "second-run")
    federation.wait_for(lambda: statuses(run).get("two") in ("running", "done"), "the second request")
    assert statuses(run)["one"] == "done"
    # SuperLink and the ServerApp are killed in the middle of retraining; a new run continues from the store.
    federation.kill("superlink", signal.SIGKILL)
    federation.kill("second-run", signal.SIGKILL)
    check(run)
    federation.superlink()
    # The forgotten client returns with a new key that SuperLink accepts, but that is not on our list.
    make_node_key(federation.folder / "fresh")
    federation.register("fresh")
    federation.supernode("fresh", f"partition-id=1 num-partitions={NODES}")
    federation.flwr_run(app, "third-run")
    finish(federation, "third-run")
    assert statuses(run) == {"one": "done", "two": "done"}
    check(run)
    assert len(list((run / "certificates").iterdir())) == 4
    assert never_sampled_after(run, 1, "one")
    assert never_sampled_after(run, 3, "two")
    assert [row[0] for row in query(run, "SELECT name FROM clients ORDER BY client")] == [
        f"site-{number}" for number in range(NODES)
    ]
    for name in ("node1", "node3", "fresh"):
        assert federation.processes[name].poll() is None  # still connected, never asked again


def test_the_ready_app_trains_forgets_and_proves(federation: Deployment, tmp_path: Path) -> None:
    app, run = new_app(federation, tmp_path, 1, linger="600.0")
    spec = app / "spec.toml"
    # auto would find that one round saves nothing
    spec.write_text(spec.read_text().replace('sigma = "auto"', "sigma = 0.5"))
    for number in (0, 2, 3):
        key = federation.folder / f"node{number}.pub"
        assert federation.sifu("clients", "add", run, "--name", f"site-{number}", "--node-key", key).returncode == 0
    federation.flwr_run(app, "ready")
    federation.wait_for(lambda: query(run, "SELECT 1 FROM events WHERE kind = 'training done'"), "training")
    assert federation.sifu("request", run, "--clients", "site-2", "--id", "one").returncode == 0
    federation.wait_for(lambda: statuses(run).get("one") == "done", "the request")
    federation.kill("ready", signal.SIGKILL)
    for server in running(federation.processes["superlink"].pid, "flwr-serverapp"):
        os.kill(server, signal.SIGKILL)
    check(run)
    assert never_sampled_after(run, 1, "one")
    assert query(run, "SELECT level FROM requests") == [("proven",)]


@pytest.mark.slow
def test_masked_rounds_with_a_node_killed_in_the_middle(federation: Deployment, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    app, run = numpy_app(federation, tmp_path, 3, numpy_client(True, 3, gate), masked_updates="true")
    federation.flwr_run(app, "masked")
    federation.wait_for(gate.with_suffix(".reached").exists, "the second round on node3")
    federation.kill("node3", signal.SIGKILL)
    gate.touch()
    federation.wait_for(lambda: "site-3" in clients_of_incidents(run), "SuperLink to give node3 up")
    start_node(federation, 3)
    finish(federation, "masked")
    assert rounds(run) == 3
    check(run)
    reader = sifu.open_run(run).reader()
    part = reader.participation()
    # Every reported drift is the true one, recomputed here from the clients' data; missing drifts are infinite.
    # Incidents name the clients whose drifts are missing, and a dropped round.
    models = {0: np.zeros(4)}
    for node in range(1, 4):
        here = part.between(node, node)
        local = [trained(models[node - 1], int(client)) for client in here.clients]
        models[node] = np.mean(local, axis=0) if local else models[node - 1]
        expected = [float(np.linalg.norm(model - models[node])) for model in local]
        finite = np.isfinite(here.drifts)
        np.testing.assert_allclose(here.drifts[finite], np.array(expected)[finite], rtol=1e-6)
        silent = {f"site-{client}" for client in set(range(NODES)) - set(here.clients[finite])} if local else {""}
        assert silent <= clients_of_incidents(run)
    np.testing.assert_allclose(reader.load_model(3), models[3], atol=1e-12)
    reader.close()


def trained(model: np.ndarray, part: int) -> np.ndarray:
    """Return the model after local training by a client of the program CLIENT."""
    random = np.random.default_rng(part)
    x, y = random.normal(size=(20, 4)), random.normal(size=20) + part
    return model - 0.1 * x.T @ (x @ model - y) / 20
