"""Trials of the experiment `groups`: tasks with their groups and requests, and their clients.

A trial is one task (data set, partition, participation, clients) with one seed. It trains once without groups and once
without the leavers, then with every number of groups and of separate rounds that it names.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from sifu import InputError, Spec
from sifu.run.clients_and_engine import clients_from_spec, held_out_from_spec
from sifu_paper.engines import ClientCache
from sifu_paper.plots.group_cases import USUAL_STRETCH
from sifu_paper.settings import Experiment, Scale, merged, run_spec
from sifu_paper.work import variant_text

TEST_CLIENT = "held-out"
"""Prefix of the names of clients that hold test images and never train."""
MOST_KEPT = 10
MERGES = ("mean", "aligned", "tree")
"""Merges: the mean; the mean of models with aligned units (`aligned_models`); pairwise merges with rounds between them
(`group_measurements`).
"""
PARTITIONS: dict[str, dict[str, Any]] = {
    "iid": {"partition": "iid"},
    "dirichlet-0.3": {"partition": "dirichlet", "alpha": 0.3},
    "dirichlet-0.1": {"partition": "dirichlet", "alpha": 0.1},
    "one-class": {"partition": "one_class"},
    "identity": {"partition": "identity"},
}
"""Data settings by the name of a partition in a trial."""


@dataclass(frozen=True)
class GroupTrial:
    """One task with one seed.

    `length` is the number of rounds of plain training and Scratch, and `every` the number of rounds between two
    evaluations on the test set. Each value of `groups` is tried as the number of groups, and each value of `rounds` as
    the number of separate rounds. Merges are scaled by the first of `stretches` (docs/theory.md, section 15.4), and
    after the first of `rounds` by each of them. `leavers` are the sizes of single requests. If `requests` is not 0, a
    sequence of that many single leavers follows, with the first value of each setting, once for each of `rebuild` (hit
    groups are rebuilt at once, or never). `model` names a network other than the data set's own. `merges` lists the
    merges of `MERGES` to try at a request: the mean, and others with the first value of each setting.
    """

    dataset: str
    seed: int
    partition: str
    participation: str
    clients: int
    groups: tuple[int, ...]
    rounds: tuple[int, ...]
    length: int
    every: int
    leavers: tuple[int, ...]
    requests: int
    rebuild: tuple[str, ...]
    stretches: tuple[float, ...]
    spec: Spec = field(compare=False, hash=False)
    model: str = ""
    merges: tuple[str, ...] = ("mean",)

    @property
    def name(self) -> str:
        """Name of the trial."""
        return f"{self.dataset} seed {self.seed} {self.task}"

    @property
    def task(self) -> str:
        """Task in the format of the table: partition, participation, number of clients, and the model if it is not the
        default.
        """
        own = {"partition": self.partition, "participation": self.participation, "clients": self.clients}
        return variant_text(own | ({"model": self.model} if self.model else {}))


def trials_of(
    experiment: Experiment, datasets: Sequence[str], seeds: Sequence[int], scale: Scale
) -> list[list[GroupTrial]]:
    """Return the trials of the experiment's file in its order: for each task, all seeds."""
    return [
        [_trial(experiment, dict(content), seed, scale) for seed in seeds]
        for content in experiment.trials
        if content["dataset"] in datasets
    ]


def _trial(experiment: Experiment, content: dict[str, Any], seed: int, scale: Scale) -> GroupTrial:
    dataset, partition = content.pop("dataset"), content.pop("partition")
    if partition not in PARTITIONS:
        raise InputError(f"the partition of a trial is one of {', '.join(PARTITIONS)}, found {partition!r}")
    clients, participation = content.pop("clients", 100), content.pop("participation", "all")
    over: Mapping[str, Any] = {
        "data": {**PARTITIONS[partition], "clients": clients},
        "server": {"participation": participation},
        "stop": {"target": 0.0, "min_rounds": 0, "max_rounds": 10_000},
    }
    if "model" in content:
        over = merged(over, {"model": {"kind": content["model"]}})
    if "samples" in content:
        over = merged(over, {"data": {"samples_per_client": content.pop("samples")}})
    spec, _ = run_spec(experiment, dataset, "ours", seed, scale, over)
    lists = {key: tuple(value) for key, value in content.items() if isinstance(value, list)}
    defaults = {"leavers": (1, 5), "requests": 0, "rebuild": ("now",), "stretches": (USUAL_STRETCH,), "every": 2}
    settings: dict[str, Any] = defaults | content | lists
    if unknown := set(settings.get("merges", ())) - set(MERGES):
        raise InputError(f"a trial merges by {', '.join(MERGES)}, found {min(unknown)!r}")
    return GroupTrial(dataset, seed, partition, participation, clients, spec=spec, **settings)


def grouping_key(seed: int) -> bytes:
    """Return the group key of an experiment, which here depends on the seed; a run draws it from the system."""
    return hashlib.sha256(f"groups of seed {seed}".encode()).digest()


class TrialClients(ClientCache):
    """Clients of a trial, followed by clients that hold the test images and never train."""

    def __init__(self, data_folder: Path | None) -> None:
        super().__init__(data_folder)
        self._load_lock = threading.Lock()

    def clients(self, spec: Spec, *, fresh_marks: bool = False) -> Any:
        """Return the training clients, followed by those with the test images, 100 each."""
        key = (spec.seed, spec.data, spec.model.dtype)
        with self._load_lock:
            if key not in self._kept:
                if len(self._kept) >= MOST_KEPT:
                    self._kept.pop(next(iter(self._kept)))
                self._kept[key] = self._made(spec)
            return self._kept[key]

    def _made(self, spec: Spec) -> tuple[Any, ...]:
        from sifu.data import ClientData

        dataset = _loaded(spec.data.name, str(self._folder or spec.data.folder or ""))
        held_out = held_out_from_spec(spec, dataset=dataset)
        if held_out is None:
            raise InputError(f"data set {spec.data.name!r} has no test images, which the experiment groups measures on")
        x, y = held_out
        share = spec.data.samples_per_client or 100
        parts = np.array_split(np.arange(len(y)), -(-len(y) // share))
        tests = [ClientData(f"{TEST_CLIENT}-{number}", x[part], y[part]) for number, part in enumerate(parts)]
        return (*clients_from_spec(spec, dataset=dataset), *tests)


@lru_cache(maxsize=2)
def _loaded(name: str, folder: str) -> Any:
    from sifu.data import load

    return load(name, folder or None)
