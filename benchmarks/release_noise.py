"""Noise on releases: held-out accuracy against protection, by `sifu advise`, `train`, `plan` and `status`.

    python benchmarks/release_noise.py --data FOLDER --work FOLDER --out benchmarks/results/release_noise.csv

Each task has 100 clients of 100 records. `sifu advise` tries penalties and the noise of three budgets, for records and
for clients; each accuracy is the mean of five draws. The noise that hides a record at (3, 1e-5) is then used in real
runs, each with its own draw: `trained` is the mean held-out accuracy of their releases, and `stated` the largest
epsilon that `sifu plan` states for the records of the first clients. `best` is the best head without noise,
`without_noise` the same head without noise.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

BUDGET = (3.0, 1e-5)
ASKED = 5
"""Number of clients whose plans are read in each run."""
FOURIER = {"kind": "random_fourier", "bandwidth": 5.0}
LAST = {"kind": "pretrained", "layers": "last", "size": 96, "mirror": False}
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "mnist fourier 500": ("mnist", FOURIER | {"count": 500}),
    "mnist fourier 1000": ("mnist", FOURIER | {"count": 1000}),
    "celeba last layer": ("celeba", LAST),
    "cifar10 last layer": ("cifar10", LAST),
}
COLUMNS = ("task", "hides", "epsilon", "delta", "r", "distance", "noise", "accuracy", "without_noise", "best", "best_r",
           "rows", "runs", "trained", "stated")  # fmt: skip


def sifu(*arguments: Any) -> dict[str, Any]:
    """Run a sifu command and return its JSON answer."""
    command = [sys.executable, "-m", "sifu.cli.main", *map(str, arguments), "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"sifu {' '.join(map(str, arguments))} ended with {done.returncode}: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout))


def written_spec(name: str, work: Path) -> Path:
    """Write the spec of a task."""
    data, features = TASKS[name]
    sections = {
        "data": {"name": data, "clients": 100, "samples_per_client": 100, "partition": "iid"},
        "model": {"kind": "ridge"},
        "features": features | {"cache": str(work / "features")},
        "ridge": {"regularisation": 1.0},
        "release": {"noise": 0.01},
    }
    lines = [
        line
        for section, keys in sections.items()
        for line in (f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items()))
    ]
    path = work / f"{name.replace(' ', '-')}.toml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def trained(spec: Path, option: dict[str, Any], runs: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the accuracy that runs with this noise reach and the epsilon that they state."""
    accuracies, stated = [], []
    for number in range(runs):
        run = options.work / f"{spec.stem}-{number}"
        noise = ("--set", f"release.noise={option['noise']}", "--set", f"ridge.regularisation={option['r']}")
        sifu("train", spec, "--run", run, "--data", options.data, *noise)
        status = sifu("status", run)
        accuracies.append(status["held_out"]["accuracy"])
        for client in status["clients"][:ASKED]:
            plan = sifu("plan", run, "--client", client["name"], "--records", "0")
            stated.append(plan["observers"]["before_after"]["epsilon"])
    return {"runs": runs, "trained": mean(accuracies), "stated": max(stated)} if runs else {}


def measured(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row for each unit and budget of a task."""
    spec = written_spec(name, options.work)
    advice = sifu("advise", spec, "--data", options.data)["release"]
    for option in advice["options"]:
        row = {"task": name, "hides": option["unit"], "r": option["relative_penalty"], **option}
        row |= {"best": advice["accuracy"], "best_r": advice["relative_penalty"], "rows": advice["rows"]}
        if (option["unit"], option["epsilon"], option["delta"]) == ("record", *BUDGET):
            row |= trained(spec, row, options.runs, options)
        yield {column: row.get(column) for column in COLUMNS}


def main() -> None:
    """Measure the tasks and write the table; a row is printed as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--work", type=Path, required=True, help="an empty folder for runs and features")
    parser.add_argument("--tasks", default=",".join(TASKS), help="names of tasks, separated by commas")
    parser.add_argument("--runs", type=int, default=3, help="number of real runs of each task")
    parser.add_argument("--out", type=Path, help="CSV file; its rows of other tasks are kept")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    chosen = options.tasks.split(",")
    rows: list[dict[str, Any]] = []
    if options.out and options.out.exists():
        with options.out.open(encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["task"] not in chosen]
    for name in chosen:
        for row in measured(name, options):
            rows.append({key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()})
            print(rows[-1], flush=True)
        if options.out:
            with options.out.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main()
