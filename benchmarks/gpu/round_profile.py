"""Profile of a round of workload B on a GPU: kernels, gaps between them, and Python's time.

Lanes run as usual, with tracking, while torch's profiler records every kernel and copy. A kernel's share refers to the
device's busy time; FLOP/s count the products of the network, without padding. "Gaps" is the idle time between the first
and the last kernel. Host times are processor times of threads, including the driver's work while they wait. The threads
that consume rounds share one interpreter, so Python is no bottleneck if their sum stays below the time of a round.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Any

import torch
from gpu.round_times import CIFAR10, B, random_clients, take, together
from torch.profiler import ProfilerActivity, profile

from sifu.core.engine import Engine
from sifu.engines.sim import ModuleModel, SimulatedFederation, SimulationSettings
from sifu.engines.sim.gpu.conv_plan import PRECISIONS, DeviceLayout, WeightForm
from sifu.engines.sim.lanes import lane_engines
from sifu.theory.participation import Participation
from sifu_paper.provenance import commit

CLIENTS_A_ROUND = 5
WEIGHT_KERNELS = {
    "block": "block_weight_gradient",
    "row": "row_weight_gradient",
    "whole": "descend_by_weight_gradient",
    "patch": "convolution_weight_gradient",
}


def operations(precision: str) -> dict[str, float]:
    """Return the floating-point operations of a round of one lane by kernel, without padding."""
    layout, operations_of = DeviceLayout.of(CIFAR10), defaultdict(float)
    batch = B.batch_size or 0
    images = B.steps * batch * CLIENTS_A_ROUND
    for number, convolution in enumerate(layout.convolutions):
        channels = CIFAR10.convolution_layers[number].channels_in
        # Pooling compares four positions for each output.
        positions = convolution.height_out * convolution.width_out * (4 if convolution.pool else 1)
        products = 2.0 * images * positions * 9 * channels * convolution.channels_out
        form = WeightForm.of(convolution, batch, CLIENTS_A_ROUND, precision)
        operations_of["convolve_block" if form.kind == "block" else "convolve"] += products
        operations_of[WEIGHT_KERNELS[form.kind]] += products
        if number:
            operations_of["convolution_input_gradient"] += products
    for place in layout.hidden:
        operations_of["hidden_layer"] += 2.0 * images * place.features_in * place.features_out
        operations_of["hidden_layer_backward"] += 4.0 * images * place.features_in * place.features_out
    operations_of["classify"] += 6.0 * images * layout.last.features_in * layout.last.features_out
    return dict(operations_of)


class HostTimes:
    """Processor times of the threads that consume rounds, and of the one that feeds the device."""

    def __init__(self, engines: list[Any]) -> None:
        self.looking = 0.0
        self.feeding = 0.0
        group = engines[0]._group
        run = group._run

        def timed(streams: Any) -> Any:
            began = time.thread_time()
            chunks = run(streams)
            self.feeding += time.thread_time() - began
            return chunks

        group._run = timed

    def take(self, engine: Engine, rounds: int) -> None:
        """Consume rounds, and add their processor time."""
        began = time.thread_time()
        take(engine, rounds, tracked=True)
        self.looking += time.thread_time() - began


def profile_lanes(lanes: int, precision: str, rounds: int) -> dict[str, Any]:
    """Profile a round of `lanes` runs together; times are microseconds per round of all lanes."""
    clients = random_clients(100, 100, (3, 32, 32), 10, "float32")
    participation = Participation("fixed", count=CLIENTS_A_ROUND)
    federations = [
        SimulatedFederation(
            clients,
            ModuleModel(CIFAR10),
            B,
            SimulationSettings(participation=participation, dtype="float32", seed=seed),
        )
        for seed in range(lanes)
    ]
    engines = lane_engines(federations, [clients] * lanes, "cuda", precision)
    together(engines, lambda engine: take(engine, 120, True))
    unprofiled = min(together(engines, lambda engine: take(engine, rounds, True)) for _ in range(2))
    host = HostTimes(engines)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        wall = together(engines, lambda engine: host.take(engine, rounds))
    for engine in engines:
        engine.close()
    events = [event for event in recorded.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    kernels: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in events:
        name = event.name if not event.name.startswith(("void", "at::")) else "torch: schedules, copies between buffers"
        kernels[name][0] += 1
        kernels[name][1] += event.time_range.end - event.time_range.start
    work = operations(PRECISIONS[precision])
    rows = [
        {
            "kernel": name,
            "calls a round": round(calls / rounds, 2),
            "us a round": round(spent / rounds, 2),
            "share of busy": round(spent / busy, 4),
            **({"TFLOP/s": round(work[name] * lanes * rounds / spent / 1e6, 1)} if name in work else {}),
        }
        for name, (calls, spent) in sorted(kernels.items(), key=lambda item: -item[1][1])
    ]
    return {
        "lanes": lanes,
        "precision": precision,
        "ms a round and lane, not profiled": round(unprofiled / rounds / lanes * 1e3, 4),
        "ms a round and lane, profiled": round(wall / rounds / lanes * 1e3, 4),
        "us a round": {
            "device busy": round(busy / rounds, 1),
            "gaps": round((reached - spans[0][0] - busy) / rounds, 1),
            "host, threads that look at rounds": round(host.looking / rounds * 1e6, 1),
            "host, thread that feeds the device": round(host.feeding / rounds * 1e6, 1),
        },
        "GFLOP a round": round(sum(work.values()) * lanes / 1e9, 2),
        "kernels": rows,
    }


def show(profiled: dict[str, Any]) -> None:
    """Print one profile as a table."""
    lanes, parts = profiled["lanes"], profiled["us a round"]
    print(f"\n{lanes} lane{'s' if lanes > 1 else ''}, {profiled['precision']}: ", end="")
    print(f"{profiled['ms a round and lane, not profiled']} ms a round and lane, ", end="")
    print(f"{profiled['GFLOP a round']} GFLOP a round")
    for name, value in parts.items():
        print(f"  {name:<44} {value:10.1f} us a round")
    print(f"  {'kernel':<44} {'calls':>7} {'us a round':>11} {'share':>7} {'TFLOP/s':>8}")
    for row in profiled["kernels"]:
        speed = f"{row['TFLOP/s']:8.1f}" if "TFLOP/s" in row else ""
        print(
            f"  {row['kernel'][:44]:<44} {row['calls a round']:7.1f} {row['us a round']:11.1f} "
            f"{100 * row['share of busy']:6.1f}% {speed}"
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--precision", default="tf32")
    parser.add_argument("--rounds", type=int, default=240)
    parser.add_argument("--commit", help="commit to record if there is no repository")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")


def run(options: argparse.Namespace) -> None:
    """Profile, print, and write the figures."""
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "commit": options.commit or commit(),
        "profiles": [],
    }
    for lanes in options.lanes:
        profiled = profile_lanes(lanes, options.precision, options.rounds)
        show(profiled)
        figures["profiles"].append(profiled)
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
