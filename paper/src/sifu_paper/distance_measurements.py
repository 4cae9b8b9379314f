"""Rows of `psi-alpha`: the distance of a training from the same training without a client, against Psi.

A task is one training with its hyper-parameters; its rows are measurements, and the last row marks it as done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sifu import RoundRejectedError, Spec
from sifu.core.engine import Engine
from sifu.core.round import keyed_generator
from sifu_paper.counterfactual import measure_distances
from sifu_paper.settings import Experiment, Scale, run_spec
from sifu_paper.work import combinations, variant_text


@dataclass(frozen=True)
class DistanceTask:
    """One training with and without some clients."""

    dataset: str
    seed: int
    variant: str
    spec: Spec = field(compare=False, hash=False)

    @property
    def name(self) -> str:
        """Name of the task."""
        return f"{self.dataset} seed {self.seed} {self.variant}"

    def place(self, experiment: Experiment, number: int) -> dict[str, Any]:
        """Return the columns that identify the row of a measurement."""
        return {
            "experiment": experiment.name,
            "dataset": self.dataset,
            "seed": self.seed,
            "preset": "",
            "method": "",
            "variant": self.variant,
            "request": number,
        }

    def last_place(self, experiment: Experiment) -> dict[str, Any]:
        """Return the columns that identify the last row."""
        distance = experiment.distance
        return self.place(experiment, -(-distance.rounds // distance.every) * distance.clients)


def distance_tasks(
    experiment: Experiment, datasets: Sequence[str], seeds: Sequence[int], scale: Scale
) -> tuple[list[DistanceTask], list[str]]:
    """Return every training of the experiment's grid, and notes on replaced settings."""
    tasks = []
    all_notes: dict[str, None] = {}
    for dataset in datasets:
        for seed in seeds:
            for variant in combinations(experiment.grid or {}):
                spec, notes = distance_spec(experiment, dataset, seed, scale, variant)
                all_notes |= dict.fromkeys(notes)
                tasks.append(DistanceTask(dataset, seed, variant_text(variant), spec))
    return tasks, list(all_notes)


def distance_spec(
    experiment: Experiment, dataset: str, seed: int, scale: Scale, variant: Mapping[str, Any]
) -> tuple[Spec, tuple[str, ...]]:
    """Return the spec of a training with varied hyper-parameters."""
    base, _ = run_spec(experiment, dataset, "paper", seed, scale)
    local: dict[str, Any] = {}
    if "rate_factor" in variant and base.local.rate != "auto":
        local["rate"] = base.local.rate * variant["rate_factor"]
    local |= {key: variant[key] for key in ("momentum", "steps") if key in variant}
    return run_spec(experiment, dataset, "paper", seed, scale, {"local": local})


def measure_task(
    task: DistanceTask, engine: Engine, experiment: Experiment, add: Callable[[dict[str, Any]], None]
) -> str:
    """Measure and `add` row after row; return the result in words."""
    wanted = experiment.distance
    everyone = np.arange(len(engine.clients))
    chosen = keyed_generator(task.seed, "taken out").choice(everyone, size=wanted.clients, replace=False)
    started, number = time.monotonic(), 0
    try:
        for model, measured in measure_distances(engine, sorted(chosen), wanted.rounds, wanted.every):  # type: ignore[arg-type]
            accuracy = engine.evaluate(model, everyone).accuracy
            for row in measured:
                number += 1
                add(
                    task.place(experiment, number)
                    | {
                        "client": row.client,
                        "round": row.round,
                        "distance": row.distance,
                        "psi_round": row.psi_round,
                        "psi_population": row.psi_population,
                        "accuracy": accuracy,
                        "seconds": round(time.monotonic() - started, 3),
                    }
                )
        return f"{number} measurements"
    except RoundRejectedError:
        # Diverging hyper-parameters are part of the question; nothing more can be measured.
        add(task.last_place(experiment))
        return f"diverged after {number // max(wanted.clients, 1) * wanted.every} rounds"
