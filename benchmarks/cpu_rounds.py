"""Rounds per second on this machine: linear models against a plain loop and with many clients, and the paper's
networks.

    python benchmarks/cpu_rounds.py linear                      everything, about two minutes
    python benchmarks/cpu_rounds.py linear --only loop many     some parts
    python benchmarks/cpu_rounds.py linear --mnist mnist.npz    real digits instead of random ones of the same size
    python benchmarks/cpu_rounds.py network --turns 9

Compared programs run in turns, so that a busy machine slows both; the medians of the turns are printed.

Linear models: on a shared machine, `--clock cpu` with OMP_NUM_THREADS=1 counts only this program's time, and `--clock
thread` only the training thread's, without the thread that draws ahead on another core.

Networks: 100 clients x 100 random images, `fixed(5)` (10 and 20 for FashionMNIST and CelebA), K and batch as in the
paper, momentum 0.9, float32. The plain loop is a straightforward implementation: a module, its optimizer, autograd, a
float32 mean, and torch's default number of threads; `channels last` is the same in the memory format that torch
recommends. Ours is a whole `run_round`, with every client's drift. The smallest and largest turn are in brackets, and
the last column is CPU time; with `--threads 1` the comparison is also fair on a busy machine.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from sifu.core.engine import Position
from sifu.engines.sim import (
    ConvNet,
    Convolution,
    LocalTraining,
    ModuleModel,
    SimulatedFederation,
    SimulationSettings,
)
from sifu.theory.participation import Participation
from sifu.theory.rollback import crosses_a_level, level_ladder
from sifu.theory.tracking import SensitivityTracker, summarise_round

SHAPE, CLASSES, PARTICIPANTS, STEPS = (3, 32, 32), 10, 5, 5
NETWORK = ConvNet(SHAPE, (Convolution(32), Convolution(64), Convolution(64, pool=False)), (64,), CLASSES)
CLIENTS, SAMPLES, BATCH, RATE, MOMENTUM = 100, 100, 20, 0.01, 0.9


@dataclass(frozen=True)
class Client:
    """Data of one client."""

    name: str
    x: np.ndarray
    y: np.ndarray


def mnist(path: Path | None, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return at least 10,000 images of 784 values and their labels, random ones if no file is given."""
    if path is not None:
        with np.load(path) as data:
            labels = data["y_train"].astype(np.int64)
            return data["x_train"].reshape(labels.size, 784).astype(dtype) / 255.0, labels
    generator = np.random.default_rng(0)
    return generator.random((10_000, 784), dtype=np.float32).astype(dtype), np.arange(10_000) % 10


def one_class_each(x: np.ndarray, y: np.ndarray, count: int, samples: int) -> list[Client]:
    """Return clients with samples that are consecutive by class, mostly of a single class."""
    order = np.argsort(y, kind="stable")
    starts = np.linspace(0, order.size - samples, count).astype(int)
    return [Client(f"{i}", x[order[s : s + samples]], y[order[s : s + samples]]) for i, s in enumerate(starts)]


def setting_a(x: np.ndarray, y: np.ndarray, dtype: str, strategy: Any) -> SimulatedFederation:
    """Return setting A: 10 of 100 clients, one class each, K = 10, full batches of 100."""
    return SimulatedFederation(
        one_class_each(x, y, 100, 100),
        "softmax",
        LocalTraining(0.01, 10),
        SimulationSettings(
            participation=Participation.parse("fixed(10)"),
            dtype=dtype,  # type: ignore[arg-type]
            strategy=strategy,
        ),
    )


