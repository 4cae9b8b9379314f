"""Test accuracy by seed: heads on the default image features, and the paper's networks for comparison.

Heads: one head on all training images of each data set, because with integer statistics the partition among clients
does not matter. Generalised cross-validation on the training statistics chooses the penalty; the test images are used
once, at the end. Seeds draw the filters. They start at 1, because seed 0 was used in the design of the map. `--features
pretrained` puts the head on the pretrained backbone instead (the extra `pretrained`), which has no seed.

Networks: FedAvg in the setting of `sifu-bench` (`paper.toml` of its specs), on a GPU. Training stops at the paper's
target on the clients' own data, or after `--rounds`; the test images are used once, at the end. All seeds of a data set
are lanes of one program.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sifu.core.engine import Position
from sifu.core.round_stream import RoundsWanted, stream_rounds
from sifu.data import load
from sifu.data.feature_maps import feature_map, fixed_point
from sifu.engines.sim.lanes import lane_engines
from sifu.engines.sim.models import Samples, Scorer
from sifu.run.clients_and_engine import clients_from_spec, engine_from_spec, held_out_from_spec
from sifu.theory.closed_form import Targets, fit_head
from sifu.theory.closed_form.sums import statistics_of_chunks
from sifu_paper.provenance import commit, provenance
from sifu_paper.settings import load_experiment, run_spec

DATASETS = ("mnist", "fashion_mnist", "cifar10", "cifar100", "celeba")


def images_first(images: Any) -> Any:
    """Return images (n, height, width[, channels]) as (n, channels, height, width)."""
    return images[:, None] if images.ndim == 3 else np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def measure_heads(name: str, folder: Path, kind: str, seeds: list[int], device: str) -> list[dict[str, Any]]:
    """Return one row per seed for heads."""
    dataset = load(name, folder)
    train, test = images_first(dataset.x_train), images_first(dataset.x_test)
    targets = Targets("classification", len(dataset.classes))
    rows = []
    for seed in seeds:
        started = time.perf_counter()
        options = {"seed": seed} if kind == "random_convolutions" else {}
        features = feature_map(kind, train.shape[1:], device=device, **options)
        fixed = fixed_point(features, targets)
        encoded = targets.encode(dataset.y_train)
        summed = statistics_of_chunks(fixed, ((phi, encoded[rows]) for rows, phi in features.chunks(train)))
        gathered = time.perf_counter()
        head = fit_head(summed)
        solved = time.perf_counter()
        right = 0
        for start in range(0, len(test), 500):
            scores = head.predict(features(test[start : start + 500]))
            right += int((targets.decode(scores) == dataset.y_test[start : start + 500]).sum())
        rows.append(
            {
                "dataset": name,
                "kind": kind,
                "seed": seed,
                "features": features.features,
                "test_accuracy": 100.0 * right / len(test),
                "relative_penalty": head.relative_penalty,
                "seconds_features_and_statistics": round(gathered - started, 2),
                "seconds_head": round(solved - gathered, 2),
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def measure_networks(name: str, folder: Path, seeds: list[int], rounds: int, precision: str) -> list[dict[str, Any]]:
    """Return one row per seed for networks."""
    experiment = load_experiment("sequential")
    specs = [run_spec(experiment, name, "paper", seed, "paper")[0] for seed in seeds]
    clients = [clients_from_spec(spec, folder) for spec in specs]
    federations = [engine_from_spec(spec, members)[0] for spec, members in zip(specs, clients, strict=True)]
    x, y = held_out_from_spec(specs[0], folder) or sys.exit(f"{name} has no test images")
    engines = lane_engines(federations, clients, "cuda", precision)
    rows: list[dict[str, Any]] = []

    def train(seed: int, spec: Any, federation: Any, engine: Any) -> None:
        start = engine.initial_model(0)
        wanted = RoundsWanted(spec.stop, start.astype(np.float64))
        target, accuracy, done, model = spec.stop.target, float("nan"), 0, start
        for streamed in stream_rounds(engine, start, Position(0, 0), np.arange(len(engine.clients)), wanted):
            done += 1
            if streamed.evaluation is not None:
                accuracy = streamed.evaluation.accuracy
            reached = streamed.evaluation is not None and accuracy >= target and done >= spec.stop.min_rounds
            if reached or done >= rounds:
                model = streamed.fetch_model()
                break
        engine.close()
        rows.append(
            {
                "dataset": name,
                "seed": seed,
                "rounds": done,
                "target": target,
                "training_accuracy": accuracy,
                "reached": bool(accuracy >= target),
                "test_accuracy": 100.0 * Scorer(federation.model, "float32").accuracy(model, Samples(x, y)),
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)

    threads = [threading.Thread(target=train, args=job) for job in zip(seeds, specs, federations, engines, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(rows, key=lambda row: row["seed"])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that heads and networks share."""
    parser.add_argument("--data", type=Path, required=True, help="the folder with the data sets' files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=DATASETS)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--commit", help="commit to record if there is no repository")


def add_head_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of heads."""
    add_options(parser)
    parser.add_argument("--features", default="random_convolutions", choices=("random_convolutions", "pretrained"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))


def add_network_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of networks."""
    add_options(parser)
    parser.add_argument("--rounds", type=int, default=3000, help="largest number of rounds of a training")
    parser.add_argument("--precision", default="tf32", choices=("float32", "tf32"))


def write(chosen: argparse.Namespace, kind: str | None, device: str, measure: Callable[[str], list[Any]]) -> None:
    """Measure each data set into one JSON file; keep earlier rows of other data sets."""
    result = json.loads(chosen.out.read_text()) if chosen.out.exists() else {"rows": [], "provenance": {}}
    for name in chosen.datasets:
        rows = measure(name)
        result["rows"] = [row for row in result["rows"] if (row["dataset"], row.get("kind")) != (name, kind)] + rows
        origin = provenance(device, ["closed_form.py", *sys.argv[1:]])
        result["provenance"][f"{name}, {kind}" if kind else name] = origin | {"commit": chosen.commit or commit()}
        chosen.out.write_text(json.dumps(result, indent=1) + "\n")
        accuracies = [row["test_accuracy"] for row in rows]
        missed = sum(not row.get("reached", True) for row in rows)
        print(f"{name}: {statistics.mean(accuracies):.1f} ({min(accuracies):.1f} to {max(accuracies):.1f})", end="")
        print(f"; {missed} of {len(rows)} did not reach the target" if missed else "")


def run_heads(chosen: argparse.Namespace) -> None:
    """Measure the accuracy of heads."""
    kind = chosen.features
    seeds = list(range(1, chosen.seeds + 1)) if kind == "random_convolutions" else [0]
    write(chosen, kind, chosen.device, lambda name: measure_heads(name, chosen.data, kind, seeds, chosen.device))


def run_networks(chosen: argparse.Namespace) -> None:
    """Measure the accuracy of networks."""
    seeds = list(range(1, chosen.seeds + 1))
    write(
        chosen,
        None,
        "cuda",
        lambda name: measure_networks(name, chosen.data, seeds, chosen.rounds, chosen.precision),
    )
