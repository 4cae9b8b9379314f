"""Attacks by an observer of two releases, through `sifu` commands from training to the audit.

    python benchmarks/before_after.py --work FOLDER --hospitals FOLDER --out benchmarks/results/before_after.csv

Three tasks: the four hospitals (a folder with the files processed.*.data of UCI), digits without features, and digits
with 256 Fourier features. The observer has 100 public samples, all of them, or the training records, which give it the
Gram matrix of the others up to the deleted record. Each row comes from `sifu audit RUN --only-releases`.

Rows with `hides` are runs with noise on releases, enough for one release to hide a record or a client at (1, 1e-5).
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sifu.api import open_run
from sifu.core.spec import Spec
from sifu.data.digits import stored_digits
from sifu.run.releases import Accountant
from sifu.theory.calibration import exact_multiplier

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
ATTRIBUTES = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak", "slope", "ca", "thal")  # fmt: skip  # noqa: E501
FEW = 100
BUDGET = (1.0, 1e-5)
COLUMNS = ("task", "hides", "public", "what", "source", "attempts", "candidates", "identified", "reconstructed",
           "cosine", "nearest_public", "control_identified", "control_cosine")  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A run to attack: its spec, and files of public samples by name."""

    name: str
    spec: Path
    public: dict[str, Path]


def sifu(*arguments: Any) -> dict[str, Any]:
    """Run a sifu command and return its JSON answer."""
    command = [sys.executable, "-m", "sifu.cli.main", *map(str, arguments), "--format", "json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def hospitals_task(source: Path, folder: Path) -> Task:
    """Return the task of the four hospitals as a table, with a fifth of the patients public."""
    header, rows = ["hospital", *ATTRIBUTES, "ill"], []
    for name in HOSPITALS:
        for line in (source / f"processed.{name}.data").read_text(encoding="utf-8").splitlines():
            *values, diagnosis = [part.strip() for part in line.split(",")]
            if diagnosis.replace(".", "").isdigit():
                coded = ["" if value == "?" else repr(float(value)) for value in values]
                rows.append([name, *coded, "yes" if float(diagnosis) > 0 else "no"])
    order = np.random.default_rng(0).permutation(len(rows))
    cut = len(rows) // 5
    chosen = {"all": order[:cut], "100": order[:FEW], "trained on": np.sort(order[cut:])}
    files = {name: folder / f"hospitals-{name.replace(' ', '-')}.csv" for name in chosen}
    for name, numbers in chosen.items():
        with files[name].open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([header, *(rows[number] for number in numbers)])
    records, spec = files["trained on"], folder / "hospitals.toml"
    sifu("init", spec, "--from", records, "--label", "ill", "--client-column", "hospital")
    text = spec.read_text(encoding="utf-8").replace('preprocessing = "unknown"', 'preprocessing = "fixed"')
    spec.write_text(text.replace("held_out = 0.2", "held_out = 0.0"), encoding="utf-8")
    return Task("hospitals", spec, files)


def digits_task(name: str, features: str, folder: Path) -> Task:
    """Return the task of 100 clients with ten digits each; the other 797 digits are public."""
    images, labels = stored_digits()
    x = np.asarray(images, dtype=np.float64).reshape(len(images), -1) / 16.0
    order = np.random.default_rng(0).permutation(len(x))
    clients = [f"client-{number:03d}" for number in np.repeat(np.arange(100), 10)]
    chosen = {"all": order[1000:], "100": order[1000 : 1000 + FEW], "trained on": order[:1000]}
    files = {kind: folder / f"{name}-{kind.replace(' ', '-')}.npz" for kind in chosen}
    for kind, numbers in chosen.items():
        owners = {"client": np.array(clients)} if kind == "trained on" else {}
        np.savez(files[kind], x=x[numbers], y=labels[numbers], **owners)
    records, spec = files["trained on"], folder / f"{name}.toml"
    spec.write_text(
        f'[data]\nname = "npz"\nfile = "{records}"\npartition = "given"\npreprocessing = "fixed"\n'
        f'[model]\nkind = "ridge"\noutputs = 10\n{features}',
        encoding="utf-8",
    )
    return Task(name, spec, files)


def noise_that_hides(task: Task, unit: str, folder: Path) -> list[str]:
    """Return the settings whose noise hides the record or client that moves the head most, at a fixed penalty."""
    run = folder / f"study-{task.name}-{unit}"
    sifu("train", task.spec, "--run", run, "--set", "ridge.regularisation=1.0")
    with open_run(run).reader() as reader:
        accountant = Accountant.of(reader, Spec.from_mapping(reader.spec))
        distances = [accountant.distances_of(client) for client in range(len(reader.clients()))]
    largest = max((of_client if unit == "client" else of_record or 0.0) for of_client, of_record in distances)
    noise = exact_multiplier(*BUDGET) * largest
    return ["--set", f"release.noise={noise}", "--set", "ridge.regularisation=1.0"]


def attacked(task: Task, folder: Path, trials: int, hides: str = "") -> Iterator[dict[str, Any]]:
    """Yield one row for each attack on a run of the task, with noise if `hides` names records or clients."""
    run = folder / f"run-{task.name}{hides}"
    sifu("train", task.spec, "--run", run, *(noise_that_hides(task, hides, folder) if hides else ()))
    for public, file in task.public.items():
        answer = sifu("audit", run, "--only-releases", "--public-samples", file, "--trials", trials)
        wanted = [found for found in answer["before_after"] if hides in ("", found["what"])]
        yield from ({"task": task.name, "hides": hides, "public": public, **found} for found in wanted)


def main() -> None:
    """Attack every task and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="an empty folder for runs and files")
    parser.add_argument("--hospitals", type=Path, help="folder with the files processed.*.data")
    parser.add_argument("--trials", type=int, default=100, help="number of deletions tried by each audit")
    parser.add_argument("--out", type=Path, help="CSV file to write")
    chosen = parser.parse_args()
    chosen.work.mkdir(parents=True, exist_ok=True)
    fourier = '[features]\nkind = "random_fourier"\ncount = 256\nbandwidth = 3.0\n'
    tasks = [hospitals_task(chosen.hospitals, chosen.work)] if chosen.hospitals else []
    tasks += [digits_task("digits", "", chosen.work), digits_task("digits-fourier", fourier, chosen.work)]
    rows = []
    for task in tasks:
        for hides in ("", "record", "client"):
            for row in attacked(task, chosen.work, chosen.trials, hides):
                values = {name: row.get(name) for name in COLUMNS}
                rows.append(
                    {key: f"{value:.3f}" if isinstance(value, float) else value for key, value in values.items()}
                )
                print(rows[-1], flush=True)
    if chosen.out:
        with chosen.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
