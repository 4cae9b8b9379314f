"""A bad week of a Flower federation, in network namespaces: delay, loss, kills, a straggler and a lost node.

    python tests/engines/flower/bad_week.py [--delay 0.04] [--jitter 0.02] [--loss 0.02] [--folder FOLDER]

It needs root on Linux (`lossy_network`) and takes five to fifteen minutes. SuperLink and each of five SuperNodes have
separate network namespaces, with TLS and node authentication. site-2 takes ten times as long to train as the others,
and `server.wait` closes rounds without it. While the federation trains, two requests are filed and held; one is
withdrawn and one approved while the server runs. Then every process is killed once: each SuperNode, the ServerApp,
SuperLink. site-4 never comes back. Nothing is repaired by hand: processes are restarted as their service units would.
At the end the folder, its certificates and the heads that clients kept must verify, and the cost is printed as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from deployment import Deployment, make_node_key, running
from lossy_network import LossyNetwork
from test_flower_deployment import (
    check,
    never_sampled_after,
    numpy_app,
    numpy_client,
    query,
    statuses,
)

import sifu

NODES, PACE, SLOW, GONE = 5, 1.0, 2, 4
"""Number of nodes; seconds of training; the node that takes ten times as long; the node that never comes back."""
RESTART = 10.0
"""Seconds until a service unit restarts its process."""
SLEEPING_TRAIN = """    def train(arrays):
        time.sleep(float(context.node_config["pace"]))
"""


class Scattered(Deployment):
    """Deployment whose nodes have separate namespaces; all other processes share SuperLink's."""

    PRELOADED = False  # a fork would not run in the namespace

    def __init__(self, folder: Path, network: LossyNetwork) -> None:
        super().__init__(folder, network.address(0))
        self._network = network

    def inside(self, name: str) -> list[str]:
        """Return the command prefix for the namespace of a process."""
        return self._network.inside(int(name.removeprefix("node")) + 1 if name.startswith("node") else 0)

    def node(self, number: int) -> None:
        """Start a SuperNode that keeps the ledger heads it is shown."""
        pace = PACE * (10.0 if number == SLOW else 1.0)
        kept = self.folder / f"heads-{number}.jsonl"
        self.supernode(
            f"node{number}", f'partition-id={number} num-partitions={NODES} pace={pace} checkpoints="{kept}"'
        )


