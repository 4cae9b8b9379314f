"""Cost of a recorded round among ten times as many clients, with the same number of participants.

    python benchmarks/many_clients.py [--clients 100 1000] [--taking-part 20] [--samples 1] [--rounds 150] [--turns 5]

Softmax regression with 64 features and 10 classes; every client has `--samples` samples. `simulator` is `sifu.train`,
`loop` is `sifu.ServerLoop` with replies at no cost. Each size runs in turns with the others, so that a busy machine
slows all of them. A figure is the shortest median of a turn, in milliseconds of processor time per round.

`round` is a round without evaluation. An evaluation takes every client's samples, so ten times as many clients are ten
times as many `evaluated` samples. `evaluation` is what evaluating every round adds, and `both` their sum. Each part
ends with the ratios of the last size to the first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

import sifu

FEATURES, CLASSES = 64, 10
UNTIMED = 10
"""Number of first rounds that are not timed."""


def spec_of(chosen: argparse.Namespace, *, evaluated: bool) -> dict[str, Any]:
    """Return the spec of a run that evaluates every round or only the last."""
    rounds = chosen.rounds + UNTIMED
    return {
        "local": {"rate": 0.05, "steps": 5},
        "server": {"participation": f"fixed({chosen.taking_part})"},
        "stop": {"target": 0.0, "max_rounds": rounds, "evaluate_every": 1 if evaluated else rounds},
    }


def simulator(folder: Path, clients: int, chosen: argparse.Namespace, *, evaluated: bool) -> list[float]:
    """Return the processor time at the end of each round of the embedded simulator."""
    random = np.random.default_rng(1)
    data = {
        f"client-{number:05}": (
            random.standard_normal((chosen.samples, FEATURES)),
            random.integers(0, CLASSES, chosen.samples),
        )
        for number in range(clients)
    }
    spec = spec_of(chosen, evaluated=evaluated) | {"model": {"kind": "softmax", "outputs": CLASSES}}
    ends: list[float] = []
    sifu.train(spec, run=folder, clients=data, progress=lambda _: ends.append(time.process_time()))
    return ends


def loop(folder: Path, clients: int, chosen: argparse.Namespace, *, evaluated: bool) -> list[float]:
    """Return the processor time at the end of each round of a server loop."""
    names = {f"client-{number:05}": chosen.samples for number in range(clients)}
    spec = spec_of(chosen, evaluated=evaluated) | {"regularity": {"kind": "assumed", "factor": 1.0}}
    ends: list[float] = []
    with sifu.ServerLoop(
        folder, spec, names, lambda: {"w": np.zeros((FEATURES, CLASSES))}, evaluates=evaluated
    ) as server:
        while task := server.next():
            if task.kind == "evaluate":
                server.take(dict.fromkeys(task.models, (0, 1.0)))
                continue
            ends.append(time.process_time())
            server.take({name: {"w": model["w"] + 0.01} for name, model in task.models.items()})
    return ends


PARTS: dict[str, Callable[..., list[float]]] = {"simulator": simulator, "loop": loop}


def milliseconds(part: str, clients: int, chosen: argparse.Namespace, *, evaluated: bool) -> float:
    """Return the median time of a round in one run."""
    with tempfile.TemporaryDirectory() as folder:
        ends = PARTS[part](Path(folder) / "run", clients, chosen, evaluated=evaluated)
    return 1e3 * statistics.median(later - earlier for earlier, later in pairwise(ends[UNTIMED:]))


def measure(part: str, chosen: argparse.Namespace) -> None:
    """Print a JSON object for each number of clients, then the ratios of the last to the first."""
    cases = [(clients, evaluated) for clients in chosen.clients for evaluated in (False, True)]
    best = dict.fromkeys(cases, float("inf"))
    for _ in range(chosen.turns):
        for clients, evaluated in cases:
            taken = milliseconds(part, clients, chosen, evaluated=evaluated)
            best[clients, evaluated] = min(best[clients, evaluated], taken)
    rows = [
        {
            "clients": clients,
            "evaluated": clients * chosen.samples,
            "round": best[clients, False],
            "evaluation": best[clients, True] - best[clients, False],
            "both": best[clients, True],
        }
        for clients in chosen.clients
    ]
    for row in rows:
        print(json.dumps({"part": part} | {name: round(value, 3) for name, value in row.items()}), flush=True)
    print(json.dumps({"part": part} | {f"times {name}": round(rows[-1][name] / rows[0][name], 2) for name in rows[0]}))


def main() -> None:
    """Measure the chosen parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--taking-part", type=int, default=20)
    parser.add_argument("--samples", type=int, default=1, help="samples of each client")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--turns", type=int, default=5)
    chosen = parser.parse_args()
    for part in chosen.only:
        measure(part, chosen)


if __name__ == "__main__":
    main()
