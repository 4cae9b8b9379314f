"""Experiment `metrics`: one federation and one request, executed repeatedly with different randomness.

Every seed trains the same clients and forgets the same ones. A run leaves a row, and a small file with the margins of
its model on single samples. When all runs are done, a row for each method gives the distance of its models from those
of Scratch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sifu import Outcome, Run, Spec, open_run, train
from sifu.audit.membership import lira, relearn_rounds
from sifu.core.engine import Engine
from sifu.core.round import keyed_generator
from sifu.engines.sim.embedded_heads import ClosedFormFederation
from sifu.engines.sim.scorers import HeadScorer, Samples, Scorer, stacked
from sifu.run.clients_and_engine import clients_from_spec, engine_from_spec, held_out_from_spec
from sifu.theory.arrays import Floats
from sifu_paper.distance_to_scratch import forgetting_epsilons, forgetting_quality, klom
from sifu_paper.requests import choose_requests
from sifu_paper.settings import Experiment, Scale, run_spec
from sifu_paper.table import Row, Table
from sifu_paper.trajectory import accuracy_on_training_rows, copy_run, current_model

NOT_FORGOTTEN = "not_forgotten"
"""Negative control: the model before the request."""
REFERENCE = "reference"
"""Other runs of Scratch, with separate seeds, that every method is compared with."""
FAR = 1_000_000
"""Offset of the seeds of reference runs."""
MOST_SAMPLES = 200
RELEARN_LIMIT = 60
FEWEST_MODELS = 4
"""With fewer models the attack's distributions cannot be fitted."""
KINDS = ("forgotten", "remaining", "test")


@dataclass(frozen=True)
class MetricTask:
    """Task of all methods with one seed."""

    seed: int
    spec: Spec = field(compare=False, hash=False)

    @property
    def name(self) -> str:
        """Name of the task."""
        return f"{self.spec.data.name} seed {self.seed}"


