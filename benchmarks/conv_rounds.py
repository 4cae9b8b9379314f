"""Rounds a second of the paper's convolutional networks: ours against a plain PyTorch loop, turn by turn.

    python benchmarks/conv_rounds.py --model cnn_cifar10 --turns 9

100 clients x 100 random images, `fixed(5)` (10 and 20 for FashionMNIST and CelebA), K and batch as in the paper,
momentum 0.9, float32. The plain loop is what one writes down first: a module, its optimizer, autograd, a float32 mean,
and torch's own number of threads; `channels last` is the same in the memory format that torch recommends. Ours is a
whole `run_round`, with every client's drift. Medians of the turns, and the smallest and largest in brackets. The last
column is CPU time; with `--threads 1` it is a fair comparison also on a machine that does other things.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from sifu.core.engine import Position
from sifu.engines.sim import LocalTraining, ModuleModel, SimulatedFederation, make_model
from sifu.theory.participation import Participation

SETTINGS = {
    "cnn_cifar10": ((3, 32, 32), 10, 5, 5),
    "cnn_cifar100": ((3, 32, 32), 100, 5, 5),
    "cnn_fashion_mnist": ((1, 28, 28), 10, 10, 5),
    "cnn_celeba": ((3, 64, 64), 2, 20, 10),
}
"""Shape of an image, classes, clients a round, K."""
CLIENTS, SAMPLES, BATCH, RATE, MOMENTUM = 100, 100, 20, 0.01, 0.9


@dataclass(frozen=True)
class Client:
    """Random images and labels."""

    name: str
    x: np.ndarray
    y: np.ndarray


def plain_round(
    module: torch.nn.Module, start: torch.Tensor, data: list[tuple[torch.Tensor, torch.Tensor]], steps: int
) -> torch.Tensor:
    """FedAvg over these clients' data as anyone would write it."""
    mean = torch.zeros_like(start)
    for x, y in data:
        vector_to_parameters(start.clone(), module.parameters())
        optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=MOMENTUM)
        order = torch.randperm(x.shape[0])
        for batch in order.split(BATCH)[:steps] * (1 + steps * BATCH // (SAMPLES + 1)):
            optimizer.zero_grad()
            functional.cross_entropy(module(x[batch]), y[batch]).backward()
            optimizer.step()
        mean += parameters_to_vector(module.parameters()).detach() / len(data)
    return mean


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(SETTINGS), default="cnn_cifar10")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=3, help="rounds in a turn")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    shape, classes, participants, steps = SETTINGS[chosen.model]
    generator = np.random.default_rng(0)
    clients = [
        Client(
            f"client-{number}",
            generator.standard_normal((SAMPLES, *shape), dtype=np.float32),
            generator.integers(0, classes, SAMPLES),
        )
        for number in range(CLIENTS)
    ]
    model = make_model(chosen.model, shape, classes)
    assert isinstance(model, ModuleModel)
    federation = SimulatedFederation(
        clients,
        model,
        LocalTraining(RATE, steps, BATCH, MOMENTUM),
        participation=Participation("fixed", count=participants),
        dtype="float32",
    )
    everyone = np.arange(CLIENTS)
    start = federation.initial_model(0)
    data = [(torch.from_numpy(client.x), torch.from_numpy(client.y)) for client in clients[:participants]]
    module, channels_last = model.build("float32"), model.build("float32").to(memory_format=torch.channels_last)
    contenders: dict[str, Callable[[int], Any]] = {
        "plain loop": lambda number: plain_round(module, torch.from_numpy(start), data, steps),
        "plain loop, channels last": lambda number: plain_round(channels_last, torch.from_numpy(start), data, steps),
        "ours": lambda number: federation.run_round(start, Position(0, number), everyone),
        "ours, evaluating all 100 clients": lambda number: federation.evaluate(start, everyone),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    cpu_times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(-1, chosen.turns):  # turn -1 warms up
        for name, run in contenders.items():
            begin, cpu_begin = time.perf_counter(), time.process_time()
            for number in range(chosen.rounds):
                run(number)
            if turn >= 0:
                times[name].append((time.perf_counter() - begin) / chosen.rounds)
                cpu_times[name].append((time.process_time() - cpu_begin) / chosen.rounds)
    print(f"{chosen.model}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    base = statistics.median(times["plain loop"])
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        print(
            f"{name:34s} {1000 * middle:8.1f} ms ({1000 * min(seconds):.1f} to {1000 * max(seconds):.1f})  "
            f"{1 / middle:6.2f} a second  {base / middle:5.2f} x the plain loop  "
            f"{1000 * statistics.median(cpu_times[name]):8.1f} ms of CPU"
        )


if __name__ == "__main__":
    main()
