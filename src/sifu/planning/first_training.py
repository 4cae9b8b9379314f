"""The first training of a run as its evaluations tell it: the record that every forecast starts from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from sifu.planning.learning_curve import ErrorCurve, LearningCurve
from sifu.record.evaluations import ACTIVE
from sifu.record.rehearsal import rehearsed_noises
from sifu.record.run_view import RunView
from sifu.store.table_rows import EvaluationRow


@dataclass(frozen=True)
class TrainingNode:
    """A node of the first training: its round, its number, and how far its model is from the initial one."""

    position: int
    node: int
    distance: float


class FirstTraining:
    """Rounds and evaluations of the first training, up to the round that reached `target`."""

    def __init__(self, view: RunView, target: float) -> None:
        self._reader, self._target = view.reader, target

    @cached_property
    def nodes(self) -> list[TrainingNode]:
        """Its nodes, in order."""
        nodes: list[TrainingNode] = self._reader.remembered("first training", self._read_nodes)
        return nodes

    def _read_nodes(self) -> list[TrainingNode]:
        return [
            TrainingNode(row.node.position, row.node.node, row.distance)
            for row in self._reader.nodes_by_number().values()
            if row.node.branch == 0 and row.node.kind in ("initial", "merge", "round")
        ]

    @cached_property
    def evaluations(self) -> list[EvaluationRow]:
        """Every evaluation of the run, rehearsals and later branches included."""
        rows: list[EvaluationRow] = self._reader.remembered("evaluations", self._reader.evaluations)
        return rows

    @cached_property
    def evaluated(self) -> dict[int, EvaluationRow]:
        """Evaluations on the active clients, by node."""
        return {row.node: row for row in self.evaluations if row.subset == ACTIVE}

    @cached_property
    def rehearsed(self) -> dict[float, tuple[EvaluationRow, EvaluationRow]]:
        """Evaluations of the same model with noise and without it, by sigma."""
        return {
            noise_std: (noised, self.evaluated[node])
            for node, noises in rehearsed_noises(self.evaluations).items()
            if node in self.evaluated
            for noise_std, noised in noises
        }

    @cached_property
    def _all_points(self) -> list[tuple[int, EvaluationRow]]:
        return [(row.position, self.evaluated[row.node]) for row in self.nodes if row.node in self.evaluated]

    @cached_property
    def rounds_to_target(self) -> int | None:
        """T: rounds until the target was reached; None if it never was, or there is none."""
        if self._target <= 0.0:
            return None
        return next((position for position, row in self._all_points if row.accuracy >= self._target), None)

    @cached_property
    def length(self) -> int:
        """T where the target was reached, else all its rounds: good enough to compare noises."""
        return max(1, self.nodes[-1].position if self.rounds_to_target is None else self.rounds_to_target)

    @property
    def distance(self) -> float:
        """How far training went from the initial model."""
        return self.nodes[-1].distance

    @cached_property
    def points(self) -> list[tuple[int, EvaluationRow]]:
        """(round, evaluation) until the target was reached."""
        return [(position, row) for position, row in self._all_points if position <= self.length]

    @cached_property
    def losses(self) -> LearningCurve | None:
        """The curve of the loss; None where it does not fall."""
        return LearningCurve.fit([at for at, _ in self.points], [row.loss for _, row in self.points])

    @cached_property
    def errors(self) -> ErrorCurve | None:
        """The curve of wrong predictions; None where accuracy tells nothing."""
        samples = self.points[-1][1].samples if self.points else 0
        return ErrorCurve.fit([at for at, _ in self.points], [row.accuracy for _, row in self.points], samples)
