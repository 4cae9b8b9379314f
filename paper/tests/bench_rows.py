"""Invented tables in the format of experiments, for tests of figures and statements without training."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from sifu_paper.provenance import record
from sifu_paper.settings import load_experiment, shared_settings
from sifu_paper.table import COLUMNS_OF, REQUEST_COLUMNS, Table

SHARES = {
    ("scratch", "paper"): 1.0,
    ("noisy_scratch", "paper"): 0.62,
    ("sifu", "paper"): 0.46,
    ("sifu", "ours"): 0.93,
    ("fed_eraser", "paper"): 1.13,
    ("fed_accum", "paper"): 0.3,
    ("fine_tuning", "paper"): 0.12,
    ("last", "paper"): 1.5,
    ("last", "ours"): 2.0,
    ("dp", "paper"): 1.8,
}
"""Plausible ratios of rounds to Scratch's."""
TRAINING_ROUNDS = {"mnist": 220, "fashion_mnist": 600, "cifar10": 900, "cifar100": 1500, "celeba": 300, "digits": 40}
REMEMBERS = {"fine_tuning": 0.75, "fed_accum": 0.6, "dp": 0.5}


def request_row(place: dict[str, Any], rounds: int, generator: np.random.Generator, **more: Any) -> dict[str, Any]:
    """Return a row of a request with every column that a figure reads."""
    method, dataset = place["method"], place["dataset"]
    missed = method in ("last", "dp") and dataset in ("cifar10", "cifar100")
    forgotten = REMEMBERS.get(method, 0.12) + 0.05 * float(generator.random())
    target = shared_settings().dataset(dataset).spec["stop"]["target"]
    return {
        "clients": 10,
        "rounds": rounds,
        "extra_rounds": 20 if method == "fed_eraser" else 0,
        "reached": not missed,
        "training_rounds": TRAINING_ROUNDS[dataset],
        "target": target,
        "accuracy_retain_before": target,
        "accuracy_retain_after": target - (0.2 if missed else -0.01),
        "accuracy_forget_before": 0.9,
        "accuracy_forget_after": forgotten,
        "accuracy_forgotten_after": forgotten,
        "sigma": 0.1,
        "epsilon": 10.0,
        "delta": 0.01,
        "level": "none" if place["preset"] == "paper" else "conditional",
        "local_steps": rounds * 50,
        "bytes_sent": rounds * 10_000_000,
        "bytes_kept": {"sifu": 40_000_000, "fed_eraser": 900_000_000, "fed_accum": 900_000_000}.get(method, 500_000),
        "seconds": 12.5,
        **place,
        **more,
    }


def _place(name: str, dataset: str, seed: int, preset: str, method: str, variant: str, request: int) -> dict[str, Any]:
    keys = ("experiment", "dataset", "seed", "preset", "method", "variant", "request")
    return dict(zip(keys, (name, dataset, seed, preset, method, variant, request), strict=True))


def made_up_rows(name: str, seeds: int = 3) -> list[dict[str, Any]]:
    """Return the table of an experiment, with results like the paper's."""
    experiment = load_experiment(name)
    rows: list[dict[str, Any]] = []
    for dataset, seed in itertools.product(experiment.datasets, range(1, seeds + 1)):
        generator = np.random.default_rng([seed, len(dataset)])
        if experiment.kind == "distance":
            rows += _distances(name, dataset, seed, generator)
        elif name == "scale":
            rows += _scale(seed, generator)
        elif name == "groups":
            rows += _groups(dataset, seed, generator)
        elif name == "metrics":
            rows += _metrics(dataset, seed, seeds)
        else:
            rows += _requests(name, dataset, seed, generator)
    return rows


def _requests(name: str, dataset: str, seed: int, generator: np.random.Generator) -> list[dict[str, Any]]:
    experiment = load_experiment(name)
    base, rows = TRAINING_ROUNDS[dataset], []
    for (method, preset), share in SHARES.items():
        if method not in experiment.methods:
            continue
        variants = {"": share}
        if experiment.draw == "time_limited":
            variants = {f"limit={limit:g}": limit for limit in (0.25, 0.33, 0.5)}
            variants |= {"": 1.0} if method == "scratch" else {}
        if experiment.draw == "sigma" and method == "sifu":
            variants = {
                f"sigma_factor={f:g}": 1.0 if f < 0.1 else share * (1 + abs(np.log10(f)))
                for f in (0.01, 0.1, 0.3, 1, 3, 10)
            }
        if experiment.draw == "request_sets":
            variants = {f"set={k}": share for k in range(10)}
        for variant, part in variants.items():
            for request in range(1, experiment.requests.count + 1):
                rounds = max(2, int(base * part * generator.uniform(0.85, 1.15)))
                more: dict[str, Any] = {}
                if experiment.draw == "watermark":
                    kept = 0.2 if method in REMEMBERS else 0.01
                    more = {"mark_before": 0.25, "mark_after": kept + 0.02 * generator.standard_normal()}
                if experiment.draw == "time_limited" and variant:
                    more = {"accuracy_retain_after": 0.9 - 0.2 * (1 - part) * share}
                place = _place(name, dataset, seed, preset, method, variant, request)
                rows.append(request_row(place, rounds * (20 if method == "dp" else 1), generator, **more))
    return rows


