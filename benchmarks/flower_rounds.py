"""Cost of rounds on Flower: tracking on the server, and ten times as many clients.

    python benchmarks/flower_rounds.py server [--parameters 2000000 8000000 25000000] [--clients 20] [--repeats 5]
    python benchmarks/flower_rounds.py clients [--clients 100 1000] [--taking-part 20] [--rounds 40]
                                               [--evaluate-every 1]

`server` compares sifu's work on a round's replies with that of Flower's own FedAvg. Both sides get the same replies in
Flower's records, as received, and end with the new model in a record that can be sent. Flower's aggregation decodes
them, sums the mean in float32 and encodes it. sifu decodes, checks every reply (finite, not too large), sums the mean
and every client's drift in float64, updates the model and encodes it. They run in this process in turns, on one thread.
Times are processor times, which other work on the machine disturbs less, and figures are medians.

`clients` measures rounds with the same number of participants among more clients, in Flower's simulation. Each size is
a separate process: virtual nodes (ray), softmax on digits, recorded rounds of `fixed(taking-part)`. `seconds` is the
median between two recorded rounds and `megabytes` the server's largest resident memory, without ray's workers. The last
line has the ratios of the last size to the first. Rounds are evaluated only with `--evaluate-every`. An evaluation asks
every client, so ten times as many clients evaluate ten times the data in ten times as many messages.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

import sifu
from sifu.core.engine import Position
from sifu.core.layout import ModelLayout
from sifu.core.replies import Reply, ReplyRules
from sifu.core.round import RoundSetup, step
from sifu.engines.flower.wire import ARRAYS, METRICS, SAMPLES, arrays_record, read_model
from sifu.engines.remote import OpenRound
from sifu.run.clients_and_engine import clients_from_spec
from sifu.theory.facts import ClientProfile
from sifu_paper.flower_simulation import enter_federation, simulate

if TYPE_CHECKING:
    from flwr.serverapp import Grid

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
            facts=SimpleNamespace(server_rate=1.0),
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


class EnoughRoundsError(Exception):
    """End of a measurement: the wanted number of rounds is recorded."""


def measure_clients(clients: int, taking_part: int, rounds: int, evaluate_every: int) -> dict[str, Any]:
    """Return the measurements of recorded rounds in one simulation."""
    spec = sifu.Spec.from_mapping(
        {
            "data": {"name": "digits", "clients": clients, "samples_per_client": 1},
            "model": {"kind": "softmax", "outputs": 10},
            "local": {"rate": 0.1, "steps": 5},
            "server": {"participation": f"fixed({taking_part})"},
            "stop": {"target": 0.0, "max_rounds": 10**6, "evaluate_every": evaluate_every},
            "seed": 1,
        }
    )
    ends: list[float] = []

    def note_end(progress: object) -> None:
        ends.append(time.perf_counter())
        if len(ends) == rounds + 2:  # the first ones wait for processes to start
            raise EnoughRoundsError

    def serve(grid: Grid) -> None:
        engine = enter_federation(grid, Path(folder), spec, clients_from_spec(spec), "fixed constants")
        with suppress(EnoughRoundsError):
            sifu.train(spec, run=Path(folder) / "run", engine=engine, progress=note_end)

    with tempfile.TemporaryDirectory() as folder:
        logging.getLogger("flwr").setLevel(logging.CRITICAL)
        simulate(Path(folder), clients, serve)
    spent = [later - earlier for earlier, later in pairwise(ends[1:])]
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0
    return {"clients": clients, "seconds": statistics.median(spent), "megabytes": round(largest)}


def compare_sizes(sizes: list[int], taking_part: int, rounds: int, evaluate_every: int) -> None:
    """Measure each number of clients in a separate process; print one JSON object per line, then the ratios."""
    rows = []
    for clients in sizes:
        options = ["--clients", clients, "--taking-part", taking_part, "--rounds", rounds]
        options += ["--evaluate-every", evaluate_every]
        command = [sys.executable, __file__, "clients", *map(str, options)]
        lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
        rows.append(json.loads(lines[-1]))
        print(lines[-1], flush=True)
    print(json.dumps({f"times as many {key}": round(rows[-1][key] / rows[0][key], 2) for key in rows[0]}))


def main() -> None:
    """Execute the chosen part, and print one JSON object per line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    server, clients = parts.add_parser("server"), parts.add_parser("clients")
    server.add_argument("--parameters", type=int, nargs="+", default=[2_000_000, 8_000_000, 25_000_000])
    server.add_argument("--clients", type=int, default=20)
    server.add_argument("--repeats", type=int, default=5)
    clients.add_argument("--clients", type=int, nargs="+", default=[100, 1000])
    clients.add_argument("--taking-part", type=int, default=20)
    clients.add_argument("--rounds", type=int, default=40)
    clients.add_argument("--evaluate-every", type=int, default=10**6)
    chosen = parser.parse_args()
    if chosen.part == "server":
        for parameters in chosen.parameters:
            print(json.dumps(measure_server(parameters, chosen.clients, chosen.repeats)), flush=True)
        return
    measured = chosen.taking_part, chosen.rounds, chosen.evaluate_every
    if len(chosen.clients) == 1:
        print(json.dumps(measure_clients(chosen.clients[0], *measured)), flush=True)
    else:
        compare_sizes(chosen.clients, *measured)


if __name__ == "__main__":
    main()
