"""Cost of tracking on Flower's server, compared with Flower's own FedAvg.

    python benchmarks/flower_rounds.py [--parameters 2000000 8000000 25000000] [--clients 20] [--repeats 5]

Both sides get the same replies in Flower's records, as received, and end with the new model in a record that can be
sent. Flower's aggregation decodes them, sums the mean in float32 and encodes it. sifu decodes, checks every reply
(finite, not too large), sums the mean and every client's drift in float64, updates the model and encodes it. They run
in this process in turns, on one thread. Times are processor times, which other work on the machine disturbs less, and
figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

from sifu.core.engine import Position
from sifu.core.layout import ModelLayout
from sifu.core.replies import Reply, ReplyRules
from sifu.core.round import RoundSetup, step
from sifu.engines.flower.wire import ARRAYS, METRICS, SAMPLES, arrays_record, read_model
from sifu.engines.remote import OpenRound
from sifu.theory.facts import ClientProfile

PLACE = Position(0, 0)
SHARES = (0.001, 0.009, 0.04, 0.15, 0.3)
"""Shares of a network's parameters in its arrays, which have very different sizes; the last array has the rest."""


class Problem:
    """Model in several arrays, and the replies of clients that trained it."""

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
        self.setup = RoundSetup(self.start, PLACE, np.arange(clients))
        design = SimpleNamespace(replies=ReplyRules(), clipping=None, rounding=None)
        engine = SimpleNamespace(
            blueprint=design,
            layout=self.layout,
            clients=self.clients,
            samples=self.samples,
            participation_key=1,
            left_out=(),
            least=1,
        )
        self.steps = OpenRound(engine)  # type: ignore[arg-type]

    def _reply(self, random: np.random.Generator, samples: int) -> RecordDict:
        moved = self.start + np.float32(0.01) * random.standard_normal(self.start.size, dtype=np.float32)
        arrays = {name: Array(np.ascontiguousarray(part)) for name, part in self.layout.unflatten(moved).items()}
        return RecordDict({ARRAYS: ArrayRecord(arrays), METRICS: MetricRecord({SAMPLES: samples})})

    def flower(self) -> ArrayRecord:
        """Aggregate as Flower's FedAvg does."""
        return aggregate_arrayrecords(self.replies, SAMPLES)

    def tracked(self) -> ArrayRecord:
        """Process a round as sifu does: decode, check, compute the mean and every drift, update the model, and encode
        it.
        """
        messages = (SimpleNamespace(content=content) for content in self.replies)
        answers = [read_model(message, self.layout) for message in messages]  # type: ignore[arg-type]
        replies = [Reply(client, PLACE, count, model, owned=True) for client, (model, count) in enumerate(answers)]
        accepted, _ = self.steps.gate(self.setup, np.arange(len(replies)), replies)
        assert accepted is not None
        assert accepted.participants.size == len(self.clients)
        new = step(self.steps, self.setup, accepted.participants, self.steps.average(self.setup, accepted))
        return arrays_record(self.layout, new)


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Return the elapsed and the processor time of one call."""
    began = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began[0], time.process_time() - began[1]


def measure_server(parameters: int, clients: int, repeats: int) -> dict[str, Any]:
    """Return the medians of both sides, measured in turns, and what sifu adds to Flower's."""
    problem = Problem(parameters, clients)
    for array, other in zip(problem.flower().values(), problem.tracked().values(), strict=True):
        np.testing.assert_allclose(array.numpy(), other.numpy(), atol=1e-4)
    works = {"flower": problem.flower, "sifu": problem.tracked}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            times[name].append(seconds(work))
    result: dict[str, Any] = {"parameters": parameters, "clients": clients}
    for clock, place in (("elapsed", 0), ("processor", 1)):
        spent = {name: [both[place] for both in of_work] for name, of_work in times.items()}
        shares = [ours / theirs - 1.0 for ours, theirs in zip(spent["sifu"], spent["flower"], strict=True)]
        medians = {name: round(statistics.median(some), 3) for name, some in spent.items()}
        result[clock] = medians | {"added": round(statistics.median(shares), 2)}
    return result


def main() -> None:
    """Print one JSON object for each number of parameters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, nargs="+", default=[2_000_000, 8_000_000, 25_000_000])
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    for parameters in chosen.parameters:
        print(json.dumps(measure_server(parameters, chosen.clients, chosen.repeats)), flush=True)


if __name__ == "__main__":
    main()