class MetricRuns:
    """Runs of one data set, and their evaluation."""

    def __init__(
        self, experiment: Experiment, dataset: str, scale: Scale, methods: Sequence[str], out: Path, data: Path | None
    ) -> None:
        self.experiment, self.dataset, self.scale, self.methods = experiment, dataset, scale, tuple(methods)
        self.out, self._data = out, data

    def spec(self, method: str, seed: int) -> Spec:
        """Return the spec of a method's run; the federation is that of seed 0, whatever the seed."""
        own = (self.experiment.method_spec or {}).get(method, {})
        return run_spec(self.experiment, self.dataset, "ours", seed, self.scale, own)[0]

    def task(self, seed: int) -> MetricTask:
        """Return the task of a seed."""
        return MetricTask(seed, self.spec("scratch", seed))

    @cached_property
    def clients(self) -> tuple[Any, ...]:
        """Data of all clients."""
        return clients_from_spec(self.spec("scratch", 0), self._data)

    @cached_property
    def forgotten(self) -> list[str]:
        """Clients that ask to be forgotten."""
        return choose_requests(self.clients, self.spec("scratch", 0), self.experiment.requests)[0]

    @cached_property
    def samples(self) -> dict[str, Samples]:
        """Samples of the forgotten clients, of the remaining ones, and of no client."""
        gone = set(self.forgotten)
        inside = [k for k, client in enumerate(self.clients) if client.name in gone]
        outside = [k for k, client in enumerate(self.clients) if client.name not in gone]
        held_out = held_out_from_spec(self.spec("scratch", 0), self._data)
        samples = {"forgotten": stacked(self.clients, inside), "remaining": stacked(self.clients, outside)}
        if held_out is not None:
            samples["test"] = Samples(*held_out)
        return {kind: _some(kind, probe) for kind, probe in samples.items()}

    # -- one seed ----------------------------------------------------------------------------------------

    def measure(self, seed: int, table: Table) -> None:
        """Measure every method's run of a seed that the table does not have yet."""
        folder = self.out / "runs" / f"{self.dataset}-{seed}"
        for kind, methods in self._by_training().items():
            missing = [method for method in methods if not table.has(self.place(method, seed))]
            if not missing:
                continue
            engine, spec = engine_from_spec(self.spec(kind, seed), self.clients)
            trained = train(spec, run=folder / kind, engine=engine)
            for method in missing:
                self._execute(method, seed, trained, engine, folder, table)
        if not table.has(self.place(REFERENCE, seed)):
            self._reference(seed, folder, table)

    def _by_training(self) -> dict[str, list[str]]:
        """Return the methods by the training they start from; a method with its own spec has its own training."""
        own = self.experiment.method_spec or {}
        kinds: dict[str, list[str]] = {}
        for method in self.methods:
            kinds.setdefault(method if method in own else "scratch", []).append(method)
        if "scratch" in kinds:
            kinds["scratch"].insert(0, NOT_FORGOTTEN)
        return kinds

    def _execute(self, method: str, seed: int, trained: Run, engine: Engine, folder: Path, table: Table) -> None:
        indices = self._indices(self.forgotten)
        before = engine.evaluate(current_model(trained), indices)
        if method == NOT_FORGOTTEN:
            self._record(method, seed, engine, current_model(trained), {"rounds": 0, "seconds": 0.0}, before, table)
            return
        copy = folder / f"{method}-answer"
        copy_run(trained.folder, copy)
        run = open_run(copy, engine=engine)
        started = time.monotonic()
        outcome = run.forget(self.forgotten, "request-1", method=method, level="none")[-1]
        cost = {"seconds": round(time.monotonic() - started, 3)} | _cost(run, outcome)
        self._record(method, seed, engine, current_model(run), cost, before, table)

    def _reference(self, seed: int, folder: Path, table: Table) -> None:
        """Run the reference: Scratch with another seed, and the head of the remaining clients."""
        engine, spec = engine_from_spec(self.spec("scratch", FAR + seed), self.clients)
        trained = train(spec, run=folder / REFERENCE, engine=engine)
        started = time.monotonic()
        outcome = trained.forget(self.forgotten, "request-1", method="scratch", level="none")[-1]
        cost = {"seconds": round(time.monotonic() - started, 3)} | _cost(trained, outcome)
        self._record(REFERENCE, seed, engine, current_model(trained), cost, None, table)
        if "closed_form" in self.methods:
            staying = tuple(client for client in self.clients if client.name not in set(self.forgotten))
            head, head_spec = engine_from_spec(self.spec("closed_form", FAR + seed), staying)
            alone = train(head_spec, run=folder / "reference-head", engine=head)
            self._save("reference-head", seed, self._margins(head, current_model(alone)))

    def _record(
        self, method: str, seed: int, engine: Engine, model: Floats, cost: Mapping[str, Any], before: Any, table: Table
    ) -> None:
        self._save(method, seed, self._margins(engine, model))
        scorer = _scorer(engine)
        accuracy = {kind: scorer.accuracy(model, probe) for kind, probe in self.samples.items()}
        relearn = None
        if before is not None and not isinstance(engine, ClosedFormFederation):
            everyone = np.arange(len(self.clients))
            goal = (before.accuracy, before.loss)
            relearn = relearn_rounds(engine, model, goal, self._indices(self.forgotten), everyone, seed, RELEARN_LIMIT)
        table.add(
            self.place(method, seed)
            | {
                "accuracy_retain_after": accuracy["remaining"],
                "accuracy_test": accuracy.get("test"),
                "accuracy_forgotten_after": accuracy["forgotten"],
                "relearn_rounds": relearn,
            }
            | dict(cost)
        )

    def _indices(self, names: Sequence[str]) -> np.ndarray:
        index_of = {client.name: index for index, client in enumerate(self.clients)}
        return np.array(sorted(index_of[name] for name in names), dtype=np.int64)

    def _margins(self, engine: Engine, model: Floats) -> dict[str, Floats]:
        scorer = _scorer(engine)
        return {kind: scorer.confidences(model, probe) for kind, probe in self.samples.items()}

    # -- all seeds ---------------------------------------------------------------------------------------

    def aggregate(self, seeds: Sequence[int], table: Table) -> None:
        """Add a row for each method over all seeds, compared with the reference of the same kind of model."""
        for method in (NOT_FORGOTTEN, *self.methods):
            against = "reference-head" if method == "closed_form" else REFERENCE
            table.add(
                self.place(method, 0)
                | {"variant": f"models={len(seeds)}", "request": 0, "models": len(seeds)}
                | distances(self._load(method, seeds), self._load(against, seeds))
            )

    def place(self, method: str, seed: int) -> Row:
        """Return the columns that identify a row."""
        return {
            "experiment": self.experiment.name,
            "dataset": self.dataset,
            "seed": seed,
            "preset": "ours",
            "method": method,
            "variant": "",
            "request": 1,
        }

    def _path(self, method: str, seed: int) -> Path:
        return self.out / "margins" / f"{self.dataset}-{method}-{seed}.npz"

    def _save(self, method: str, seed: int, margins: Mapping[str, Floats]) -> None:
        path = self._path(method, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, **dict(margins))  # type: ignore[arg-type]

    def _load(self, method: str, seeds: Sequence[int]) -> dict[str, Floats]:
        files = [np.load(self._path(method, seed)) for seed in seeds]
        return {kind: np.stack([file[kind] for file in files]) for kind in files[0].files}


