"""Costs of features, statistics, a forget and the checks, with 100, 1,000 and 10,000 clients.

The first part is a whole run, as a user makes it: CIFAR-10 (synthetic images without a folder), 100 clients, the
default map. It is trained, and ten clients are forgotten with a certificate: with all clients' statistics kept and with
only the sum, with a fixed penalty and by cross-validation. The first of these runs computes the features; the others
read them from `features.cache`. Processor seconds are summed over all threads.

The check of one client's statistics is timed with both methods (`sifu.theory.closed_form.statistics_check`).

The second part has synthetic features, ten samples per client, and more clients. Ten of them, whose statistics are in
files, are subtracted from the sum. The third part keeps only the sum (256 features, ten samples per client): ten of
many clients are forgotten in a whole run, and all remaining ones send their statistics again. Each federation is a
separate process, so that memory is its own largest resident size.
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
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

import sifu
from sifu.theory.closed_form import FixedPoint, Statistics, Targets, check_statistics, fit_head, statistics_of
from sifu.theory.closed_form.statistics_check import is_semi_definite
from sifu.theory.closed_form.sums import statistics_of_chunks
from sifu_paper.data import load
from sifu_paper.provenance import commit, processor

OUTPUTS, SAMPLES, LEAVING = 10, 10, 10
SUM_FEATURES = 256


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Return the result of `work`, with its seconds and its processor seconds."""
    wall, processor_time = time.perf_counter(), time.process_time()
    result = work()
    return result, {
        "seconds": round(time.perf_counter() - wall, 4),
        "processor_seconds": round(time.process_time() - processor_time, 4),
    }


def largest_resident() -> int:
    """Return the largest resident size of this process so far, in MiB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit // 2**20


def images(folder: Path | None, count: int) -> tuple[Any, Any, str]:
    """Return `count` colour images as bytes, their labels, and their description."""
    if folder is not None:
        dataset = load("cifar10", folder)
        return dataset.x_train[:count], dataset.y_train[:count], "CIFAR-10"
    generator = np.random.default_rng(0)
    x = generator.integers(256, size=(count, 32, 32, 3), dtype=np.uint8)
    return x, generator.integers(OUTPUTS, size=count), "made-up images"


def whole_run(folder: Path | None, count: int, cache: str, keep: str, regularisation: float | str) -> dict[str, Any]:
    """Train 100 clients on images, forget ten of them, verify; cache the features in `cache`."""
    x, y, name = images(folder, count)
    shares = np.array_split(np.arange(count), 100)
    clients = {
        f"client-{number:03d}": (x[rows].transpose(0, 3, 1, 2) / 255.0, np.asarray(y[rows], dtype=np.int64))
        for number, rows in enumerate(shares)
    }
    spec = {
        "data": {"preprocessing": "fixed"},
        "model": {"kind": "ridge", "outputs": OUTPUTS},
        "features": {"kind": "random_fourier", "count": 2048, "bandwidth": 16.0, "cache": cache},
        "ridge": {"regularisation": regularisation},
        "keep": {"statistics": keep},
    }
    kept_before = any(Path(cache).iterdir())
    with tempfile.TemporaryDirectory() as place:
        run, trained = timed(lambda: sifu.train(spec, run=Path(place, "run"), clients=clients))
        (outcome,), forgotten = timed(lambda: run.forget([f"client-{number:03d}" for number in range(LEAVING)]))
        verification, verified = timed(run.verify)
        features = run.engine().layout.shapes[0][0]
        size = sum(path.stat().st_size for path in Path(place, "run").rglob("*") if path.is_file())
    return {
        "data": f"{count} of {name}",
        "keep": keep,
        "regularisation": regularisation,
        "features": features,
        "features_were_kept": kept_before,
        "features_and_statistics_of_all": trained,
        "forget_ten_with_certificate": forgotten,
        "rounds": outcome.rounds,
        "level": outcome.level,
        "verify": verified | {"holds": verification.holds},
        "megabytes_on_disk": round(size / 1e6, 1),
        "largest_resident_mib": largest_resident(),
    }


def made_up(fixed: FixedPoint, client: int, samples: int) -> tuple[Any, Any]:
    """Return the features and targets of one client."""
    generator = np.random.default_rng(client)
    phi = generator.normal(size=(samples, fixed.features))
    phi *= fixed.norm / np.linalg.norm(phi, axis=1, keepdims=True)
    return phi, Targets("classification", OUTPUTS).encode(generator.integers(OUTPUTS, size=samples))


def federation(clients: int, features: int) -> dict[str, Any]:
    """Sum all clients, subtract ten of them, and solve the head again with a fixed penalty and by cross-validation."""
    fixed = FixedPoint(features=features, outputs=OUTPUTS)

    def everybody(first: int = 0) -> Iterator[tuple[Any, Any]]:
        # Integer sums do not depend on grouping, so clients may be multiplied together.
        for start in range(first, clients, 100):
            rows = [made_up(fixed, client, SAMPLES) for client in range(start, min(start + 100, clients))]
            yield np.concatenate([phi for phi, _ in rows]), np.concatenate([targets for _, targets in rows])

    whole, trained = timed(lambda: statistics_of_chunks(fixed, everybody()))
    with tempfile.TemporaryDirectory() as folder:
        for client in range(LEAVING):
            np.save(Path(folder, str(client)), statistics_of(fixed, *made_up(fixed, client, SAMPLES)).words)

        def left() -> Statistics:
            result = whole
            for client in range(LEAVING):
                result = result - Statistics(fixed, np.load(Path(folder, f"{client}.npy")))
            return result

        staying, subtracted = timed(left)
        _, solved = timed(lambda: fit_head(staying, 0.01))
        _, chosen = timed(lambda: fit_head(staying))
    return {
        "clients": clients,
        "features": features,
        "all_statistics": trained,
        "take_ten_out": subtracted,
        "solve_fixed_penalty": solved,
        "solve_cross_validation": chosen,
        "equals_the_sum_without_them": staying == statistics_of_chunks(fixed, everybody(LEAVING))
        if clients <= 1000
        else None,
        "largest_resident_mib": largest_resident(),
    }


def check_both_ways(features: int, samples: int) -> dict[str, Any]:
    """Time the check of one client's statistics, with and without use of their low rank."""
    fixed = FixedPoint(features=features, outputs=OUTPUTS)
    statistics = statistics_of(fixed, *made_up(fixed, 0, samples))
    check_statistics(statistics, "no client")  # loads the libraries
    _, whole = timed(lambda: check_statistics(statistics, "no client"))
    ways = {}
    for name, rank in (("low_rank", samples), ("cholesky", fixed.width)):
        accepted, ways[name] = timed(lambda rank=rank: is_semi_definite(statistics.gram, rank))
        assert accepted
    return {"features": features, "samples": samples, "check": whole, "semi_definite": ways}


