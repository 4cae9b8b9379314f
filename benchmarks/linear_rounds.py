"""Rounds a second of linear models on this machine: against a plain loop, with tracking, with many clients.

    python benchmarks/linear_rounds.py                      all of it, some two minutes
    python benchmarks/linear_rounds.py --only loop many     some of it
    python benchmarks/linear_rounds.py --mnist mnist.npz    real digits instead of random ones of the same size

What is compared runs side by side, in turns, so that a busy machine slows both; medians of the turns are printed.
On a machine that others use, `--clock cpu` with OMP_NUM_THREADS=1 counts this program's own time only, and
`--clock thread` that of the thread that trains, without the one that draws ahead on another core.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sifu.core.engine import Position
from sifu.engines.sim import LocalTraining, SimulatedFederation, Strategy
from sifu.theory.participation import Participation
from sifu.theory.regularity import local_regularity
from sifu.theory.rollback import crosses_a_level, level_ladder
from sifu.theory.tracking import SensitivityTracker, summarise_round


@dataclass(frozen=True)
class Client:
    """One client's data."""

    name: str
    x: np.ndarray
    y: np.ndarray


def mnist(path: Path | None, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """At least 10,000 images of 784 values and their labels, random ones if no file is given."""
    if path is not None:
        with np.load(path) as data:
            labels = data["y_train"].astype(np.int64)
            return data["x_train"].reshape(labels.size, 784).astype(dtype) / 255.0, labels
    generator = np.random.default_rng(0)
    return generator.random((10_000, 784), dtype=np.float32).astype(dtype), np.arange(10_000) % 10


def one_class_each(x: np.ndarray, y: np.ndarray, count: int, samples: int) -> list[Client]:
    """Clients with samples of a single class."""
    order = np.argsort(y, kind="stable")
    starts = np.linspace(0, order.size - samples, count).astype(int)
    return [Client(f"{i}", x[order[s : s + samples]], y[order[s : s + samples]]) for i, s in enumerate(starts)]


def setting_a(x: np.ndarray, y: np.ndarray, dtype: str, strategy: Strategy) -> SimulatedFederation:
    """10 of 100 clients, one class each, K = 10, full batches of 100."""
    return SimulatedFederation(
        one_class_each(x, y, 100, 100),
        "softmax",
        LocalTraining(0.01, 10),
        participation=Participation.parse("fixed(10)"),
        dtype=dtype,  # type: ignore[arg-type]
        strategy=strategy,
    )


class Rounds:
    """Runs rounds one after the other, tracking Psi or not."""

    def __init__(self, federation: SimulatedFederation, tracked: bool = False) -> None:
        self.federation, self.tracked = federation, tracked
        self.active = np.arange(len(federation.clients))
        self.active.flags.writeable = False  # as `stream_rounds` hands it over
        self.model, self.done = federation.initial_model(0), 0
        regularities = [local_regularity(client, federation.facts, 1.0) for client in federation.clients]
        self.factors = np.array([regularity.factor for regularity in regularities])
        self.averagedness = np.array([regularity.averagedness for regularity in regularities])
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
                averagedness=self.averagedness[who],
                server_rate=1.0,
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
    """Median seconds of each, measured in turns of a few calls each."""
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
    """Setting A against the plain loop, and what tracking and evaluation add to it."""
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
    """MNIST, 1,000 clients of 10 samples, all taking part, float64, K = 10, tracking on."""
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
    """100 of 100,000 clients against 100 of 1,000, 64 features, about 10 samples each."""
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
            clients[:count], "softmax", LocalTraining(0.01, 10), participation=Participation.parse("fixed(100)")
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


def main() -> None:
    """Print a line for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("loop", "everyone", "many", "unequal")
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--mnist", type=Path, help="an .npz file with x_train and y_train")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    chosen = parser.parse_args()
    global clock
    clock = CLOCKS[chosen.clock]
    # The largest first: peak memory is that of the whole process.
    for part in ("unequal", "many"):
        if part in chosen.only:
            many(part == "unequal")
    if {"loop", "everyone"} & set(chosen.only):
        x, y = mnist(chosen.mnist, "float64")
        if "loop" in chosen.only:
            loop(x, y)
        if "everyone" in chosen.only:
            everyone(x, y)


if __name__ == "__main__":
    main()
