"""What a request on tuned networks costs in time and bytes: a run of the library with k = 5,280 features of blocks.

Thirty clients send statistics, 3.4 GB of temporary files; 100 are 12 GB, and minutes until everyone's are there.
Features are synthetic: a network of 1,280 scales stands for the backbone, so that training takes almost no time and
statistics have the size that EfficientNet-Lite0 gives them with ten blocks of 400. A request reads the leaver's own
statistics and the sum, whatever the number of clients; of those who stay it deletes files and evaluates samples, which
is little. Nothing here measures accuracy.

Printed are wall seconds, CPU seconds, and CPU seconds as a multiple of one Cholesky factorisation of the same size in
the same process: the first depends on what else the machine does, the last hardly.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.linalg
import torch
from threadpoolctl import threadpool_limits
from torch import nn

import sifu
from sifu.data.client_data import ClientData

WIDTH, CLASSES, SAMPLES = 1280, 10, 100


class Scales(nn.Module):
    """A public network of no cost: every input times a number that groups tune."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features of samples."""
        return torch.tanh(x * self.scale)


def make() -> nn.Module:
    """The public network."""
    return Scales()


def clients_of(count: int) -> list[ClientData]:
    """Samples of classes that differ in their means."""
    means = np.random.default_rng(0).normal(size=(CLASSES, WIDTH)) / 4.0
    clients = []
    for number in range(count):
        generator = np.random.default_rng(1 + number)
        labels = generator.integers(0, CLASSES, SAMPLES)
        x = means[labels] + generator.normal(size=(len(labels), WIDTH))
        clients.append(ClientData(f"client-{number:04d}", x.astype(np.float32), labels))
    return clients


def timed(what: str, action: Callable[[], Any], unit: float = math.nan) -> Any:
    """Do it, and print how long it took; `unit` are the CPU seconds of a factorisation."""
    wall, processor = time.perf_counter(), time.process_time()
    result = action()
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    of_unit = "" if math.isnan(unit) else f"{processor / unit:8.1f} factorisations"
    print(f"{what:<40}{wall:8.1f} s{processor:8.1f} s of CPU{of_unit}", flush=True)
    return result


def factorisation(size: int) -> float:
    """CPU seconds of one Cholesky factorisation on one thread."""
    matrix = np.full((size, size), 0.5, order="F")
    matrix[np.diag_indices(size)] = 1.0
    with threadpool_limits(limits=1):
        start = time.process_time()
        scipy.linalg.cho_factor(matrix, lower=True, overwrite_a=True, check_finite=False)
        return time.process_time() - start


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--clients", type=int, default=30)
    parser.add_argument("--groups", type=int, default=10)
    parser.add_argument("--block", type=int, default=400)
    parser.add_argument("--regularisation", default="0.1", help="r of the head, or auto for cross-validation")
    parser.add_argument("--retention", default="strict", choices=("strict", "paper"))
    parser.add_argument("--rebuild", action="store_true", help="tune the hit groups' networks again")
    parser.add_argument("--verify", action="store_true", help="verify the run at the end, which reads all statistics")


def run(arguments: argparse.Namespace) -> None:
    """Train, forget a client twice; rebuild and verify where that is wanted."""
    sys.path.insert(0, str(Path(__file__).parent))
    sifu.allow_code("tuned_requests:make")
    rule = arguments.regularisation if arguments.regularisation == "auto" else float(arguments.regularisation)
    spec = {
        "model": {"kind": "ridge", "outputs": CLASSES},
        "data": {"preprocessing": "fixed"},
        "ridge": {"regularisation": rule},
        "features": {"kind": "module", "module": "tuned_requests:make", "tune": "blocks", "block": arguments.block},
        "groups": {"count": arguments.groups, "rounds": 1, "rebuild": "later"},
        "local": {"rate": 0.01, "steps": 1},
    }
    clients = clients_of(arguments.clients)
    size = WIDTH + arguments.groups * arguments.block + 1
    unit = factorisation(size)
    print(f"one Cholesky factorisation of {size} x {size}: {unit:.2f} s of CPU")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        trained = timed("one round apart, statistics, head", lambda: sifu.train(spec, run=folder, clients=clients))
        stored = sum(path.stat().st_size for path in (folder / "statistics").iterdir() if ".sum." not in path.name)
        print(f"{stored / arguments.clients / 1e6:.1f} MB of statistics a client, {stored / 1e9:.2f} GB in all")
        for number in (3, 4):
            name = clients[number].name
            timed(f"forget {name}", lambda name=name: trained.forget([name], name, retention=arguments.retention), unit)
        if arguments.rebuild:
            timed("rebuild the groups that were hit", trained.rebuild, unit)
        if arguments.verify:
            print(timed("verify", trained.verify, unit).problems or "no problems")