def sums_only(clients: int) -> dict[str, Any]:
    """Run many clients with only the sum kept: ten are forgotten, and all others send again."""
    generator = np.random.default_rng(1)
    data = {
        f"client-{number:05d}": (generator.normal(size=(SAMPLES, 20)), generator.integers(OUTPUTS, size=SAMPLES))
        for number in range(clients)
    }
    spec = {
        "data": {"preprocessing": "fixed"},
        "model": {"kind": "ridge", "outputs": OUTPUTS},
        "features": {"kind": "random_fourier", "count": SUM_FEATURES},
        "ridge": {"regularisation": 0.01},
        "keep": {"statistics": "sum"},
    }
    with tempfile.TemporaryDirectory() as place:
        run, trained = timed(lambda: sifu.train(spec, run=Path(place, "run"), clients=data))
        (outcome,), forgotten = timed(lambda: run.forget([f"client-{number:05d}" for number in range(LEAVING)]))
        kept = sum(path.stat().st_size for path in Path(place, "run", "statistics").iterdir())
    return {
        "clients": clients,
        "features": SUM_FEATURES,
        "features_and_statistics_of_all": trained,
        "forget_ten_with_certificate": forgotten,
        "rounds": outcome.rounds,
        "level": outcome.level,
        "megabytes_of_statistics": round(kept / 1e6, 2),
        "largest_resident_mib": largest_resident(),
    }


def in_its_own_process(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Return the result of `work` in a new process, whose memory is measured separately."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("--data", type=Path, help="folder with the data sets' files; without it, synthetic images")
    parser.add_argument("--out", type=Path, help="file for the result")
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1_000, 10_000])
    parser.add_argument("--features", type=int, default=2_048, help="numbers of features of the synthetic clients")
    parser.add_argument("--images", type=int, default=10_000, help="number of images of the whole runs; 0 skips them")
    parser.add_argument("--commit", help="commit to record if there is no repository")


def run(chosen: argparse.Namespace) -> None:
    """Measure, print one JSON object, and write it to `--out`."""
    ways: list[tuple[str, float | str]] = (
        [("clients", 0.01), ("clients", "auto"), ("sum", 0.01)] if chosen.images else []
    )
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": chosen.commit or commit(),
        "hardware": f"{processor()}, {os.cpu_count()} cores",
        "checks": [],
        "runs": [],
        "federations": [],
        "sums": [],
    }

    def add(part: str, work: Callable[..., dict[str, Any]], *arguments: Any) -> None:
        result[part].append(in_its_own_process(work, *arguments))
        if chosen.out:  # keep finished measurements if the rest is interrupted
            chosen.out.write_text(json.dumps(result, indent=1) + "\n")

    add("checks", check_both_ways, chosen.features, 100)
    with tempfile.TemporaryDirectory() as cache:
        for way in ways if chosen.images else []:
            add("runs", whole_run, chosen.data, chosen.images, cache, *way)
    for clients in chosen.clients:
        add("federations", federation, clients, chosen.features)
    for clients in chosen.clients:
        add("sums", sums_only, clients)
    print(json.dumps(result, indent=1))