class BadWeek:
    """The federation and the events of the week."""

    def __init__(self, deployment: Scattered, folder: Path, rounds: int) -> None:
        self._deployment, self._began = deployment, time.monotonic()
        client = numpy_client().replace("    def train(arrays):\n", SLEEPING_TRAIN)
        self._app, self.run = numpy_app(deployment, folder, rounds, client, nodes=NODES, timeout="40.0")
        spec = self._app / "spec.toml"
        text = spec.read_text().replace('wait = "all" ', 'wait = "60%" ')
        spec.write_text(text.replace('approval = "none"', 'approval = "one"'))
        self.paused: dict[str, float] = {}
        self._servers = self.node_starts = 0
        self._next_start = [0.0] * NODES

    def say(self, line: str) -> None:
        """Print an event with its time."""
        print(f"{time.monotonic() - self._began:6.0f} s  {line}", flush=True)

    def serve(self) -> None:
        """Start a server, as its service unit would."""
        self._servers += 1
        self._deployment.flwr_run(self._app, self.server)

    @property
    def server(self) -> str:
        """Name of the latest server."""
        return f"server-{self._servers}"

    def counted(self) -> int:
        """Return the number of rounds with at least one participant."""
        return len(query(self.run, "SELECT DISTINCT node FROM participation"))

    def wait_for_round(self, after: int) -> None:
        """Wait until more than `after` rounds counted, or everything is done."""
        self._deployment.wait_for(lambda: self.done() or self.counted() > after, "the next round")

    def done(self) -> bool:
        """Return whether everything is done; until then, restart stopped processes as their service units would."""
        self._start_stopped_nodes()
        if self._deployment.processes[self.server].poll() is None:
            return False
        if statuses(self.run).get("held") == "done":
            return True
        self.say("the server stopped and is started again")
        self.serve()
        return False

    def _start_stopped_nodes(self) -> None:
        """Restart stopped nodes as their service units do: SuperLink refuses a killed node that comes back too soon."""
        now = time.monotonic()
        for number in range(GONE):
            process = self._deployment.processes.get(f"node{number}")
            if process is not None and process.poll() is not None and now > self._next_start[number]:
                self._next_start[number] = now + RESTART
                self.node_starts += 1
                self._deployment.node(number)

    def kill(self, what: str, drop: Callable[[], None], again: Callable[[], None] | None) -> None:
        """Kill something, start it again, and measure the seconds until the next round counts."""
        self.say(f"{what} is killed{'' if again else ' for good'}")
        before, began = self.counted(), time.monotonic()
        drop()
        if again is not None:
            again()
        self.wait_for_round(before)
        self.paused[what] = round(time.monotonic() - began, 1)

    def sifu(self, *words: object) -> None:
        """Run a command while the server runs; the command must hand it over to the server."""
        ended = self._deployment.sifu(*words)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        self.say(ended.stdout.strip().splitlines()[0])

    def kill_node(self, number: int) -> None:
        """Kill a SuperNode, whatever it is doing."""
        again = None if number == GONE else (lambda: self._deployment.node(number))
        self.kill(f"node{number}", lambda: self._deployment.kill(f"node{number}", signal.SIGKILL), again)

    def kill_server(self) -> None:
        """Kill the ServerApp and the log stream of `flwr run`."""

        def drop() -> None:
            for server in running(self._deployment.processes["superlink"].pid, "flwr-serverapp"):
                os.kill(server, signal.SIGKILL)
            self._deployment.kill(self.server, signal.SIGKILL)

        self.kill("the ServerApp", drop, self.serve)

    def kill_superlink(self) -> None:
        """Kill SuperLink, the ServerApp and the log stream."""

        def drop() -> None:
            self._deployment.kill("superlink", signal.SIGKILL)
            self._deployment.kill(self.server, signal.SIGKILL)

        def again() -> None:
            self._deployment.superlink()
            self.serve()

        self.kill("SuperLink", drop, again)

    def happen(self) -> dict[str, object]:
        """Run the week from the first round to the last, and return its cost."""
        self.serve()
        self.wait_for_round(0)
        self.say("the first round counted; two requests are filed")
        self.sifu("request", self.run, "--clients", "site-1", "--id", "held", "--actor", "ann")
        self.sifu("request", self.run, "--clients", "site-3", "--id", "taken-back", "--actor", "ann")
        self._deployment.wait_for(lambda: len(statuses(self.run)) == 2, "the inbox")
        self.wait_for_round(self.counted())
        assert statuses(self.run)["held"] == "received", statuses(self.run)  # it still waits a round later
        self.sifu("decide", self.run, "taken-back", "withdraw", "--actor", "ann")
        self.sifu("decide", self.run, "held", "approve", "--actor", "ben")
        self._deployment.wait_for(lambda: statuses(self.run)["held"] in ("running", "done"), "the request")
        self.kill_node(GONE)
        for number in range(GONE):
            self.kill_node(number)
        self.kill_server()
        self.kill_superlink()
        self._deployment.wait_for(self.done, "the end")
        return self.account()

    def account(self) -> dict[str, object]:
        """Check that everything verifies; return the losses and the time spent waiting."""
        run = self.run
        assert statuses(run) == {"held": "done", "taken-back": "withdrawn"}, statuses(run)
        check(run)
        assert never_sampled_after(run, 1, "held")
        assert sifu.open_run(run).status().phase == "ready"
        heads = [path for path in sorted(self._deployment.folder.glob("heads-*.jsonl")) if path.stat().st_size]
        for path in heads:
            ended = self._deployment.sifu("verify", run, "--head", path)
            assert ended.returncode == 0, ended.stdout + ended.stderr
        with sifu.open_run(run).reader() as reader:
            told = [
                incident
                for event in reader.events()
                if event.kind == "incidents"
                for incident in json.loads(event.payload)["incidents"]
            ]
        closings = [
            float(match[1]) for incident in told if (match := re.search(r"enough after ([\d.]+) s", incident["what"]))
        ]
        rounds = query(run, "SELECT COUNT(*) FROM nodes WHERE kind = 'round'")[0][0]
        present = Counter(dict(query(run, "SELECT client, COUNT(*) FROM participation GROUP BY client")))
        return {
            "seconds": round(time.monotonic() - self._began),
            "servers started": self._servers,
            "nodes started again because SuperLink refused them": self.node_starts,
            "rounds that counted": self.counted(),
            "rounds lost": rounds - self.counted(),
            "rounds of each site": {f"site-{client}": present[client] for client in range(NODES)},
            "late": sifu.open_run(run).status().late,
            "median seconds until a round closed without the slow": statistics.median(closings) if closings else None,
            "seconds to the next round after a kill": self.paused,
            "kinds of incidents": dict(Counter(_kind(incident["what"]) for incident in told).most_common()),
            "folders that verify": 1,
            "clients' heads that verify": len(heads),
        }


def _kind(what: str) -> str:
    """Return the text of an incident with its numbers replaced."""
    return re.sub(r"[\d.]+", "#", what)[:70]


def main() -> None:
    """Make the network, run the week, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay", type=float, default=0.04, help="delay in seconds, each way")
    parser.add_argument("--jitter", type=float, default=0.02, help="largest additional delay in seconds")
    parser.add_argument("--loss", type=float, default=0.02, help="share of lost packets")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of training and of retraining")
    parser.add_argument("--folder", type=Path, default=None, help="folder for all files; by default a temporary one")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # on SIGTERM the started processes are ended, too
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="bad-week-"))
    (folder / "processes").mkdir(parents=True)
    with LossyNetwork(NODES + 1, chosen.delay, chosen.jitter, chosen.loss) as network:
        deployment = Scattered(folder / "processes", network)
        try:
            deployment.superlink()
            for number in range(NODES):
                make_node_key(deployment.folder / f"node{number}")
                deployment.register(f"node{number}")
                deployment.node(number)
            print(json.dumps(BadWeek(deployment, folder, chosen.rounds).happen(), indent=1))
        except BaseException:
            sys.stderr.write(deployment.logs())
            raise
        finally:
            deployment.close()


if __name__ == "__main__":
    main()
