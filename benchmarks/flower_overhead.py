"""What tracking costs a server on Flower: the mean of a round's replies alone, and with every client's drift beside it.

    python benchmarks/flower_overhead.py [--parameters 25000000] [--clients 20] [--repeats 5]

Both run in this process on the same replies, in turns; figures are medians. "One pass" reads every reply once and sums
its squares: the least that reading the updates once more can cost. The mean alone is the same pass with the work of an
aggregation. Times are those of the processor, so that other work on the machine disturbs them less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from sifu.engines.flower.averaging import BLOCK_WORDS, average_replies

Rows = list[np.ndarray]


def mean_only(rows: Rows, start: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """FedAvg as the engine does it, block by block in float64, without drifts."""
    weights, width = samples / samples.sum(), BLOCK_WORDS // len(rows)
    mean, held = np.empty(start.size), np.empty((len(rows), width))
    for first in range(0, start.size, width):
        block = held[:, : min(width, start.size - first)]
        for place, row in enumerate(rows):
            block[place] = row[first : first + width]
        mean[first : first + width] = weights @ block
    return mean - start


def tracked(rows: Rows, start: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """The same with drifts, as `FlowerFederation.run_round` calls it."""
    return average_replies(rows, start, samples, False).step


def one_pass(rows: Rows, start: np.ndarray, samples: np.ndarray) -> float:
    """Every reply read once."""
    return sum(float(row @ row) for row in rows)


def flower_fedavg(rows: Rows, start: np.ndarray, samples: np.ndarray) -> object:
    """What Flower's own FedAvg does with the same replies (float32, from its records)."""
    from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
    from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

    records = [
        RecordDict({"arrays": ArrayRecord({"w": Array(row)}), "metrics": MetricRecord({"num-examples": int(n)})})
        for row, n in zip(rows, samples, strict=True)
    ]
    began = time.process_time()
    aggregate_arrayrecords(records, "num-examples")
    return time.process_time() - began


def seconds(work: Callable[[Rows, np.ndarray, np.ndarray], object], *given: object) -> float:
    """How long it took; what the work measured itself, where it did."""
    began = time.process_time()
    result = work(*given)  # type: ignore[arg-type]
    return result if isinstance(result, float) and work is flower_fedavg else time.process_time() - began


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    chosen = parser.parse_args()
    random = np.random.default_rng(1)
    start = random.standard_normal(chosen.parameters, dtype=np.float32).astype(chosen.dtype)
    rows = [
        start + 0.01 * random.standard_normal(chosen.parameters, dtype=np.float32).astype(chosen.dtype)
        for _ in range(chosen.clients)
    ]
    samples = random.integers(50, 500, size=chosen.clients)
    exact = start.astype(np.float64)
    works = {"mean_only": mean_only, "tracked": tracked, "one_pass": one_pass, "flower_fedavg": flower_fedavg}
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(chosen.repeats):
        for name, work in works.items():
            times[name].append(seconds(work, rows, exact, samples))
    np.testing.assert_allclose(mean_only(rows, exact, samples), tracked(rows, exact, samples), atol=1e-12)
    medians = {name: statistics.median(many) for name, many in times.items()}
    extra = [b - a for a, b in zip(times["mean_only"], times["tracked"], strict=True)]
    print(
        json.dumps(
            {
                "parameters": chosen.parameters,
                "clients": chosen.clients,
                "dtype": chosen.dtype,
                "repeats": chosen.repeats,
                "seconds": {name: round(value, 3) for name, value in medians.items()},
                "tracking_seconds": round(statistics.median(extra), 3),
                "tracking_over_mean": round(statistics.median(extra) / medians["mean_only"], 3),
                "tracking_over_one_pass": round(statistics.median(extra) / medians["one_pass"], 3),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
