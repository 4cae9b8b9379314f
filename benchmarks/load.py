"""Many clients, many rounds, many requests: memory, bytes on disk, times of plan and status. `make load`.

The engine makes up its rounds (a model of a few numbers, random drifts), so that what is measured is the store and the
planner. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import sifu
from sifu.core.draws import base_key, place_key
from sifu.core.engine import ClientProfile, Evaluation, Position, RoundResult, TrainingFacts
from sifu.core.errors import SifuError
from sifu.core.layout import ModelLayout
from sifu.core.participation import Participation

SIZE = 8


class MadeUpFederation:
    """Rounds with random drifts, the same ones for the same place."""

    def __init__(self, clients: int, participants: int, seed: int = 1) -> None:
        self.layout = ModelLayout(("w",), ((SIZE,),))
        self.clients = tuple(ClientProfile(f"client-{k:06d}", 10, 5, 1.0, 0.0) for k in range(clients))
        taking_part = Participation("poisson", rate=participants / clients)
        self.facts = TrainingFacts(0.5, 0.0, False, 0.0, None, 1.0, taking_part, "float64", True, True)
        self._key, self._seed = base_key(seed, "load"), seed

    def initial_model(self, branch: int) -> Any:
        return np.zeros(SIZE)

    def run_round(self, model: Any, position: Position, active: Any, **_: Any) -> RoundResult:
        who = self.facts.participation.draw(active, place_key(self._key, position.branch, position.round))
        rng = np.random.default_rng((self._seed, position.branch, position.round))
        if who.size == 0:
            return RoundResult(model, who, np.zeros(0, dtype=np.int64), np.zeros(0), 0.0, 0.0)
        drifts = rng.uniform(1e-4, 1e-3, who.size)
        return RoundResult(model + rng.normal(size=SIZE) * 1e-3, who, np.full(who.size, 10), drifts, 1e-3, 0.0)

    def local_updates(self, model: Any, position: Position, clients: Any, steps: int) -> Any:
        return np.zeros((len(clients), SIZE))

    def evaluate(self, model: Any, clients: Any) -> Evaluation:
        count = np.asarray(clients).size
        return Evaluation(np.asarray(clients), np.full(count, 10), np.full(count, 9), np.full(count, 1.0))


def peak_megabytes() -> float:
    """The most memory this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def seconds(call: Any, repeats: int = 1) -> float:
    """The median time of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(clients: int, rounds: int, participants: int, requests: int) -> dict[str, Any]:
    """Train, plan, ask for and carry out; what it took."""
    engine: Any = MadeUpFederation(clients, participants)
    spec = {
        "data": {"clients": clients},
        "server": {"participation": str(engine.facts.participation)},
        "stop": {"target": 0.0, "max_rounds": rounds, "evaluate_every": max(1, rounds // 4)},
        "privacy": {"sigma": 5.0},
    }
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "run"
        before = peak_megabytes()
        training = seconds(lambda: sifu.train(spec, run=folder, engine=engine))
        run = sifu.open_run(folder, engine=engine)
        reader = run.reader()
        taken = int(reader.query("SELECT COUNT(*) FROM participation")[0][0])
        reader.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        pages = "SELECT SUM(pgsize) FROM dbstat WHERE name = 'participation'"
        try:
            table = reader.query(pages)[0][0]
        except SifuError:  # an SQLite without dbstat
            table = None
        reader.close()
        size = os.path.getsize(folder / "run.db")
        after_training = peak_megabytes()
        plan = seconds(lambda: run.plan(["client-000003"]), 5)
        status = seconds(run.status, 3)
        asking = seconds(lambda: [run.request([f"client-{k:06d}"], f"r{k}", max_rounds=1) for k in range(requests)])
        forgetting = seconds(lambda: run.forget(min_level="none"))
        return {
            "clients": clients,
            "rounds": rounds,
            "participations": taken,
            "requests": requests,
            "training_seconds": training,
            "database_bytes": size,
            "database_bytes_a_participation": size / taken,
            "table_bytes_a_participation": None if table is None else table / taken,
            "peak_megabytes_before": before,
            "peak_megabytes_after_training": after_training,
            "peak_megabytes": peak_megabytes(),
            "plan_seconds_with_opening": plan,
            "status_seconds": status,
            "seconds_a_request_received": asking / max(1, requests),
            "seconds_a_request_carried_out": forgetting / max(1, requests),
            "verifies": run.verify().problems == [],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--participants", type=int, default=100)
    parser.add_argument("--requests", type=int, default=1_000)
    asked = parser.parse_args()
    print(json.dumps(measure(asked.clients, asked.rounds, asked.participants, asked.requests), indent=1))


if __name__ == "__main__":
    main()
