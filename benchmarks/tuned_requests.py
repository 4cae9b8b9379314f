"""What a request on tuned networks costs in time and bytes: a run of the library with k = 3,280 features of blocks.

    python benchmarks/tuned_requests.py    # 100 clients; 5 GB of disk for temporary files
    python benchmarks/tuned_requests.py --clients 10 --regularisation auto

Features are synthetic: a network of 1,280 scales stands for the trunk, so that training takes no time to speak of and
statistics have the size that EfficientNet-Lite0 gives them with ten blocks of 200. Nothing here measures accuracy.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
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
        clients.append(
            ClientData(f"client-{number:04d}", means[labels] + generator.normal(size=(SAMPLES, WIDTH)), labels)
        )
    return clients


def timed(what: str, action: Callable[[], Any]) -> Any:
    """Do it, and print how long it took."""
    start = time.perf_counter()
    result = action()
    print(f"{what:<46}{time.perf_counter() - start:8.1f} s", flush=True)
    return result


def main() -> None:
    """Train, forget a client twice, rebuild, verify."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--groups", type=int, default=10)
    parser.add_argument("--block", type=int, default=200)
    parser.add_argument("--regularisation", default="0.01", help="r of the head, or auto for cross-validation")
    parser.add_argument("--retention", default="strict", choices=("strict", "paper"))
    parser.add_argument("--verify", action="store_true", help="verify the run at the end, which reads all statistics")
    arguments = parser.parse_args()
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
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        run = timed("one round apart, statistics, head", lambda: sifu.train(spec, run=folder, clients=clients))
        size = sum(path.stat().st_size for path in (folder / "statistics").iterdir() if ".sum." not in path.name)
        print(f"{size / arguments.clients / 1e6:.1f} MB of statistics a client, {size / 1e9:.2f} GB in all")
        for number in (3, 4):
            name = clients[number].name
            timed(f"forget {name}", lambda name=name: run.forget([name], name, retention=arguments.retention))
        timed("rebuild the groups that were hit", run.rebuild)
        if arguments.verify:
            print(timed("verify", run.verify).problems or "no problems")


if __name__ == "__main__":
    main()
