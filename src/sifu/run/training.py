"""Recorded training in rounds until a stop rule holds.

Every round's scalars are recorded. The model before a round is kept if a client's Psi crosses a level in that round.
Several rounds are committed at once. Every random choice of a round is keyed by its position, so rounds lost in a crash
are repeated bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sifu.core.engine import Engine, Evaluation, Position, evaluate_present
from sifu.core.layout import Vector
from sifu.core.request_terms import Terms
from sifu.core.round_stream import (
    RoundsWanted,
    StreamedRound,
    is_evaluated,
    is_lost,
    should_stop,
    stop_without,
    stream_rounds,
)
from sifu.core.spec import Spec
from sifu.errors import RunDamagedError
from sifu.run.psi_of_everyone import remember_psi, track_everyone
from sifu.run.run_view import ACTIVE, RunView, evaluation_row
from sifu.store.files import uninterrupted
from sifu.store.history_tables import ParticipationRows
from sifu.store.projection import EvaluationRow, NewEvent, NewModel, NewRows
from sifu.store.release_files import released_model
from sifu.store.writer import RunWriter
from sifu.theory.arrays import Floats
from sifu.theory.automatic_noise import HIGHEST_SIGMA, LADDER_RATIO, LOWEST_SIGMA
from sifu.theory.calibration import hidden_sensitivity
from sifu.theory.history import PathNode
from sifu.theory.participation import ClientIndices
from sifu.theory.regularity import RoundRegularity
from sifu.theory.rollback import crosses_a_level, level_ladder, thin

LARGEST_PSI = 1e300
"""Stand-in for an infinite Psi, which JSON cannot represent."""


@dataclass(frozen=True)
class Progress:
    """State of a progress bar."""

    phase: str
    rounds: int
    accuracy: float
    target: float
    max_rounds: int
    unit: str = "round"
    """Unit of `rounds`: rounds, or clients that send their statistics."""


ProgressCallback = Callable[[Progress], None]


COMMIT_SECONDS = 0.5
COMMIT_ROUNDS = 256


def levels_to_keep(spec: Spec) -> Floats:
    """Return the levels of Psi at which models are kept: one if sigma is fixed, a ladder if it is `auto`."""
    privacy = spec.privacy
    terms = Terms(("any",), privacy.epsilon, privacy.delta)
    if privacy.sigma != "auto":
        return np.array([hidden_sensitivity(privacy.sigma, terms.multiplier)])
    return level_ladder(LOWEST_SIGMA / terms.multiplier, HIGHEST_SIGMA / terms.multiplier, LADDER_RATIO)


@dataclass
class _Pending:
    """Rounds that have run and are not committed yet."""

    nodes: list[PathNode] = field(default_factory=list)
    participation: list[ParticipationRows] = field(default_factory=list)
    evaluations: list[EvaluationRow] = field(default_factory=list)
    models: dict[int, NewModel] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    rejections: list[dict[str, Any]] = field(default_factory=list)
    statistics: list[dict[str, Any]] = field(default_factory=list)
    dropped_statistics: list[str] = field(default_factory=list)
    solve: dict[str, Any] | None = None
    """Record of a closed-form solve."""


class RecordedTraining:
    """Recorded training from the tip of a run until the spec's stop rule holds."""

    def __init__(self, engine: Engine, writer: RunWriter, view: RunView) -> None:
        self.engine, self.writer, self.view = engine, writer, view
        self.active: ClientIndices = view.active
        current = writer.load_model(view.nodes[-1].node)
        self._fetch_model: Callable[[], Vector] = lambda: current
        self._tip = view.nodes[-1]
        self._stop = stop_without(view.spec.stop, self._lost_rounds())
        self._depth = view.path.tip
        self._next = 1 + max(writer.nodes_by_number())
        self._root = writer.load_model(view.nodes[0].node).astype(np.float64)
        self._tracker = track_everyone(view)
        self._levels = levels_to_keep(view.spec)
        self._kept = {depth: row.node for depth, row in view.kept.items() if row.kept}
        # Protect the initial model, and the last noised model: a request that starts from it charges no client that is
        # already forgotten. Protect merged models, which verification recomputes from the groups' models.
        self._protected = {0} | {depth for depth, _ in view.path.noise_depths[-1:]}
        self._protected |= {depth for depth, node in enumerate(view.path.nodes) if node.kind == "merge"}
        here = {node.node for node in view.nodes if node.branch == self._tip.branch}
        evaluated = [row for row in writer.evaluations() if row.node in here and row.subset == ACTIVE]
        on_tip = bool(evaluated) and evaluated[-1].node == self._tip.node
        self._accuracy: float | None = evaluated[-1].accuracy if on_tip else None
        self._pending = _Pending()
        self._committed = time.monotonic()
        self._thin()

    def run(
        self, phase: str, progress: ProgressCallback | None = None, pause: Callable[[], bool] | None = None
    ) -> bool:
        """Run rounds until the stop rule holds; an interrupt keeps every finished round.

        Returns:
            False if `pause` stopped the training.
        """
        try:
            ended = self._until_stopped(phase, progress, pause)
        finally:
            self.commit()
        remember_psi(self.view.reader, self._tip.node, self._tracker.copy())
        return ended

    def _until_stopped(self, phase: str, progress: ProgressCallback | None, pause: Callable[[], bool] | None) -> bool:
        if self._accuracy is None and is_evaluated(self._stop, self._tip.position):
            self._record_evaluation(evaluate_present(self.engine, self.model, self.active))
        if should_stop(self._stop, self._tip.position, self._accuracy):
            return True
        position = Position(self._tip.branch, self._tip.position)
        wanted = RoundsWanted(self._stop, self._root)
        for done in stream_rounds(self.engine, self.model, position, self.active, wanted):
            # An interrupt between two of these steps would leave half a round to be committed.
            with uninterrupted():
                self._ingest(done)
            is_large = len(self._pending.nodes) >= COMMIT_ROUNDS
            if time.monotonic() - self._committed > COMMIT_SECONDS or is_large:
                self.commit()
            if progress:
                accuracy = self._accuracy if self._accuracy is not None else math.nan
                progress(Progress(phase, self._tip.position, accuracy, self._stop.target, self._stop.max_rounds))
            if should_stop(self._stop, self._tip.position, self._accuracy):
                return True
            if pause and pause():
                return False
        return True

    def _lost_rounds(self) -> int:
        """Return the number of rounds of this branch that the engine counts as lost (see `is_lost`)."""
        none = np.zeros(0, dtype=np.int64)
        rounds = [node for node in self.view.nodes if node.kind == "round" and node.branch == self._tip.branch]
        empty = [Position(node.branch, node.position - 1) for node in rounds if node.regularity.total_samples == 0]
        return sum(is_lost(self.engine, position, self.active, none) for position in empty)

    @property
    def model(self) -> Vector:
        """Current model."""
        return self._fetch_model()

    def _ingest(self, done: StreamedRound) -> None:
        """Update Psi, keep the model before the round if a client's Psi crosses a level, and move the tip."""
        who = done.participants
        measured = who, done.samples, done.drifts, done.mean_shift, done.rounding
        regularity, scalars = self.view.summarise_round(*measured)
        # Psi of absent clients changes only if L is not 1; then every client has to be checked.
        watched = who if scalars.absent_contraction == 1.0 else self.active
        psi_before, rounding_before = self._tracker.total(watched), self._tracker.rounding
        self._tracker.update(scalars)
        if crosses_a_level(self._levels, psi_before, self._tracker.total(watched)):
            is_other = np.ones(self._tracker.client_count, dtype=bool)
            is_other[watched] = False
            unmoved = self._tracker.total(self.active[is_other[self.active]], rounding_before)
            self._keep(max(largest_psi(psi_before), largest_psi(unmoved)))
        self._add(done, regularity)
        if done.lost:
            self._stop = stop_without(self._stop, 1)
        self._accuracy = None
        if done.evaluation is not None:
            self._record_evaluation(done.evaluation)

    def _keep(self, psi_max: float) -> None:
        """Keep the model that the round started from, and drop another kept model if there are too many."""
        if self._depth not in self._kept:
            node = self._tip.node
            self._kept[self._depth] = node
            self._pending.models[node] = NewModel(node, self.model, kept=True, psi_max=psi_max)
            self._thin()

    def _thin(self) -> None:
        for depth in thin(list(self._kept), self._protected, self.view.spec.keep.models):
            gone = self._kept.pop(depth)
            if self._pending.models.pop(gone, None) is None:
                self._pending.dropped.add(gone)

    def _add(self, done: StreamedRound, regularity: RoundRegularity) -> None:
        node, tip = self._next, self._tip
        self._next += 1
        measured = regularity, done.mean_shift, done.rounding
        self._tip = PathNode(node, tip.node, "round", tip.branch, tip.position + 1, *measured, distance=done.distance)
        self._depth += 1
        self._fetch_model = done.fetch_model
        self._pending.nodes.append(self._tip)
        count = done.participants.size
        self._pending.participation.append(
            ParticipationRows(np.full(count, node), done.participants, done.samples, done.drifts)
        )
        self._pending.rejections.extend(
            rejection.row(number=number) for number, rejection in enumerate(done.rejections)
        )

    def measure(self) -> Evaluation:
        """Evaluate the released model on the active clients' data, and record it unless the record has it already."""
        evaluation = evaluate_present(self.engine, released_model(self.writer), self.active)
        if self._accuracy is None:
            self._record_evaluation(evaluation)
            self.commit()
        return evaluation

    def finish(self) -> None:
        """Record the end of the first training."""
        content = {"run": {"phase": "ready"}, "node": self.writer.tip}
        self.writer.record(NewEvent("training done", content))

    def _record_evaluation(self, evaluation: Evaluation) -> None:
        if not evaluation.samples.any():  # no client evaluates, or none may be asked
            return
        row = evaluation_row(self._tip.node, ACTIVE, evaluation)
        self._accuracy = row.accuracy
        self._pending.evaluations.append(row)

    def commit(self) -> None:
        """Make every finished round durable, together with the current model."""
        # Clear the pending rounds first: if anything fails below, they are repeated, never recorded twice.
        pending, self._pending = self._pending, _Pending()
        if not pending.nodes and not pending.evaluations:
            return
        tip, on_disk = self._tip.node, self.writer.models()
        if pending.nodes and (pending.nodes[-1].node != tip or len(pending.nodes) != len(pending.participation)):
            raise RunDamagedError("a round was recorded only in part and was not committed; run the command again")
        models = dict(pending.models)
        if pending.nodes and tip not in models:
            models[tip] = NewModel(tip, self.model, kept=False, psi_max=largest_psi(self._tracker.total(self.active)))
        superseded = {node for node, row in on_disk.items() if not row.kept and node != tip and node not in models}
        payload: dict[str, Any] = {"run": {"tip": str(tip)}} if pending.nodes else {}
        if pending.rejections:
            payload["rejections"] = pending.rejections
        if pending.solve is not None:
            payload["relative_penalty"] = pending.solve.pop("relative_penalty")
            payload["solve"] = pending.solve
        rounds = NewEvent(
            "rounds" if pending.nodes else "evaluation",
            payload,
            rows=NewRows(pending.nodes, ParticipationRows.concatenate(pending.participation)),
            models=[models[node] for node in sorted(models)],
            dropped_models=sorted((pending.dropped | superseded) & set(on_disk)),
            statistics=pending.statistics,
            dropped_statistics=pending.dropped_statistics,
            evaluations=pending.evaluations,
        )
        self.writer.record(rounds)
        self._committed = time.monotonic()


def largest_psi(psi: Floats) -> float:
    """Return the largest Psi, capped at `LARGEST_PSI`; no noise hides a Psi near the cap."""
    return min(float(psi.max(initial=0.0)), LARGEST_PSI)
