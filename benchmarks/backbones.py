"""Held-out accuracy, time and disk of heads on public backbones, through `sifu train`, `forget` and `verify`.

    python benchmarks/backbones.py --data FOLDER --out rows.jsonl --tasks cifar10,cifar100 --seeds 3 \
        --setups "deep,deep lite1,deep lite2" --leavers 1
    python benchmarks/backbones.py --data FOLDER --out rows.jsonl --smoke    # minutes of CPU
    python benchmarks/backbones.py --data FOLDER --out rows.jsonl --tasks newsgroups,debian --model MODEL \
        --setups "last 64 tokens,deep 128 tokens"                            # texts, see benchmarks/texts/sets.py
    python benchmarks/backbones.py --table rows.jsonl [rows.jsonl ...]       # updates benchmarks/results/backbones.csv
                                                                             # and its figures in the documents

Every figure comes from the commands of the product, run one after the other as an operator would run them. A row is
appended as soon as it is measured, and rows that a file already has are skipped, so an interrupted run continues. The
image sets come from the paper's package (`pip install -e paper`). Texts are a column of a CSV file, read by a model of
Hugging Face in a folder (`--model`). With `--cache`, the features that training computed are read again by `evaluate`.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from backbones_page import RESULTS, read_rows, write_pages
from public_data import npz_sections
from texts.sets import text_table

CLIENTS = 100
PARTITIONS: dict[str, dict[str, Any]] = {
    "iid": {"partition": "iid"},
    "dirichlet 0.3": {"partition": "dirichlet", "alpha": 0.3},
    "dirichlet 0.1": {"partition": "dirichlet", "alpha": 0.1},
    "people": {},
}
KEY = ("task", "partition", "setup", "penalty", "leavers")
"""Columns that identify a line of the committed table."""
TEXTS = ("newsgroups", "debian")
SETUPS: dict[str, dict[str, Any]] = {
    "last": {"features": {"model": "efficientnet-lite0", "layers": "last"}},
    "deep": {"features": {"model": "efficientnet-lite0"}},
    "deep lite1": {"features": {"model": "efficientnet-lite1"}},
    "deep lite2": {"features": {"model": "efficientnet-lite2"}},
    "deep 4096": {"features": {"model": "efficientnet-lite0", "count": 4096}},
    "last 64 tokens": {"features": {"kind": "transformers", "layers": "last", "size": 64}},
    "deep 64 tokens": {"features": {"kind": "transformers", "layers": "deep", "size": 64}},
    "last 128 tokens": {"features": {"kind": "transformers", "layers": "last", "size": 128}},
    "deep 128 tokens": {"features": {"kind": "transformers", "layers": "deep", "size": 128}},
}


def fits(task: str, setup: str) -> bool:
    """Return whether a setup and a task have the same kind of samples: images or texts."""
    return (task in TEXTS) == (SETUPS[setup]["features"].get("kind") == "transformers")


def spec_of(job: dict[str, Any], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the spec of one run, and write the table of a text task to `folder`."""
    chosen, seed = SETUPS[job["setup"]], job["seed"]
    given = {"clients": CLIENTS, "samples_per_client": 100, **PARTITIONS[job["partition"]]}
    if options.smoke:
        given |= {"clients": 10, "samples_per_client": 10}
    is_text = job["task"] in TEXTS
    if is_text:
        table = text_table(job["task"], options.data, folder, given, seed)
        sections: dict[str, Any] = {"data": table, "model": {"kind": "ridge"}}
    else:
        people = given["samples_per_client"] if job["partition"] == "people" else 0
        sections = npz_sections(job["task"], options.data, folder, people)
        sections["data"] |= given
    spec = sections | {
        "seed": seed,
        "features": {"kind": "pretrained", "seed": seed, **chosen["features"]},
        "ridge": {"regularisation": job["penalty"]},
    }
    if is_text:
        spec["features"]["model"] = str(options.model)
    if options.cache is not None:
        spec["features"]["cache"] = str(options.cache)
    if options.smoke:
        spec["features"]["size"] = 8 if is_text else 64
    return spec


def as_toml(spec: dict[str, Any]) -> str:
    """Return a spec as TOML."""
    top = "".join(f"{name} = {json.dumps(value)}\n" for name, value in spec.items() if not isinstance(value, dict))
    tables = {name: value for name, value in spec.items() if isinstance(value, dict)}
    return top + "".join(
        f"\n[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
        for name, table in tables.items()
    )


