"""What tracking costs a server on Flower: our work on a round's replies beside that of Flower's own FedAvg.

    python benchmarks/flower_overhead.py [--parameters 2000000 8000000 25000000] [--clients 20] [--repeats 5]

Both sides get the same replies as they come off the wire, in Flower's records, and decoding counts on both. Flower's
aggregation decodes them and adds up the mean in float32. Ours decodes, checks every reply (finite, not beyond any
measure), and adds up the mean and every client's drift in float64. They run in this process in turns, on one thread;
times are those of the processor, so that other work on the machine disturbs them less, and figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

from sifu.core.engine import Position
from sifu.core.layout import ModelLayout
from sifu.core.replies import Reply, ReplyGate, ReplyRules
from sifu.engines.flower.averaging import average_replies
from sifu.engines.flower.wire import ARRAYS, METRICS, SAMPLES, read_model
from sifu.theory.facts import ClientProfile

PLACE = Position(0, 0)
SHARES = (0.001, 0.009, 0.04, 0.15, 0.3)
"""Parameters of a network lie in arrays of very different sizes; the last array has the rest."""


class Problem:
    """A model in several arrays, and the replies of clients that trained it."""

    def __init__(self, parameters: int, clients: int) -> None:
        random = np.random.default_rng(1)
        sizes = [max(1, int(share * parameters)) for share in SHARES]
        sizes.append(parameters - sum(sizes))
        names = tuple(f"array-{number}" for number in range(len(sizes)))
        self.layout = ModelLayout(names, tuple((size,) for size in sizes), "float32")
        self.start = random.standard_normal(parameters, dtype=np.float32)
        self.samples = random.integers(50, 500, size=clients)
        self.clients = tuple(ClientProfile(f"client-{k}", int(n), 1) for k, n in enumerate(self.samples))
        self.replies = [self._reply(random, int(n)) for n in self.samples]

    def _reply(self, random: np.random.Generator, samples: int) -> RecordDict:
        moved = self.start + np.float32(0.01) * random.standard_normal(self.start.size, dtype=np.float32)
        arrays = {name: Array(np.ascontiguousarray(part)) for name, part in self.layout.unflatten(moved).items()}
        return RecordDict({ARRAYS: ArrayRecord(arrays), METRICS: MetricRecord({SAMPLES: samples})})

    def flower(self) -> ArrayRecord:
        """What Flower's FedAvg does."""
        return aggregate_arrayrecords(self.replies, SAMPLES)

    def received(self) -> list[Any]:
        """Decode and check, as a round does."""
        rules = ReplyRules()
        gate = ReplyGate(self.start, PLACE, range(len(self.clients)), self.layout, self.clients, rules)
        for client, content in enumerate(self.replies):
            vector, samples = read_model(SimpleNamespace(content=content), self.layout)  # type: ignore[arg-type]
            gate.take(Reply(client, PLACE, samples, vector, owned=True))
        assert len(gate.accepted) == len(self.clients)
        return list(gate.accepted.values())

    def tracked(self) -> np.ndarray:
        """Decode, check, and the mean with every drift."""
        return average_replies(self.received(), self.start.astype(np.float64), self.samples, False).step


def seconds(work: Callable[[], object]) -> float:
    """Processor time of one call."""
    began = time.process_time()
    work()
    return time.process_time() - began


def measure(parameters: int, clients: int, repeats: int) -> dict[str, Any]:
    """Medians of both sides, in turns, and what ours adds to Flower's."""
    problem = Problem(parameters, clients)
    mean = np.concatenate([array.numpy() for array in problem.flower().values()]).astype(np.float64)
    np.testing.assert_allclose(problem.start + problem.tracked(), mean, atol=1e-4)
    works = {"flower": problem.flower, "sifu": problem.tracked, "sifu, decoding and checks": problem.received}
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            times[name].append(seconds(work))
    medians = {name: statistics.median(spent) for name, spent in times.items()}
    shares = [ours / theirs - 1.0 for ours, theirs in zip(times["sifu"], times["flower"], strict=True)]
    return {
        "parameters": parameters,
        "clients": clients,
        "seconds": {name: round(spent, 3) for name, spent in medians.items()},
        "added": round(statistics.median(shares), 2),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each size and print one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, nargs="+", default=[2_000_000, 8_000_000, 25_000_000])
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args(arguments)
    for parameters in chosen.parameters:
        print(json.dumps(measure(parameters, chosen.clients, chosen.repeats)), flush=True)


if __name__ == "__main__":
    main()
