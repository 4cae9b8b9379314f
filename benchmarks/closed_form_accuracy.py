"""Test accuracy of closed-form heads on the default image features, seed by seed.

    python benchmarks/closed_form_accuracy.py --data FOLDER --out benchmarks/results/closed_form_accuracy.json

One head on all training images of each data set: with whole-number statistics it does not matter how they are spread
over clients. The penalty is chosen by generalised cross-validation from the training statistics; the test images are
looked at once, at the end. Seeds draw the filters. They start at 1: seed 0 was used while the map was designed.
`--features pretrained` puts the head on the pretrained trunk instead (`sifu[pretrained]`), which has no seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from sifu.data.feature_maps import client_statistics, feature_map, fixed_point
from sifu.data.sources import load
from sifu.theory.closed_form import Targets, fit_head
from sifu_paper.provenance import commit, provenance

DATASETS = ("mnist", "fashion_mnist", "cifar10", "cifar100", "celeba")


def images_first(images: Any) -> Any:
    """Bytes (n, height, width[, channels]) as (n, channels, height, width)."""
    return images[:, None] if images.ndim == 3 else np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def measure(name: str, folder: Path, kind: str, seeds: list[int], device: str) -> list[dict[str, Any]]:
    """One row for each seed."""
    dataset = load(name, folder)
    train, test = images_first(dataset.x_train), images_first(dataset.x_test)
    targets = Targets("classification", len(dataset.classes))
    rows = []
    for seed in seeds:
        started = time.perf_counter()
        options = {"seed": seed} if kind == "random_convolutions" else {}
        features = feature_map(kind, train.shape[1:], device=device, **options)
        fixed = fixed_point(features, targets)
        summed = client_statistics(features, targets, fixed, train, dataset.y_train)
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


def main() -> None:
    """Write one JSON file; rows of data sets measured before stay in it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder with the data sets' files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=DATASETS)
    parser.add_argument("--features", default="random_convolutions", choices=("random_convolutions", "pretrained"))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--commit", help="what to record as the commit where there is no repository")
    chosen = parser.parse_args()
    result = json.loads(chosen.out.read_text()) if chosen.out.exists() else {"rows": [], "provenance": {}}
    kind = chosen.features
    seeds = list(range(1, chosen.seeds + 1)) if kind == "random_convolutions" else [0]
    for name in chosen.datasets:
        rows = measure(name, chosen.data, kind, seeds, chosen.device)
        others = [row for row in result["rows"] if (row["dataset"], row["kind"]) != (name, kind)]
        result["rows"] = others + rows
        origin = provenance(chosen.device, [Path(__file__).name, "--features", kind])
        result["provenance"][f"{name}, {kind}"] = origin | {"commit": chosen.commit or commit()}
        chosen.out.write_text(json.dumps(result, indent=1) + "\n")
    for name in DATASETS:
        accuracies = [row["test_accuracy"] for row in result["rows"] if (row["dataset"], row["kind"]) == (name, kind)]
        if accuracies:
            mean, low, high = statistics.mean(accuracies), min(accuracies), max(accuracies)
            print(f"{name}: {mean:.1f} ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    main()
