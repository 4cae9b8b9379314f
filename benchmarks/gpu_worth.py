"""Where a GPU begins to pay for a linear model: rounds a second of the same run on the CPU and as a lane on the GPU.

    python benchmarks/gpu_worth.py [--out FILE.json]

Softmax regression in float64, K = 10 steps on all samples of a client, tracking on, everyone taking part or ten clients
a round. `sifu.api.devices.WORTH_A_GPU` is taken from here: values (samples times features) that the participants of a
round have between them.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from gpu_rounds import random_clients, take

from sifu.core.engine import Engine
from sifu.core.participation import Participation
from sifu.experiments.provenance import commit
from sifu.sim import LinearModel, LocalTraining, SimulatedFederation
from sifu.sim.lanes import lane_engines

SAMPLES = 20
SETTINGS = [
    (features, clients, participation)
    for features, counts in ((100, (20, 100, 500, 2500)), (784, (5, 20, 80, 320, 1280)))
    for clients in counts
    for participation in ("all", "fixed(10)")
    if participation == "all" or clients > 10
]


def rounds_a_second(engine: Engine, seconds: float) -> float:
    """Rounds a second with tracking, after some that warm up."""
    take(engine, 60, tracked=True)
    rounds = 60
    while True:
        began = time.perf_counter()
        take(engine, rounds, tracked=True)
        spent = time.perf_counter() - began
        if spent > seconds:
            return rounds / spent
        rounds = max(2 * rounds, int(rounds * 1.2 * seconds / spent))


def measure(features: int, clients: int, participation: str, seconds: float) -> dict[str, Any]:
    """One setting on both devices."""
    data = random_clients(clients, SAMPLES, (features,), 10, "float64")
    rule = Participation.parse(participation)

    def make() -> SimulatedFederation:
        return SimulatedFederation(
            data, LinearModel("softmax", features, 10), LocalTraining(0.001, 10), participation=rule
        )

    (lane,) = lane_engines([make()], [data], "cuda")
    on_gpu = rounds_a_second(lane, seconds)
    lane.close()
    on_cpu = rounds_a_second(make(), seconds)
    taking = clients if participation == "all" else 10
    return {
        "features": features,
        "clients": clients,
        "samples a client": SAMPLES,
        "participation": participation,
        "values of all": clients * SAMPLES * features,
        "values of the participants": taking * SAMPLES * features,
        "CPU, rounds a second": round(on_cpu, 1),
        "GPU, rounds a second": round(on_gpu, 1),
        "GPU / CPU": round(on_gpu / on_cpu, 2),
    }


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--commit", help="what to record as the commit, where there is no repository")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    asked = parser.parse_args()
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "cores": os.cpu_count(),
        "threads of torch": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "commit": asked.commit or commit(),
        "settings": [],
    }
    for setting in SETTINGS:
        found = measure(*setting, asked.seconds)
        figures["settings"].append(found)
        print(*(f"{name} {value}," for name, value in found.items()), flush=True)
        if asked.out:
            asked.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
