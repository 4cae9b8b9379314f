"""Test accuracy of the paper's networks under FedAvg, trained to the paper's targets, seed by seed, on a GPU.

    python benchmarks/network_accuracy.py --data FOLDER --out benchmarks/results/network_accuracy.json

The setting is that of `sifu-bench` (`paper.toml` of its specs). Training stops at the paper's target on the clients'
own data, or after `--rounds`; the test images are looked at once, at the end. All seeds of a data set are lanes of one
program.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from sifu.core.engine import Position
from sifu.core.round_stream import RoundsWanted, stream_rounds
from sifu.engines.sim.lanes import lane_engines
from sifu.engines.sim.scoring import Samples, Scorer
from sifu.run.clients_and_engine import clients_from_spec, engine_from_spec, held_out_from_spec
from sifu_paper.provenance import commit, provenance
from sifu_paper.settings import load_experiment, run_spec

DATASETS = ("mnist", "fashion_mnist", "cifar10", "cifar100", "celeba")


def measure(name: str, folder: Path, seeds: list[int], rounds: int, precision: str) -> list[dict[str, Any]]:
    """One row for each seed."""
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


def main() -> None:
    """Write one JSON file; rows of data sets measured before stay in it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder with the data sets' files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=DATASETS)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3000, help="the most rounds of a training")
    parser.add_argument("--precision", default="tf32", choices=("float32", "tf32"))
    parser.add_argument("--commit", help="what to record as the commit where there is no repository")
    chosen = parser.parse_args()
    result = json.loads(chosen.out.read_text()) if chosen.out.exists() else {"rows": [], "provenance": {}}
    for name in chosen.datasets:
        rows = measure(name, chosen.data, list(range(1, chosen.seeds + 1)), chosen.rounds, chosen.precision)
        result["rows"] = [row for row in result["rows"] if row["dataset"] != name] + rows
        origin = provenance("cuda", [Path(__file__).name, "--precision", chosen.precision])
        result["provenance"][name] = origin | {"commit": chosen.commit or commit()}
        chosen.out.write_text(json.dumps(result, indent=1) + "\n")
        accuracies = [row["test_accuracy"] for row in rows]
        spread = f"{min(accuracies):.1f} to {max(accuracies):.1f}"
        reached = sum(row["reached"] for row in rows)
        print(f"{name}: {statistics.mean(accuracies):.1f} ({spread}); {reached} of {len(rows)} reached the target")


if __name__ == "__main__":
    main()