def _metrics(dataset: str, seed: int, seeds: int) -> list[dict[str, Any]]:
    """Return a row for each method, and with the last seed its row over all runs; Fine-Tuning forgets half."""
    rows = []
    for number, method in enumerate(("not_forgotten", "fine_tuning", "sifu", "groups", "closed_form", "scratch")):
        measured = {
            "rounds": 0 if method in ("not_forgotten", "closed_form") else 10 * number,
            "reached": True,
            "level": {"fine_tuning": "none", "not_forgotten": ""}.get(method, "exact"),
            "accuracy_retain_after": 0.9,
            "accuracy_test": 0.88 - 0.01 * (method == "groups"),
            "accuracy_forgotten_after": {"not_forgotten": 0.9, "fine_tuning": 0.7}.get(method, 0.5),
            "relearn_rounds": None if method == "closed_form" else number,
            "bytes_sent": 1000 * number,
            "seconds": 0.1 * number,
        }
        rows.append(_place("metrics", dataset, seed, "ours", method, "", 1) | measured)
        if seed == seeds:
            far = max(0.0, 4.0 - 2 * number)
            rows.append(
                _place("metrics", dataset, 0, "ours", method, f"models={seeds}", 0)
                | {"models": seeds, "klom_forgotten": far, "klom_forgotten_95": 2 * far, "klom_remaining": far / 2}
                | {
                    "klom_test": far / 2,
                    "epsilon_median": far,
                    "separable": far / 4,
                    "forgetting_quality": 1 / (1 + far),
                }
                | {"tpr_at_1": 0.01 + far / 5}
            )
    return rows


def _groups(dataset: str, seed: int, generator: np.random.Generator) -> list[dict[str, Any]]:
    """Return two tasks: one leaver takes a fifth of Scratch's 100 rounds, five leavers a quarter,
    one in a sequence 15.
    """
    rows = []

    def add(method: str, task: str, setting: str, leavers: int, request: int, **measured: Any) -> None:
        variant = " ".join(part for part in (task, setting, f"leavers={leavers}") if part)
        place = _place("groups", dataset, seed, "", method, variant, request)
        rows.append({**place, "leavers": leavers, "length": 120, "seconds": 1.0, **measured})

    for partition in ("iid", "dirichlet-0.3"):
        task = f"partition={partition} participation=all clients=100"
        groups = "groups=10 apart=80 stretch=1.25"
        add("plain", task, "", 0, 0, accuracy=0.8, rounds=120)
        add("groups", task, groups, 0, 0, accuracy=0.795, rounds=120, groups_left=10, bytes_kept=1_000_000)
        for leavers, rounds in ((1, 20), (5, 25)):
            add("scratch", task, "", leavers, 0, rounds=100, reached=True, target=0.79)
            wanted = rounds + int(generator.integers(0, 3))
            add("groups", task, groups, leavers, 1, rounds=wanted, reached=True, target=0.79, groups_left=6)
        for request in (1, 2):
            add(
                "groups", task, f"{groups} rebuild=now", 1, request, rounds=15, reached=True, client_rounds=1500.0,
                rebuild_client_rounds=800.0, scratch_client_rounds=10_000.0, scratch_rounds=100.0, groups_left=9,
            )  # fmt: skip
    return rows


def _scale(seed: int, generator: np.random.Generator) -> list[dict[str, Any]]:
    rows = []
    for clients, shape in itertools.product((50, 200, 500, 1000, 2000, 3000, 6000), ("10", "1x10")):
        count = 10 if "x" in shape else 1
        for request in range(1, count + 1):
            place = _place("scale", "mnist", seed, "ours", "scratch", f"clients={clients} requests={shape}", request)
            rows.append(request_row(place, 116, generator, level="exact"))
            for epsilon, scale in itertools.product((1.0, 5.0, 10.0), ("auto", "0.7", "1", "1.4")):
                gain = max(1.0, clients / 1000 * epsilon * (0.7 if scale != "1" else 1.4) * (2.0 if count > 1 else 1.0))
                variant = f"clients={clients} requests={shape} epsilon={epsilon:g} sigma_scale={scale}"
                rounds = max(2, int(116 / min(gain, 40) * generator.uniform(0.9, 1.1)))
                place = _place("scale", "mnist", seed, "ours", "sifu", variant, request)
                rows.append(request_row(place, rounds, generator, level="proven"))
    return rows


def _distances(name: str, dataset: str, seed: int, generator: np.random.Generator) -> list[dict[str, Any]]:
    rows = []
    for number in range(60):
        distance = float(10 ** generator.uniform(-3, 0.5))
        place = _place(name, dataset, seed, "", "", f"rate_factor={1 + number % 3}", number + 1)
        bounds = {
            "psi_round": distance * generator.uniform(1.5, 30),
            "psi_population": distance * generator.uniform(0.3, 3),
        }
        rows.append(
            {**place, "client": 3, "round": number, "distance": distance, "accuracy": 0.8, "seconds": 1.0, **bounds}
        )
    return rows


def write_results(name: str, folder: Path, rows: list[dict[str, Any]] | None = None) -> Path:
    """Write a results folder in the format of `sifu-bench run`."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"experiment": name, "scale": "paper", "max_rounds": None}
    origin = {
        "date": "2026-01-02 03:04 UTC",
        "command": f"sifu-bench run {name}",
        "commit": "0123456789",
        "hardware": "a computer",
        "versions": {"sifu": "0"},
    }
    record(folder, settings, origin)
    columns = COLUMNS_OF.get(load_experiment(name).kind, REQUEST_COLUMNS)
    table = Table(folder / "results.csv", columns)
    for row in made_up_rows(name) if rows is None else rows:
        table.add(row)
    return folder
