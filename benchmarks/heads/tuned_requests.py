"""Cost of a request on a wide head, in time and bytes, through the commands `sifu forget` and `sifu verify`.

By default the head has k = 5,280 features of ten tuned networks, like EfficientNet-Lite0 with ten blocks of 400. With
`--frozen 8384` it has as many features as the deep layers of one frozen backbone. Features are synthetic: a small
network stands for the backbone, so training takes little time. A request reads the leaver's own statistics and the sum,
for any number of clients, and neither data nor network. Nothing here measures accuracy.

It prints wall seconds, CPU seconds of the whole command, and CPU seconds as a multiple of one Cholesky factorisation of
the same size in float32 on one thread. The first figure depends on the machine's load, the last hardly.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
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
FROZEN = "FROZEN_FEATURES"


class Scales(nn.Module):
    """Public network of negligible cost: every input times a number that groups tune."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features of samples."""
        return torch.tanh(x * self.scale)


def make() -> nn.Module:
    """Return the public network: of negligible cost, or with the number of features in FROZEN_FEATURES."""
    width = int(os.environ.get(FROZEN, "0"))
    if not width:
        return Scales()
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh())


def clients_of(count: int) -> list[ClientData]:
    """Return clients with samples of classes that differ in their means."""
    means = np.random.default_rng(0).normal(size=(CLASSES, WIDTH)) / 4.0
    clients = []
    for number in range(count):
        generator = np.random.default_rng(1 + number)
        labels = generator.integers(0, CLASSES, SAMPLES)
        x = means[labels] + generator.normal(size=(len(labels), WIDTH))
        clients.append(ClientData(f"client-{number:04d}", x.astype(np.float32), labels))
    return clients


def timed(what: str, action: Callable[[], Any], unit: float = math.nan) -> Any:
    """Execute `action` and print its wall and CPU seconds, including child processes; `unit` is a
    factorisation's time.
    """
    wall, before = time.perf_counter(), os.times()
    result = action()
    wall, after = time.perf_counter() - wall, os.times()
    processor = sum(after[:4]) - sum(before[:4])
    of_unit = "" if math.isnan(unit) else f"{processor / unit:8.1f} factorisations"
    print(f"{what:<40}{wall:8.1f} s{processor:8.1f} s of CPU{of_unit}", flush=True)
    return result


def sifu_command(*words: str | Path) -> None:
    """Run a command of sifu in a new process.

    Raises:
        SystemExit: If it fails.
    """
    done = subprocess.run([sys.executable, "-m", "sifu.cli.main", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"sifu {words[0]} ended with {done.returncode}: {done.stderr[-2000:]}")


def factorisation(size: int) -> float:
    """Return the CPU seconds of one Cholesky factorisation in float32 on one thread."""
    matrix = np.full((size, size), 0.5, order="F", dtype=np.float32)
    matrix[np.diag_indices(size)] = 1.0
    with threadpool_limits(limits=1):
        start = time.process_time()
        scipy.linalg.cho_factor(matrix, lower=True, overwrite_a=True, check_finite=False)
        return time.process_time() - start


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("--clients", type=int, default=30)
    parser.add_argument(
        "--frozen", type=int, default=0, help="number of features of one frozen network, instead of tuned ones"
    )
    parser.add_argument("--groups", type=int, default=10)
    parser.add_argument("--block", type=int, default=400)
    parser.add_argument("--regularisation", default="0.1", help="r of the head, or auto for cross-validation")
    parser.add_argument("--retention", default="strict", choices=("strict", "paper"))
    parser.add_argument("--rebuild", action="store_true", help="retune the hit groups' networks")
    parser.add_argument("--verify", action="store_true", help="verify the run at the end, which reads all statistics")


def run(arguments: argparse.Namespace) -> None:
    """Train and forget a client twice; rebuild and verify if requested."""
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ[FROZEN] = str(arguments.frozen)
    sifu.allow_code("tuned_requests:make")
    rule = arguments.regularisation if arguments.regularisation == "auto" else float(arguments.regularisation)
    spec: dict[str, Any] = {
        "model": {"kind": "ridge", "outputs": CLASSES},
        "data": {"preprocessing": "fixed"},
        "ridge": {"regularisation": rule},
        "features": {"kind": "module", "module": "tuned_requests:make"},
    }
    size = arguments.frozen + 1
    if not arguments.frozen:
        size = WIDTH + arguments.groups * arguments.block + 1
        spec["features"] |= {"tune": "blocks", "block": arguments.block}
        spec |= {
            "groups": {"count": arguments.groups, "rounds": 1, "rebuild": "later"},
            "local": {"rate": 0.01, "steps": 1},
        }
    clients = clients_of(arguments.clients)
    unit = factorisation(size)
    print(f"one Cholesky factorisation of {size} x {size}: {unit:.2f} s of CPU")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        trained = timed("features, statistics, head", lambda: sifu.train(spec, run=folder, clients=clients), unit)
        stored = sum(path.stat().st_size for path in (folder / "statistics").iterdir() if ".sum." not in path.name)
        print(f"{stored / arguments.clients / 1e6:.1f} MB of statistics a client, {stored / 1e9:.2f} GB in all")
        for number in (3, 4):
            words = ("forget", folder, "--clients", clients[number].name, "--retention", arguments.retention)
            timed(f"sifu forget {clients[number].name}", lambda words=words: sifu_command(*words), unit)
        if arguments.rebuild:
            timed("rebuild the groups that were hit", trained.rebuild, unit)
        if arguments.verify:
            timed("sifu verify", lambda: sifu_command("verify", folder), unit)
