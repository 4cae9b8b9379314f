"""Execution of one task through the public API, with a measurement of the result.

A trajectory's run folder is a copy of its training run. Each request has its own id and its row is written before the
next one starts, so an interrupted trajectory can be continued: the run finishes an unfinished request, and a small file
next to the run keeps what had to be measured beforehand.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sifu import Outcome, RoundRejectedError, Run, open_run, train
from sifu.core.engine import Engine
from sifu.run.training import ProgressCallback
from sifu.store.files import write_atomically
from sifu_paper.costs import request_cost, training_cost
from sifu_paper.held_out import HeldOut
from sifu_paper.table import Row, Table
from sifu_paper.work import Training, Trajectory

BEFOREHAND = "bench.json"
DIVERGED = "diverged"
"""Level of rows whose training ended in NaN or Inf: they have no model and so no accuracy."""
TRAINING = "training"
"""Method of the rows with the cost of training."""

MarkCheck = Callable[[np.ndarray, np.ndarray], float]
"""(model, clients) -> accuracy on the clients' data with fresh marks instead of their own."""


def train_run(training: Training, folder: Path, engine: Engine, progress: ProgressCallback, data: Path | None) -> Run:
    """Make the training run, or continue it."""
    return train(training.spec, run=folder, engine=engine, progress=progress, data_folder=data)


def training_place(training: Training, experiment: str) -> dict[str, Any]:
    """Return the columns that identify the row with the cost of training: request 0 of the method `training`."""
    return {
        "experiment": experiment,
        "dataset": training.dataset,
        "seed": training.seed,
        "preset": training.preset,
        "method": TRAINING,
        "variant": " ".join(part for part in (f"kind={training.kind}", training.variant) if part),
        "request": 0,
    }


def training_row(
    training: Training, run: Run, experiment: str, seconds: float, held_out: HeldOut, device: str = "cpu"
) -> Row:
    """Return the row with the cost of training."""
    with run.reader() as reader:
        rounds = reader.path()[-1].position
        accuracy = next(
            (evaluation.accuracy for evaluation in reader.evaluations() if evaluation.node == reader.tip), None
        )
        cost = training_cost(reader)
    target = training.spec.stop.target
    return training_place(training, experiment) | {
        "clients": 0,
        "rounds": rounds,
        "extra_rounds": 0,
        "reached": _reaches(accuracy, target),
        "training_rounds": rounds,
        "target": target,
        "accuracy_retain_after": accuracy,
        "accuracy_test": held_out.accuracy(training.spec, current_model(run)),
        "seconds": round(seconds, 3),
        "device": device,
        **cost,
    }


def copy_run(source: Path, target: Path) -> None:
    """Copy a run folder, whole or not at all.

    Models and statistics are linked if possible: a run never changes such a file in place, but writes new ones and
    removes the names of old ones, also in an erasure. A request on the copy removes only the copy's name.
    """
    temporary = target.with_name(f".copying-{target.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(source, temporary, copy_function=_link_or_copy)
    os.replace(temporary, target)


def _link_or_copy(source: str, target: str) -> None:
    if source.endswith((".safetensors", ".statistics")):
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)
    else:
        shutil.copy2(source, target)


