"""Closed-form heads: what features, statistics, a forget and the checks cost, with 100, 1,000 and 10,000 clients.

    python benchmarks/closed_form.py
    python benchmarks/closed_form.py --features 512 --clients 100 1000 --images 2000

Images are made up (noise of the size of CIFAR-10's), since only time is measured; `sifu bench` has accuracy. Clients
have 10 samples each. Two ways to keep statistics are timed: every client's, in files of a temporary folder, where a
forget reads one file and subtracts; and the sum alone. Memory is the largest resident size of the process so far.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sifu.data.feature_maps import client_statistics, feature_map, fixed_point
from sifu.experiments.provenance import commit, processor
from sifu.theory.closed_form import FixedPoint, Statistics, Targets, check_statistics, fit_head, statistics_of
from sifu.theory.closed_form.statistics import statistics_of_chunks

OUTPUTS, SAMPLES, KEPT_FILES = 10, 10, 20


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What `work` returns, with its seconds and its processor seconds."""
    wall, processor_time = time.perf_counter(), time.process_time()
    result = work()
    return result, {
        "seconds": round(time.perf_counter() - wall, 4),
        "processor_seconds": round(time.process_time() - processor_time, 4),
    }


def largest_resident() -> int:
    """The largest resident size of this process so far, in MiB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit // 2**20


def images(count: int) -> dict[str, Any]:
    """Features and statistics of made-up colour images by the default map."""
    generator = np.random.default_rng(0)
    x = generator.integers(256, size=(count, 3, 32, 32), dtype=np.uint8)
    y = generator.integers(OUTPUTS, size=count)
    features, targets = feature_map("random_convolutions", (3, 32, 32)), Targets("classification", OUTPUTS)
    fixed = fixed_point(features, targets)
    _, mapped = timed(lambda: [None for _ in features.chunks(x)])
    statistics, both = timed(lambda: client_statistics(features, targets, fixed, x, y))
    _, checked = timed(lambda: check_statistics(statistics, "the client"))
    _, solved = timed(lambda: fit_head(statistics, 0.01))
    _, chosen = timed(lambda: fit_head(statistics))
    _, digested = timed(statistics.digest)
    return {
        "images": count,
        "features": features.features,
        "map": mapped,
        "map_and_statistics": both,
        "check": checked,
        "head_with_fixed_penalty": solved,
        "head_by_cross_validation": chosen,
        "digest": digested,
        "bytes_a_client": statistics.words().nbytes,
    }


def made_up(fixed: FixedPoint, client: int, samples: int) -> tuple[Any, Any]:
    """Features and targets of one client."""
    generator = np.random.default_rng(client)
    phi = generator.normal(size=(samples, fixed.features))
    phi *= fixed.norm / np.linalg.norm(phi, axis=1, keepdims=True)
    return phi, Targets("classification", OUTPUTS).encode(generator.integers(OUTPUTS, size=samples))


def federation(clients: int, features: int) -> dict[str, Any]:
    """Train, then forget one client, whose statistics are kept in a file or come with the request."""
    fixed = FixedPoint(features=features, outputs=OUTPUTS)

    def everybody() -> Iterator[tuple[Any, Any]]:
        # Integers add up alike however they are grouped, so clients may be multiplied together.
        for start in range(0, clients, 100):
            rows = [made_up(fixed, client, SAMPLES) for client in range(start, min(start + 100, clients))]
            yield np.concatenate([phi for phi, _ in rows]), np.concatenate([targets for _, targets in rows])

    whole, trained = timed(lambda: statistics_of_chunks(fixed, everybody()))
    with tempfile.TemporaryDirectory() as folder:
        for client in range(min(clients, KEPT_FILES)):
            np.save(Path(folder, str(client)), statistics_of(fixed, *made_up(fixed, client, SAMPLES)).words())

        def forget() -> Any:
            return fit_head(whole - Statistics.from_words(fixed, np.load(Path(folder, "3.npy"))), 0.01)

        head, forgotten = timed(forget)
    left = (made_up(fixed, client, SAMPLES) for client in range(clients) if client != 3)
    same = fit_head(statistics_of_chunks(fixed, left), 0.01).digest() == head.digest() if clients <= 1000 else None
    return {
        "clients": clients,
        "features": features,
        "all_statistics": trained,
        "forget_one_client_fixed_penalty": forgotten,
        "equals_training_without": same,
        "largest_resident_mib": largest_resident(),
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1_000, 10_000])
    parser.add_argument("--features", type=int, default=2_048, help="features of the made-up clients")
    parser.add_argument("--images", type=int, default=10_000, help="made-up images for the default map; 0 for none")
    chosen = parser.parse_args()
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "hardware": f"{processor()}, {os.cpu_count()} cores",
        "federations": [federation(clients, chosen.features) for clients in chosen.clients],
        "images": images(chosen.images) if chosen.images else None,
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
