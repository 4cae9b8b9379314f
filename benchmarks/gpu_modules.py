"""A module as lanes of one program on a GPU: how long a round takes, beside how exact it is against the plain loop.

    python benchmarks/gpu_modules.py [--out FILE.json] [--clients 100] [--rounds 40] [--device cuda] [--precision tf32]

The residual network on random images of CIFAR-10's shape, as the experiment `groups` trains it: everyone together, and
ten groups side by side. The figure is the best of three turns after a warm-up.
"""

from __future__ import annotations

import argparse
import json
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from gpu_groups import groups_of, take
from gpu_rounds import B, random_clients

from sifu.core.engine import Position
from sifu.engines.sim import LocalTraining, SimulatedFederation, make_model
from sifu.engines.sim.lanes import lane_engines
from sifu_paper.provenance import commit

SHAPE = (3, 32, 32)


def agreement(device: str, precision: str) -> float:
    """The largest difference to the loop over one round, as a share of the round's largest step."""
    clients = random_clients(6, 40, SHAPE, 10, "float32")
    training = LocalTraining(0.01, 2, 20, 0.9)
    federation = SimulatedFederation(clients, make_model("resnet_small", SHAPE, 10), training, dtype="float32", seed=1)
    (engine,) = lane_engines([federation], [clients], device, precision)
    start, everyone = federation.initial_model(0), np.arange(6)
    mine = engine.run_round(start, Position(0, 0), everyone).model
    loop = federation.run_round(start, Position(0, 0), everyone).model
    engine.close()
    return float(np.abs(mine - loop).max() / np.abs(loop - start).max())


def speed(device: str, precision: str, count: int, rounds: int) -> dict[str, Any]:
    """Milliseconds per round of everyone, and of ten groups."""
    clients = random_clients(count, 100, SHAPE, 10, "float32")
    model = make_model("resnet_small", SHAPE, 10)
    federation = SimulatedFederation(clients, model, B, dtype="float32", seed=1, strategy="loop")
    (engine,) = lane_engines([federation], [clients], device, precision)
    start, groups = federation.initial_model(0), groups_of(federation, 10)
    ways = {"ms_together": ([start], [np.arange(count)]), "ms_ten_groups": ([start] * 10, groups)}
    timed: dict[str, float] = {}
    for name, (models, members) in ways.items():
        take(engine, models, members, rounds)
        timed[name] = min(take(engine, models, members, rounds) for _ in range(3))
    engine.close()
    return timed


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="tf32")
    options = parser.parse_args()
    result = {
        "date": date.today().isoformat(),
        "commit": commit(),
        "device": options.device,
        "clients": options.clients,
        "agreement": {
            precision: agreement(options.device, precision) for precision in {"float32": 0, options.precision: 0}
        },
        "precision": options.precision,
        **speed(options.device, options.precision, options.clients, options.rounds),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
