"""What ten times as many clients cost where the same number takes part, in Flower's simulation.

    python benchmarks/flower_scale.py [--clients 100 1000] [--taking-part 20] [--rounds 40]

Each size runs in a separate process: virtual nodes (ray), softmax on digits, recorded rounds of `fixed(taking-part)`
without evaluation. `seconds` is the median between two recorded rounds and `megabytes` the server's largest resident
memory, ray's workers apart. The last line has the ratios of the last size to the first.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sifu
from sifu.run.clients_and_engine import clients_from_spec
from sifu_paper.flower_simulation import enter_federation, simulate

if TYPE_CHECKING:
    from flwr.serverapp import Grid


class EnoughRoundsError(Exception):
    """As many rounds as were wanted are recorded."""


def measure(clients: int, taking_part: int, rounds: int) -> dict[str, Any]:
    """Recorded rounds on one simulation."""
    spec = sifu.Spec.from_mapping(
        {
            "data": {"name": "digits", "clients": clients, "samples_per_client": 1},
            "model": {"kind": "softmax", "outputs": 10},
            "local": {"rate": 0.1, "steps": 5},
            "server": {"participation": f"fixed({taking_part})"},
            "stop": {"target": 0.0, "max_rounds": 10**6, "evaluate_every": 10**6},
            "seed": 1,
        }
    )
    ends: list[float] = []

    def note_end(progress: object) -> None:
        ends.append(time.perf_counter())
        if len(ends) == rounds + 2:  # the first ones wait for processes to start
            raise EnoughRoundsError

    def serve(grid: Grid) -> None:
        engine = enter_federation(grid, Path(folder), spec, clients_from_spec(spec), "fixed constants")
        with suppress(EnoughRoundsError):
            sifu.train(spec, run=Path(folder) / "run", engine=engine, progress=note_end)

    with tempfile.TemporaryDirectory() as folder:
        logging.getLogger("flwr").setLevel(logging.CRITICAL)
        simulate(Path(folder), clients, serve)
    spent = [later - earlier for earlier, later in pairwise(ends[1:])]
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0
    return {"clients": clients, "seconds": statistics.median(spent), "megabytes": round(largest)}


def main() -> None:
    """Measure each size and print one JSON object a line, then the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--taking-part", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=40)
    chosen = parser.parse_args()
    if len(chosen.clients) == 1:
        print(json.dumps(measure(chosen.clients[0], chosen.taking_part, chosen.rounds)), flush=True)
        return
    rows = []
    for clients in chosen.clients:
        options = ["--clients", clients, "--taking-part", chosen.taking_part, "--rounds", chosen.rounds]
        command = [sys.executable, __file__, *map(str, options)]
        lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
        rows.append(json.loads(lines[-1]))
        print(lines[-1], flush=True)
    print(json.dumps({f"times as many {key}": round(rows[-1][key] / rows[0][key], 2) for key in rows[0]}))


if __name__ == "__main__":
    main()