class Rounds:
    """Consecutive rounds, with or without tracking Psi."""

    def __init__(self, federation: SimulatedFederation, tracked: bool = False) -> None:
        self.federation, self.tracked = federation, tracked
        self.active = np.arange(len(federation.clients))
        self.active.flags.writeable = False  # as `stream_rounds` passes it
        self.model, self.done = federation.initial_model(0), 0
        self.factors = np.ones(self.active.size)
        self.tracker, self.levels = SensitivityTracker(self.active.size), level_ladder(1e-4, 1e3, 1.25)

    def __call__(self) -> None:
        result = self.federation.run_round(self.model, Position(0, self.done), self.active)
        self.model, self.done = result.model, self.done + 1
        if self.tracked:
            who = result.participants
            _, scalars = summarise_round(
                who,
                result.samples,
                result.drifts,
                result.mean_shift,
                result.rounding,
                factors=self.factors[who],
            )
            watched = who if scalars.absent_contraction == 1.0 else self.active
            before = self.tracker.total(watched)
            self.tracker.update(scalars)
            crosses_a_level(self.levels, before, self.tracker.total(watched))


CLOCKS: dict[str, Callable[[], float]] = {
    "wall": time.perf_counter,
    "cpu": time.process_time,
    "thread": time.thread_time,
}
clock = CLOCKS["wall"]


def side_by_side(named: dict[str, Callable[[], object]], seconds: float = 8.0) -> dict[str, float]:
    """Return the median seconds of each entry, measured in turns of a few calls each."""
    calls = {}
    for name, call in named.items():
        call()
        begin = clock()
        call()
        calls[name] = max(1, min(20, int(0.02 / (clock() - begin))))
    times: dict[str, list[float]] = {name: [] for name in named}
    until = clock() + seconds
    while clock() < until:
        for name, call in named.items():
            begin = clock()
            for _ in range(calls[name]):
                call()
            times[name].append((clock() - begin) / calls[name])
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def loop(x: np.ndarray, y: np.ndarray) -> None:
    """Compare setting A with the plain loop, and print the cost of tracking and evaluation."""
    for dtype in ("float32", "float64"):
        data = x.astype(dtype)
        fast = setting_a(data, y, dtype, "auto")
        rounds = Rounds(fast)
        seconds = side_by_side(
            {
                "fast": rounds,
                "tracked": Rounds(fast, tracked=True),
                "evaluation": lambda fast=fast, rounds=rounds: fast.evaluate(rounds.model, rounds.active),
                "loop": Rounds(setting_a(data, y, dtype, "loop")),
            }
        )
        print(
            f"A, {dtype}: {1 / seconds['fast']:.0f} rounds/s, with tracking {1 / seconds['tracked']:.0f} "
            f"({100 * (seconds['tracked'] / seconds['fast'] - 1):.1f} % more time), "
            f"plain loop {1 / seconds['loop']:.1f}: {seconds['loop'] / seconds['fast']:.1f}x; "
            f"evaluation of all 100 clients {1e3 * seconds['evaluation']:.2f} ms, "
            f"a round {1e3 * seconds['fast']:.2f} ms",
            flush=True,
        )


def everyone(x: np.ndarray, y: np.ndarray) -> None:
    """Time MNIST with 1,000 clients of 10 samples, all taking part, float64, K = 10, tracking on."""
    clients = [Client(f"{i}", x[10 * i : 10 * i + 10], y[10 * i : 10 * i + 10]) for i in range(1000)]
    federation = SimulatedFederation(clients, "softmax", LocalTraining(0.01, 10))
    rounds = Rounds(federation, tracked=True)
    seconds = side_by_side({"all": rounds, "evaluation": lambda: federation.evaluate(rounds.model, rounds.active)})
    print(
        f"1,000 x 10, everyone: {1 / seconds['all']:.1f} rounds/s ({1e3 * seconds['all']:.1f} ms), "
        f"evaluation {1e3 * seconds['evaluation']:.1f} ms",
        flush=True,
    )