def run_sifu(*arguments: str | Path) -> tuple[dict[str, Any], float]:
    """Run one command; return its JSON and its seconds of wall time.

    Raises:
        SystemExit: If the command fails.
    """
    started = time.perf_counter()
    words = [sys.executable, "-m", "sifu.cli.main", *map(str, arguments), "--format", "json"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"sifu {' '.join(map(str, arguments))} ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout), time.perf_counter() - started


def measure(job: dict[str, Any], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train, forget and verify one run; yield a row after training and after each request."""
    device = ["--device", options.device]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path, run = Path(folder) / "spec.toml", Path(folder) / "run"
        path.write_text(as_toml(spec_of(job, Path(folder), options)), encoding="utf-8")
        _, train_seconds = run_sifu("train", path, "--run", run, *device)
        yield row_of(run, 0, {"train_seconds": train_seconds})
        names = [client["name"] for client in run_sifu("status", run)[0]["clients"]]
        gone = 0
        for leavers in [count for count in map(int, filter(None, options.leavers.split(","))) if count < len(names)]:
            asked = ",".join(names[gone:leavers])
            gone = leavers
            done, seconds = run_sifu("forget", run, "--clients", asked, "--level", options.level, *device)
            verified, verify_seconds = run_sifu("verify", run)
            run_sifu("evaluate", run, "--on", "held-out", *device)  # a request itself measures no accuracy
            (outcome,) = done["outcomes"] if "outcomes" in done else done["requests"]
            figures = {"forget_seconds": seconds, "verify_seconds": verify_seconds, "level": outcome["level"]}
            yield row_of(run, leavers, figures | {"holds": verified["holds"]})


def row_of(run: Path, leavers: int, figures: dict[str, Any]) -> dict[str, Any]:
    """Return the run's status with these figures."""
    status, _ = run_sifu("status", run)
    held_out = status.get("held_out") or {}
    size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    return {"leavers": leavers, "accuracy": held_out.get("accuracy"), "megabytes": round(size / 1e6, 1)} | {
        name: round(value, 2) if isinstance(value, float) else value for name, value in figures.items()
    }


def place_of(device: str, commit: str) -> dict[str, str]:
    """Return the hardware, date and commit of a measurement; by default the commit of this checkout."""
    import torch

    gpu = torch.cuda.get_device_name() if device != "cpu" and torch.cuda.is_available() else platform.machine()
    if not commit:
        words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(words, capture_output=True, text=True).stdout.strip() or "unknown"
    return {"hardware": gpu, "date": time.strftime("%Y-%m-%d"), "commit": commit}


def write_table(files: list[Path]) -> None:
    """Write the means over seeds of all rows to the committed table, and the figures to the documents.

    Lines of the table without rows in these files are kept.
    """
    rows = [json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    kept: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        kept.setdefault(tuple(row[name] for name in KEY), []).append(row)
    names = ("train_seconds", "forget_seconds", "verify_seconds", "megabytes")
    lines = {tuple(row[name] for name in KEY): list(row.values()) for row in read_rows()}
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["task", "partition", "setup", "penalty", "leavers", "seeds", "accuracy", "lowest", "highest",
                         "level", *names, "hardware", "date", "commit"])  # fmt: skip
        for key, group in kept.items():
            accuracies = [100.0 * row["accuracy"] for row in group if row["accuracy"] is not None]
            figures = [[row[name] for row in group if row.get(name) is not None] for name in names]
            levels = {row.get("level") for row in group} - {None}
            lines[tuple(map(str, key))] = (
                [*key, len(group)]
                + ([f"{figure:.1f}" for figure in (mean(accuracies), min(accuracies), max(accuracies))]
                   if accuracies else ["", "", ""])
                + [" ".join(sorted(levels))]
                + [f"{mean(figure):.1f}" if figure else "" for figure in figures]
                + [group[0][name] for name in ("hardware", "date", "commit")]
            )  # fmt: skip
        writer.writerows(lines[key] for key in sorted(lines, key=lambda key: (*key[:-1], int(key[-1]))))
    write_pages()


def main() -> None:
    """Measure the tasks and setups of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with the files of the data sets")
    parser.add_argument("--out", type=Path, help="file of JSON lines that rows are appended to")
    parser.add_argument("--model", type=Path, help="folder of the model for texts")
    parser.add_argument("--cache", type=Path, help="folder for cached features; by default none are kept")
    parser.add_argument("--folder", type=Path, help="folder for run folders; by default the system's temporary folder")
    parser.add_argument("--tasks", default="cifar10")
    parser.add_argument("--partitions", default="dirichlet 0.3")
    parser.add_argument("--setups", default="last,deep")
    parser.add_argument("--penalties", default="0.01", help="values of ridge.regularisation, or auto")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--leavers", default="1,5,20", help="total number of leavers after each request; may be empty")
    parser.add_argument("--untimed", action="store_true", help="leave seconds out, because the machine is busy")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--level", default="conditional")
    parser.add_argument("--commit", default="", help="commit to record in the rows if the code has no repository")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run after this many seconds")
    parser.add_argument("--smoke", action="store_true", help="tiny runs of every setup; their figures mean nothing")
    parser.add_argument("--table", type=Path, nargs="+", help="files of JSON lines for the table")
    options = parser.parse_args()
    if options.table:
        write_table(options.table)
        return
    if options.data is None or options.out is None:
        parser.error("--data and --out are needed to measure")
    started, place = time.perf_counter(), place_of(options.device, options.commit)
    lines = options.out.read_text(encoding="utf-8").splitlines() if options.out.exists() else []
    there = {json.dumps(json.loads(line)["job"], sort_keys=True) for line in lines}
    setups = options.setups.split(",")
    for seed in range(options.seeds):
        for task in options.tasks.split(","):
            for partition in options.partitions.split(","):
                for setup in (name for name in setups if fits(task, name)):
                    for text in options.penalties.split(","):
                        penalty: Any = text if text == "auto" else float(text)
                        job = {"task": task, "partition": partition, "setup": setup, "penalty": penalty, "seed": seed}
                        if json.dumps(job, sort_keys=True) in there or time.perf_counter() - started > options.seconds:
                            continue
                        for measured in measure(job, options):
                            timed = {name for name in measured if name.endswith("_seconds")}
                            row = {name: measured[name] for name in measured if not (options.untimed and name in timed)}
                            line = json.dumps({"job": job, **job, **row, **place})
                            with options.out.open("a", encoding="utf-8") as file:
                                file.write(line + "\n")
                            print(line, flush=True)


if __name__ == "__main__":
    main()