def distances(unlearned: Mapping[str, Floats], retrained: Mapping[str, Floats]) -> Row:
    """Return KLoM on each kind of samples, and epsilon, forgetting quality and the attack on the forgotten samples.

    The attack (U-LiRA: Hayes et al. 2024) distinguishes a method's models from Scratch's sample by sample;
    distributions are fitted on half of the models, and rates are counted on the other half.
    """
    divergences = {kind: klom(unlearned[kind], retrained[kind]) for kind in unlearned}
    epsilons = forgetting_epsilons(unlearned["forgotten"], retrained["forgotten"])
    scores = (unlearned["forgotten"], retrained["forgotten"])
    rates = lira(scores, [])[0] if len(scores[0]) >= FEWEST_MODELS else None
    return {
        **{f"klom_{kind}": float(np.median(values)) for kind, values in divergences.items()},
        "klom_forgotten_95": float(np.quantile(divergences["forgotten"], 0.95)),
        "epsilon_median": float(np.median(epsilons)),
        "separable": float(np.mean(np.isinf(epsilons))),
        "forgetting_quality": forgetting_quality(epsilons),
        "tpr_at_1": None if rates is None else rates.at_1_percent,
    }


def _some(kind: str, samples: Samples) -> Samples:
    """Return at most `MOST_SAMPLES` samples, the same for all models."""
    if samples.count <= MOST_SAMPLES:
        return samples
    rows = np.sort(keyed_generator(0, f"metrics {kind}").permutation(samples.count)[:MOST_SAMPLES])
    return Samples(np.asarray(samples.x)[rows], np.asarray(samples.y)[rows])


def _scorer(engine: Engine) -> Scorer:
    if isinstance(engine, ClosedFormFederation):
        return HeadScorer(engine)
    return Scorer(engine.model, engine.layout.dtype)  # type: ignore[attr-defined]


def _cost(run: Run, outcome: Outcome) -> dict[str, Any]:
    return {
        "rounds": outcome.cost.rounds,
        "reached": outcome.target <= 0 or (accuracy_on_training_rows(run, outcome) or 0.0) >= outcome.target,
        "level": outcome.level,
        "bytes_sent": outcome.cost.bytes_sent,
        "bytes_kept": outcome.cost.bytes_kept,
    }
