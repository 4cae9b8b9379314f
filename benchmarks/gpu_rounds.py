"""Times of rounds on a GPU: workload B, 5 of 100 clients, 5 steps of 20 CIFAR-like images, tracked as in a run.

    python benchmarks/gpu_rounds.py --out benchmarks/results/gpu.json

Cases take turns, so that other users of the device slow all of them: float32 by the library, and TF32 by sifu-kernels,
if it is installed, for one run and for ten runs at once. A figure is wall time between two synchronisations, over many
rounds, after a warm-up that compiles and captures everything: the best of some repeats with their range. Data are
random; speed does not depend on them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import threading
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np
import torch

from sifu.core.engine import Engine, Position
from sifu.core.round_stream import RoundsWanted, stream_rounds
from sifu.core.spec import StopSpec
from sifu.data.client_data import ClientData
from sifu.engines.sim import (
    ConvNet,
    Convolution,
    LocalTraining,
    ModuleModel,
    SimulatedFederation,
    SimulationSettings,
)
from sifu.engines.sim.gpu.graph_engine import GraphEngine
from sifu.theory.participation import Participation
from sifu.theory.rollback import crosses_a_level
from sifu.theory.tracking import SensitivityTracker, summarise_round

B = LocalTraining(rate=0.01, steps=5, batch_size=20, momentum=0.9)
SHAPE, CLIENTS, SAMPLES, CLASSES = (3, 32, 32), 100, 100, 10


def random_clients() -> list[ClientData]:
    """Return clients with random images whose labels are a function of them."""
    generator, clients = np.random.default_rng(7), []
    for number in range(CLIENTS):
        x = generator.standard_normal((SAMPLES, *SHAPE)).astype("float32")
        y = np.abs(x.reshape(SAMPLES, -1)[:, : 8 * CLASSES].reshape(SAMPLES, CLASSES, -1).sum(axis=2)).argmax(axis=1)
        clients.append(ClientData(f"client-{number}", x, y))
    return clients


def workload_b(clients: list[ClientData], seed: int, dtype: str) -> SimulatedFederation:
    """Return the federation of workload B."""
    network = ConvNet(SHAPE, (Convolution(32), Convolution(64), Convolution(64, pool=False)), (64,), CLASSES)
    settings = SimulationSettings(participation=Participation("fixed", count=5), dtype=dtype, seed=seed)  # type: ignore[arg-type]
    return SimulatedFederation(clients, ModuleModel(network), B, settings)


def take(engine: Engine, rounds: int) -> None:
    """Stream rounds as a recorded run does: track Psi of everyone, and fetch a model if a client crosses a level."""
    clients, start = len(engine.clients), engine.initial_model(0)
    wanted = RoundsWanted(StopSpec(0.0, 0, rounds, 2**40), start.astype(np.float64))
    tracker, levels = SensitivityTracker(clients), np.geomspace(1e-4, 1e3, 73)
    ones, previous = np.ones(clients), lambda: start
    for done in stream_rounds(engine, start, Position(0, 0), np.arange(clients), wanted):
        who = done.participants
        _, scalars = summarise_round(who, done.samples, done.drifts, done.mean_shift, done.rounding, factors=ones[who])
        before = tracker.total(who)
        tracker.update(scalars)
        if crosses_a_level(levels[::24], before, tracker.total(who)):
            previous()
        previous = done.fetch_model


def together(engines: list[Engine], work: Callable[[Engine], object]) -> float:
    """Return the seconds that one thread per engine takes."""
    threads = [threading.Thread(target=work, args=(engine,)) for engine in engines]
    torch.cuda.synchronize()
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def lanes(clients: list[ClientData], count: int) -> list[Engine]:
    """Return engines of sifu-kernels for some runs at once."""
    from sifu_kernels.lanes import lane_engines

    made = lane_engines([workload_b(clients, seed, "tf32") for seed in range(count)], [clients] * count, "cuda")
    return list(made)


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--rounds", type=int, default=1200, help="rounds of one lane in a repeat")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    clients = random_clients()
    cases = {"B, float32, one run": [GraphEngine(workload_b(clients, 1, "float32"), "cuda")]}
    if importlib.util.find_spec("sifu_kernels"):
        cases |= {"B, TF32, one run": lanes(clients, 1), "B, TF32, ten runs at once": lanes(clients, 10)}
    figures: dict[str, object] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": date.today().isoformat()
    }  # fmt: skip
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(options.repeats + 1):
        for name, engines in cases.items():
            rounds = options.rounds if repeat else 120  # the first repeat compiles and captures
            seconds = together(engines, lambda engine, rounds=rounds: take(engine, rounds))  # type: ignore[misc]
            if repeat:
                taken[name].append(seconds / rounds / len(engines) * 1000)
    for name, times in taken.items():
        figures[f"{name}: ms a round and run"] = {"best": min(times), "all": times}
        print(name, *(f"{value:.3f}" for value in times), "ms a round and run", flush=True)
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