class TrajectoryRun:
    """A trajectory on its own copy of the training run."""

    def __init__(
        self,
        trajectory: Trajectory,
        folder: Path,
        source: Path,
        engine: Engine,
        table: Table,
        experiment: str,
        progress: ProgressCallback,
        held_out: HeldOut,
        fresh_marks: MarkCheck | None = None,
        device: str = "cpu",
    ) -> None:
        self.trajectory, self.folder, self.source = trajectory, folder, source
        self.engine, self.table, self.experiment = engine, table, experiment
        self.progress, self.held_out, self.fresh_marks = progress, held_out, fresh_marks
        self.device = device

    def execute(self, requests: Sequence[Sequence[str]]) -> None:
        """Execute the requests whose rows are missing, one after another."""
        if not self.folder.exists():
            copy_run(self.source, self.folder)
        run = open_run(self.folder, engine=self.engine)
        training_rounds = _training_rounds(run)
        gone: list[str] = []
        for number, clients in enumerate(requests, start=1):
            gone += clients
            place = self.trajectory.place(self.experiment, number)
            if self.table.has(place):
                continue
            beforehand = self._look_beforehand(run, number, clients)
            started = time.monotonic()
            try:
                outcome = run.forget(
                    clients,
                    f"request-{number}",
                    level="none",
                    progress=self.progress,
                    **self.trajectory.terms,
                    **self._limit(training_rounds),
                )[-1]
            except RoundRejectedError:
                self._record_divergence(number, len(requests), training_rounds, beforehand)
                return
            finally:
                beforehand["seconds"] = round(beforehand["seconds"] + time.monotonic() - started, 3)
                self._remember(number, beforehand)
            self.table.add(place | self._measure(run, outcome, gone, training_rounds) | beforehand)

    def _record_divergence(self, first: int, last: int, training_rounds: int, beforehand: Mapping[str, Any]) -> None:
        """Record that training ended in NaN or Inf (noise too large): this and later requests never reach the target.

        They count with the largest number of rounds, as in the paper for methods that miss the target.
        """
        stop = self.trajectory.spec.stop
        for number in range(first, last + 1):
            self.table.add(
                self.trajectory.place(self.experiment, number)
                | {
                    "clients": self.trajectory.requests.clients,
                    "rounds": self._limit(training_rounds).get("max_rounds", stop.max_rounds),
                    "extra_rounds": 0,
                    "reached": False,
                    "training_rounds": training_rounds,
                    "target": stop.target,
                    "level": DIVERGED,
                    "device": self.device,
                }
                | (dict(beforehand) if number == first else {})
            )

    def _limit(self, training_rounds: int) -> dict[str, Any]:
        limit = self.trajectory.limit
        return {} if limit is None else {"max_rounds": max(1, round(limit * training_rounds))}

    # -- measurements --------------------------------------------------------------------------------------------------

    def _look_beforehand(self, run: Run, number: int, clients: Sequence[str]) -> dict[str, Any]:
        """Measure what cannot be measured after the request, and store it in case of an interruption."""
        path = self.folder / BEFOREHAND
        recorded: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        if str(number) in recorded:
            return dict(recorded[str(number)])
        mark = self._mark(run, clients) if self.fresh_marks else None
        beforehand = {"mark_before": mark, "seconds": 0.0}
        self._remember(number, beforehand)
        return beforehand

    def _remember(self, number: int, beforehand: Mapping[str, Any]) -> None:
        path = self.folder / BEFOREHAND
        recorded = json.loads(path.read_text()) if path.exists() else {}
        write_atomically(path, json.dumps(recorded | {str(number): dict(beforehand)}).encode())

    def _mark(self, run: Run, clients: Sequence[str]) -> float:
        """Return the accuracy with the clients' own marks minus the accuracy on the same images with fresh marks."""
        model, indices = current_model(run), _indices(run, clients)
        assert self.fresh_marks is not None
        return self.engine.evaluate(model, indices).accuracy - self.fresh_marks(model, indices)

    def _measure(self, run: Run, outcome: Outcome, gone: Sequence[str], training_rounds: int) -> Row:
        with run.reader() as reader:
            before = {
                evaluation.subset: evaluation.accuracy
                for evaluation in reader.evaluations()
                if evaluation.subset.startswith("remaining:")
            }
        everyone = self.engine.evaluate(current_model(run), _indices(run, gone)).accuracy
        accuracy = accuracy_on_training_rows(run, outcome)
        return {
            "clients": len(outcome.clients),
            "reached": _reaches(accuracy, outcome.target),
            "training_rounds": training_rounds,
            "target": outcome.target,
            "accuracy_retain_before": before.get(f"remaining:{outcome.request}"),
            "accuracy_retain_after": accuracy,
            "accuracy_forget_before": outcome.accuracy_forgotten_before,
            "accuracy_forget_after": outcome.accuracy_forgotten_after,
            "accuracy_forgotten_after": everyone,
            "accuracy_test": self.held_out.accuracy(self.trajectory.spec, current_model(run)),
            "mark_after": self._mark(run, outcome.clients) if self.fresh_marks else None,
            "psi": outcome.psi,
            "psi_star": outcome.psi_star,
            "sigma": outcome.sigma,
            "epsilon": outcome.epsilon,
            "delta": outcome.delta,
            "delta_at_most": outcome.delta_at_most,
            "node": outcome.rollback_to,
            "level": outcome.level,
            "device": self.device,
            **request_cost(outcome),
        }


def accuracy_on_training_rows(run: Run, outcome: Outcome) -> float | None:
    """Return the accuracy after the last request; requests on closed-form heads do not measure it themselves."""
    return outcome.accuracy if outcome.accuracy is not None else run.evaluate("training").accuracy


def _reaches(accuracy: float | None, target: float) -> bool:
    """Return whether an accuracy reaches the target; without a target, every accuracy does."""
    return target <= 0 or bool(accuracy is not None and accuracy >= target)


def _training_rounds(run: Run) -> int:
    with run.reader() as reader:
        return max((node.position for node in reader.nodes() if node.branch == 0), default=0)


def current_model(run: Run) -> np.ndarray:
    """Return the current model of a run."""
    with run.reader() as reader:
        return reader.load_model(reader.tip)


def _indices(run: Run, names: Sequence[str]) -> np.ndarray:
    with run.reader() as reader:
        index_of = {client.name: index for index, client in enumerate(reader.clients())}
    return np.array([index_of[name] for name in names], dtype=np.int64)