def many(unequal: bool) -> None:
    """Compare 100 of 100,000 clients with 100 of 1,000 (64 features, about 10 samples each)."""
    generator = np.random.default_rng(0)
    sizes = generator.integers(5, 16, 100_000) if unequal else np.full(100_000, 10)
    ends = np.cumsum(sizes)
    x, y = generator.standard_normal((int(ends[-1]), 64)), generator.integers(0, 10, int(ends[-1]))
    clients = [Client(f"{i}", x[e - n : e], y[e - n : e]) for i, (e, n) in enumerate(zip(ends, sizes, strict=True))]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    named, built = {}, {}
    for count in (100_000, 1_000):
        begin = time.perf_counter()
        federation = SimulatedFederation(
            clients[:count],
            "softmax",
            LocalTraining(0.01, 10),
            SimulationSettings(participation=Participation.parse("fixed(100)")),
        )
        named[f"{count}"], built[f"{count}"] = Rounds(federation, tracked=True), time.perf_counter() - begin
    seconds = side_by_side(named)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(
        f"100 of 100,000 clients{', unequal' if unequal else ''}: {1e3 * seconds['100000']:.2f} ms a round, of 1,000: "
        f"{1e3 * seconds['1000']:.2f} ms, {seconds['100000'] / seconds['1000']:.2f}x; "
        f"built in {built['100000']:.1f} s; peak memory {peak / 2**20:.2f} GiB "
        f"beyond the data ({x.nbytes / 2**30:.2f} GiB)",
        flush=True,
    )


def linear(chosen: argparse.Namespace) -> None:
    """Print a line for each measurement of linear models."""
    global clock
    clock = CLOCKS[chosen.clock]
    # The largest part first: peak memory is measured for the whole process.
    for part in ("unequal", "many"):
        if part in chosen.only:
            many(part == "unequal")
    if {"loop", "everyone"} & set(chosen.only):
        x, y = mnist(chosen.mnist, "float64")
        if "loop" in chosen.only:
            loop(x, y)
        if "everyone" in chosen.only:
            everyone(x, y)


def plain_round(
    module: torch.nn.Module, start: torch.Tensor, data: list[tuple[torch.Tensor, torch.Tensor]], steps: int
) -> torch.Tensor:
    """Run FedAvg over these clients' data in the straightforward way."""
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


def network(chosen: argparse.Namespace) -> None:
    """Print a table of a network's rounds."""
    torch.set_num_threads(chosen.threads)
    generator = np.random.default_rng(0)
    clients = [
        Client(
            f"client-{number}",
            generator.standard_normal((SAMPLES, *SHAPE), dtype=np.float32),
            generator.integers(0, CLASSES, SAMPLES),
        )
        for number in range(CLIENTS)
    ]
    model = ModuleModel(NETWORK)
    federation = SimulatedFederation(
        clients,
        model,
        LocalTraining(RATE, STEPS, BATCH, MOMENTUM),
        SimulationSettings(participation=Participation("fixed", count=PARTICIPANTS), dtype="float32"),
    )
    everyone = np.arange(CLIENTS)
    start = federation.initial_model(0)
    data = [(torch.from_numpy(client.x), torch.from_numpy(client.y)) for client in clients[:PARTICIPANTS]]
    module, channels_last = model.build("float32"), model.build("float32").to(memory_format=torch.channels_last)
    contenders: dict[str, Callable[[int], Any]] = {
        "plain loop": lambda number: plain_round(module, torch.from_numpy(start), data, STEPS),
        "plain loop, channels last": lambda number: plain_round(channels_last, torch.from_numpy(start), data, STEPS),
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


def main() -> None:
    """Execute the chosen part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = parser.add_subparsers(dest="part", required=True)
    linear_options, network_options = models.add_parser("linear"), models.add_parser("network")
    parts = ("loop", "everyone", "many", "unequal")
    linear_options.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    linear_options.add_argument("--mnist", type=Path, help="an .npz file with x_train and y_train")
    linear_options.add_argument("--clock", choices=CLOCKS, default="wall")
    network_options.add_argument("--turns", type=int, default=9)
    network_options.add_argument("--rounds", type=int, default=3, help="rounds per turn")
    network_options.add_argument("--threads", type=int, default=torch.get_num_threads())
    chosen = parser.parse_args()
    (linear if chosen.part == "linear" else network)(chosen)


if __name__ == "__main__":
    main()
