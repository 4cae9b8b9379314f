"""Break-even size for a GPU: rounds per second of the same run on the CPU and as a lane on the GPU, with tracking.

The first part is softmax regression in float64, K = 10 steps on all samples of a client, with all clients or ten
clients per round. It is the source of `WORTH_A_GPU` in sifu.run.devices: the number of values (samples times features)
of all participants in a round. The second part is small networks in float32, on the CPU with the best of 1, 2, 4 and
all threads.
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
from gpu.round_times import random_clients, take

from sifu.core.engine import Engine
from sifu.engines.sim import LinearModel, LocalTraining, ModuleModel, SimulatedFederation, SimulationSettings
from sifu.engines.sim.lanes import lane_engines
from sifu.engines.sim.networks import CONV_NETS
from sifu.theory.participation import Participation
from sifu_paper.provenance import commit

SAMPLES = 20
SETTINGS = [
    (features, clients, participation)
    for features, counts in ((100, (20, 100, 500, 2500)), (784, (5, 20, 80, 320, 1280)))
    for clients in counts
    for participation in ("all", "fixed(10)")
    if participation == "all" or clients > 10
]
NETWORKS = [
    ("cnn", (1, 28, 28), 100, 100, "fixed(5)", 20, 5),
    ("cnn", (1, 10, 10), 100, 10, "fixed(5)", None, 5),
    ("cnn", (1, 10, 10), 4, 4, "all", None, 1),
    ("cnn_celeba", (1, 10, 10), 100, 4, "fixed(1)", 1, 1),
    ("cnn_fashion_mnist", (1, 28, 28), 100, 20, "fixed(5)", 20, 5),
]
"""Name, image shape, clients, samples per client, participation, batch, steps."""


def rounds_a_second(engine: Engine, seconds: float, warm: int = 60) -> float:
    """Return rounds per second with tracking, after a warm-up."""
    take(engine, warm, tracked=True)
    rounds = warm
    while True:
        began = time.perf_counter()
        take(engine, rounds, tracked=True)
        spent = time.perf_counter() - began
        if spent > seconds:
            return rounds / spent
        rounds = max(2 * rounds, int(rounds * 1.2 * seconds / spent))


def measure(features: int, clients: int, participation: str, seconds: float) -> dict[str, Any]:
    """Measure one setting on both devices."""
    data = random_clients(clients, SAMPLES, (features,), 10, "float64")
    rule = Participation.parse(participation)

    def make() -> SimulatedFederation:
        return SimulatedFederation(
            data, LinearModel("softmax", features, 10), LocalTraining(0.001, 10), SimulationSettings(participation=rule)
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


def measure_network(
    name: str,
    image: tuple[int, int, int],
    clients: int,
    samples: int,
    participation: str,
    batch: int | None,
    steps: int,
    seconds: float,
) -> dict[str, Any]:
    """Measure one small network on both devices."""
    data = random_clients(clients, samples, image, 10, "float32")
    rule = Participation.parse(participation)

    def make() -> SimulatedFederation:
        model, training = ModuleModel(CONV_NETS[name](image, 10)), LocalTraining(0.001, steps, batch)
        return SimulatedFederation(data, model, training, SimulationSettings(participation=rule, dtype="float32"))

    began = time.perf_counter()
    (lane,) = lane_engines([make()], [data], "cuda")
    take(lane, 60, tracked=True)
    first = time.perf_counter() - began
    on_gpu = rounds_a_second(lane, seconds)
    lane.close()
    threads, on_cpu = torch.get_num_threads(), {}
    for count in sorted({1, 2, 4, threads}):
        torch.set_num_threads(count)
        on_cpu[count] = round(rounds_a_second(make(), seconds, 20), 1)
    torch.set_num_threads(threads)
    return {
        "network": name,
        "image": image,
        "clients": clients,
        "samples a client": samples,
        "participation": participation,
        "batch": batch or samples,
        "steps": steps,
        "CPU, rounds a second by threads": on_cpu,
        "GPU, rounds a second": round(on_gpu, 1),
        "GPU, seconds to compile, capture and run 60 rounds": round(first, 1),
        "GPU / CPU": round(on_gpu / max(on_cpu.values()), 2),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--commit", help="commit to record if there is no repository")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")


def run(options: argparse.Namespace) -> None:
    """Measure, print, and write the figures."""
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "cores": os.cpu_count(),
        "threads of torch": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "commit": options.commit or commit(),
        "settings": [],
        "networks": [],
    }

    def note(kind: str, measured: dict[str, Any]) -> None:
        figures[kind].append(measured)
        print(*(f"{name} {value}," for name, value in measured.items()), flush=True)
        if options.out:
            options.out.write_text(json.dumps(figures, indent=1) + "\n")

    for setting in SETTINGS:
        note("settings", measure(*setting, options.seconds))
    for network in NETWORKS:
        note("networks", measure_network(*network, options.seconds))
