"""Many clients: what a round costs with 100,000 of them against 1,000, in time and in memory beyond the data.

    python benchmarks/memory.py
    python benchmarks/memory.py --clients 1000 100000 --participants 100 --rounds 20 --repeats 3

Softmax regression on synthetic samples, float32. Each size runs in processes of its own, in turn, and reports its
largest resident size (getrusage): at the start, with the data made, with the engine built, after the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from importlib import import_module
from typing import Any

import numpy as np
from environments import ROOT
from summary import show

FEATURES, CLASSES = 784, 10
MEBI = 2**20


def largest_resident() -> int:
    """The largest resident size of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measure(clients: int, samples: int, participants: int, rounds: int) -> dict[str, Any]:
    """One federation in this process: seconds a round, and the memory of each stage."""
    from sifu.core.engine import Position
    from sifu.core.spec import Spec
    from sifu.data import ClientData
    from sifu.launch.federation import engine_from_spec

    spec = Spec.from_mapping(
        {
            "data": {"name": "python", "clients": clients, "samples_per_client": samples},
            "model": {"kind": "softmax", "outputs": CLASSES, "dtype": "float32"},
            "local": {"rate": 0.01, "steps": 10},
            "server": {"participation": f"fixed({participants})"},
        }
    )
    import_module("sifu.engines.sim")  # torch is not the data's doing, nor the engine's
    at_start = largest_resident()
    generator = np.random.default_rng(0)
    x = generator.random((clients, samples, FEATURES), dtype=np.float32)
    y = generator.integers(CLASSES, size=(clients, samples))
    data = [ClientData(f"client-{number:06d}", x[number], y[number]) for number in range(clients)]
    with_data = largest_resident()
    started = time.perf_counter()
    engine, _ = engine_from_spec(spec, data)
    build_seconds = time.perf_counter() - started
    built = largest_resident()
    model, active, times = engine.initial_model(0), np.arange(clients), []
    for number in range(rounds + 2):
        started = time.perf_counter()
        model = engine.run_round(model, Position(0, number), active).model
        times.append(time.perf_counter() - started)
    return {
        "clients": clients,
        "seconds_a_round": statistics.median(times[2:]),
        "build_seconds": build_seconds,
        "data_bytes": x.nbytes + y.nbytes,
        "data_stage": with_data - at_start,
        "engine_stage": built - with_data,
        "beyond_data": largest_resident() - at_start - x.nbytes - y.nbytes,
    }


def in_a_process(chosen: argparse.Namespace, clients: int) -> dict[str, Any]:
    """`measure` in a process of its own, since the largest resident size never falls."""
    command = [sys.executable, __file__, "--one", "--clients", str(clients), "--samples", str(chosen.samples)]
    command += ["--participants", str(chosen.participants), "--rounds", str(chosen.rounds)]
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{clients} clients: {result.stderr}")
    measured: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return measured


def main() -> None:
    """Print a table, one line a size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1000, 100_000])
    parser.add_argument("--samples", type=int, default=10, help="samples of each client (default 10)")
    parser.add_argument("--participants", type=int, default=100, help="clients a round (default 100)")
    parser.add_argument("--rounds", type=int, default=20, help="rounds timed (default 20)")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each size (default 3)")
    parser.add_argument("--one", action="store_true", help="measure the first size here and print JSON")
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(measure(chosen.clients[0], chosen.samples, chosen.participants, chosen.rounds)))
        return
    runs = [in_a_process(chosen, clients) for _ in range(chosen.repeats) for clients in chosen.clients]
    rows, base = [], None
    for clients in chosen.clients:
        mine = [run for run in runs if run["clients"] == clients]
        seconds = statistics.median(run["seconds_a_round"] for run in mine)
        base = base or seconds
        stages = [max(run[key] for run in mine) / MEBI for key in ("data_bytes", "engine_stage", "beyond_data")]
        rows.append(
            [
                f"{clients:,}",
                f"{1000 * seconds:.1f}",
                f"{seconds / base:.2f}",
                f"{statistics.median(run['build_seconds'] for run in mine):.1f}",
                *(f"{stage:,.0f}" for stage in stages),
            ]
        )
    heads = ["clients", "ms a round", "x the first", "s to build", "data MiB", "engine MiB", "peak beyond data MiB"]
    show(f"{chosen.participants} clients a round, {chosen.samples} samples each", heads, rows)


if __name__ == "__main__":
    main()
