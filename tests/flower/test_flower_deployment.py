"""One SuperLink and five SuperNodes on loopback, TLS and node authentication on: `make test-flower`."""

from __future__ import annotations

import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployment import Deployment, make_node_key

import sifu
from sifu.api import verify_certificate

pytestmark = pytest.mark.flower
NODES = 5


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Deployment]:
    made = Deployment(tmp_path)
    yield made
    made.close()


def rounds(run: Path) -> int:
    """Rounds recorded so far; -1 before there is a run."""
    if not (run / "run.db").exists():
        return -1
    with sqlite3.connect(f"file:{run / 'run.db'}?mode=ro", uri=True) as database:
        return int(database.execute("SELECT COUNT(*) FROM nodes WHERE kind = 'round'").fetchone()[0])


def statuses(run: Path) -> dict[str, str]:
    """Requests and where they stand."""
    with sqlite3.connect(f"file:{run / 'run.db'}?mode=ro", uri=True) as database:
        return dict(database.execute("SELECT request, status FROM requests").fetchall())


def test_a_real_federation_forgets_while_it_trains(federation: Deployment, tmp_path: Path) -> None:
    app, run = tmp_path / "app", tmp_path / "run"
    assert federation.sifu("flower", "new", app, "--run", run).returncode == 0
    spec = app / "spec.toml"
    text = spec.read_text().replace("max_rounds = 50", "max_rounds = 3").replace("target = 0.9", "target = 0.0")
    spec.write_text(text.replace("evaluate_every = 1", "evaluate_every = 100"))
    federation.superlink()
    for number in range(NODES):
        make_node_key(tmp_path / f"node{number}")
        key = tmp_path / f"node{number}.pub"
        assert federation.sifu("clients", "add", run, "--name", f"site-{number}", "--key", key).returncode == 0
        federation.register(f"node{number}")
        federation.supernode(f"node{number}", f"partition-id={number} num-partitions={NODES}")

    federation.flwr_run(app, "first-run")
    federation.wait_for(lambda: rounds(run) >= 1, 600, "the first rounds")
    asked = federation.sifu("request", run, "--clients", "site-1", "--id", "one")
    assert asked.returncode == 0, asked.stderr
    assert "handed to the running server" in asked.stdout
    # A node dies in the middle of the rounds, and comes back.
    federation.kill("node4", signal.SIGKILL)
    federation.wait_for(lambda: statuses(run).get("one") == "running", 600, "the first request")
    federation.supernode("node4", f"partition-id=4 num-partitions={NODES}")
    assert federation.sifu("request", run, "--clients", "site-3", "--id", "two").returncode == 0
    federation.wait_for(lambda: statuses(run).get("two") == "running", 600, "the second request")
    assert statuses(run)["one"] == "done"
    # SuperLink and with it the ServerApp are killed in mid-retraining; a new run goes on from the store.
    federation.kill("superlink", signal.SIGKILL)
    federation.kill("first-run", signal.SIGKILL)
    assert sifu.open_run(run).verify().problems == []
    federation.superlink()
    # The forgotten party comes back with a fresh key that SuperLink takes in, but our list does not.
    make_node_key(tmp_path / "fresh")
    federation.register("fresh")
    federation.supernode("fresh", f"partition-id=1 num-partitions={NODES}")
    federation.flwr_run(app, "second-run")
    federation.wait_for(lambda: statuses(run) == {"one": "done", "two": "done"}, 600, "going on")
    federation.wait_for(lambda: federation.processes["second-run"].poll() is not None, 300, "the end")

    result = sifu.open_run(run).verify()
    assert result.problems == [], result.problems
    files = sorted((run / "certificates").iterdir())
    assert len(files) == 4
    assert all(verify_certificate(path).problems == [] for path in files)
    with sqlite3.connect(run / "run.db") as database:
        for client, request in ((1, "one"), (3, "two")):
            noised = database.execute("SELECT noise_node FROM requests WHERE request = ?", (request,)).fetchone()[0]
            later = database.execute(
                "SELECT COUNT(*) FROM participation WHERE client = ? AND node > ?", (client, noised)
            ).fetchone()[0]
            assert later == 0
        twice = database.execute("SELECT COUNT(*) - COUNT(DISTINCT branch || '.' || position) FROM nodes").fetchone()[0]
        assert twice == 0
        names = [row[0] for row in database.execute("SELECT name FROM clients ORDER BY client")]
    assert names == [f"site-{number}" for number in range(NODES)]
    for name in ("node1", "node3", "fresh"):
        assert federation.processes[name].poll() is None  # still connected, never asked again
