"""Common parts of all contestants: the stopwatch that also checks their work, and their command line.

A contestant is a script with a function `run(workload, watch, threads)` that trains round after round and calls
`watch.round_done(parameters)` after each until it returns False. It prints one line of JSON. numpy and torch only.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from peers.workloads import Setting, Workload, network, read
from torch import Tensor, nn
from torch.nn import functional

Parameters = Callable[[], Sequence[Any]]
WARM_UP, LEAST_ROUNDS = 3, 3


def load(module: nn.Module, parameters: Sequence[Any]) -> nn.Module:
    """Copy parameters into a network."""
    with torch.no_grad():
        for own, new in zip(module.parameters(), parameters, strict=True):
            own.copy_(torch.as_tensor(new))
    return module


def first_network(workload: Workload) -> nn.Module:
    """Return the network that every contestant starts from."""
    return load(network(workload.setting), workload.first)


@functools.cache
def at_the_actor(path: str, threads: int) -> tuple[Workload, nn.Module]:
    """Return a workload and its network for a Flower process, which reads and builds them once.

    It is not in Flower's script, because ray only finds functions of modules.
    """
    torch.set_num_threads(threads)
    workload = read(path)
    return workload, network(workload.setting)


def let_torchvision_in() -> torch.library.Library | None:
    """Declare two operators that a broken torchvision needs; the caller must keep the result during the import.

    PyPI's torchvision for x86 Linux is built for CUDA and cannot load its operators with a torch for CPUs. fluke and
    FedLab import it for data sets that these benchmarks do not use.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # "operator torchvision::nms does not exist"
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
    else:
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def batches(setting: Setting, generator: torch.Generator | None = None) -> Iterator[Tensor | None]:
    """Yield the rows of each local step, reshuffled when all were used; None for a full batch."""
    if setting.batch == setting.samples:
        yield from [None] * setting.steps
        return
    order = torch.empty(0, dtype=torch.int64)
    for _ in range(setting.steps):
        if len(order) < setting.batch:
            order = torch.randperm(setting.samples, generator=generator)
        yield order[: setting.batch]
        order = order[setting.batch :]


def train_client(module: nn.Module, x: Tensor, y: Tensor, setting: Setting) -> None:
    """Train with K steps of torch's SGD, in place."""
    optimizer = torch.optim.SGD(module.parameters(), lr=setting.rate, momentum=setting.momentum)
    for rows in batches(setting):
        optimizer.zero_grad()
        scores = module(x if rows is None else x[rows])
        functional.cross_entropy(scores, y if rows is None else y[rows]).backward()
        optimizer.step()


def total_loss(workload: Workload, parameters: Sequence[Any]) -> float:
    """Return the mean loss of a model on all clients' data."""
    module = load(network(workload.setting), parameters)
    with torch.no_grad():
        sums = [
            float(functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(y)))
            for x, y in zip(workload.x, workload.y, strict=True)
        ]
    return float(np.mean(sums))


class Stopwatch:
    """Stopwatch that skips the warm-up, describes the model at its end, and then times rounds for `seconds`."""

    def __init__(self, workload: Workload, seconds: float, warmup: int) -> None:
        self._workload, self._seconds, self.warmup = workload, seconds, warmup
        self._seen: Callable[[], int] = lambda: type(network(workload.setting)).seen
        self.rounds = 0
        self.report: dict[str, Any] = {}
        self._started = 0.0

    def count_with(self, seen: Callable[[], int]) -> None:
        """Use `seen` instead of the shared network's count of samples trained on."""
        self._seen = seen

    def round_done(self, parameters: Parameters) -> bool:
        """Count a round; return whether another is wanted. `parameters()` returns the model in the network's order."""
        self.rounds += 1
        if self.rounds < self.warmup:
            return True
        if self.rounds == self.warmup:
            self._describe([torch.as_tensor(parameter).detach().clone() for parameter in parameters()])
            self._started = time.perf_counter()
            return True
        elapsed, timed = time.perf_counter() - self._started, self.rounds - self.warmup
        if timed < LEAST_ROUNDS or elapsed < self._seconds:
            return True
        self.report |= {"seconds_a_round": elapsed / timed, "rounds": timed}
        return False

    def _describe(self, model: Sequence[Tensor]) -> None:
        """Report what contestants must agree on: samples trained on, the loss, and the movement of the model."""
        pairs = zip(model, self._workload.first, strict=True)
        way = sum(float((parameter - torch.as_tensor(was)).square().sum()) for parameter, was in pairs)
        self.report |= {
            "warmup": self.warmup,
            "samples_a_round": self._seen() / self.warmup,
            "loss": total_loss(self._workload, model),
            "moved": math.sqrt(way),
        }


def main(run: Callable[[Workload, Stopwatch, int], Any], packages: Sequence[str], **options: Any) -> None:
    """Run a contestant's command line, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=run.__doc__)
    parser.add_argument("workload", help="file made by compare.py")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of timed rounds after the warm-up")
    parser.add_argument("--check", action="store_true", help="use a longer warm-up and compare the model at its end")
    parser.add_argument("--threads", type=int, default=1, help="number of threads (Flower: cores per client actor)")
    for name, description in options.items():
        parser.add_argument(f"--{name}", action="store_true", help=description)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    workload = read(chosen.workload)
    watch = Stopwatch(workload, chosen.seconds, workload.setting.check_rounds if chosen.check else WARM_UP)
    extra = {name: getattr(chosen, name) for name in options}
    run(workload, watch, chosen.threads, **extra)
    versions = {name: importlib.metadata.version(name) for name in packages}
    print(json.dumps({**watch.report, "threads": chosen.threads, "versions": versions}), flush=True)
