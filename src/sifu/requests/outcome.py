"""Outcome and cost of a request, as the run recorded them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from sifu.core.held_out_figures import TRAINING_DATA, HeldOutFigures, missed_target_words
from sifu.core.ledger import finite_or_text
from sifu.core.method_info import CLOSED_FORM
from sifu.core.operator_words import forgotten_words, names_words
from sifu.requests.certification import RecordedRequest, solves
from sifu.run.run_view import ACTIVE
from sifu.store.client_accuracy import read_held_out
from sifu.store.projection import EvaluationRow, RequestRow
from sifu.store.reader import RunReader, plain_names
from sifu.theory.arrays import Integers
from sifu.theory.calibration import hidden_sensitivity


@dataclass(frozen=True)
class Cost:
    """Cost of a request.

    Attributes:
        rounds: Rounds of communication.
        local_steps: Steps of gradient descent, summed over all participants.
        bytes_sent: Size of the models sent to all participants in all rounds, and of their updates.
    """

    rounds: int
    local_steps: int
    bytes_sent: int


def cost_of(reader: RunReader, row: RequestRow) -> Cost:
    """Return the cost of a request that is done."""
    first, last = row.noise_node or 0, row.final_node or 0
    if row.method == CLOSED_FORM:
        return _cost_of_solve(reader, row)
    sums = reader.remembered("costs", lambda: _sums_until_each_node(reader))
    rounds, replies, steps = sums[:, [first, last]].tolist()
    layout = reader.layout
    return Cost(
        rounds=rounds[1] - rounds[0],
        local_steps=steps[1] - steps[0],
        bytes_sent=2 * layout.size * np.dtype(layout.dtype).itemsize * (replies[1] - replies[0]),
    )


def _cost_of_solve(reader: RunReader, row: RequestRow) -> Cost:
    """Return the cost of a closed-form solve: one round if clients were asked for statistics, and no local steps."""
    solve = solves(reader)[row.final_node or 0]
    return Cost(
        rounds=int(solve["asked"] > (1 if row.records else 0)),  # a rejoining client is always asked: not counted
        local_steps=0,
        bytes_sent=int(solve["bytes_sent"]),
    )


def _sums_until_each_node(reader: RunReader) -> Integers:
    """Return an array of shape (3, nodes): the numbers of rounds, replies and local steps up to each node."""
    nodes, everyone = reader.nodes_by_number(), reader.everyone()
    sums = np.zeros((3, 1 + max(nodes)), dtype=np.int64)
    sums[0, [number for number, node in nodes.items() if node.kind == "round"]] = 1
    steps = np.array([client.local_steps for client in reader.clients()], dtype=np.int64)
    np.add.at(sums[1], everyone.nodes, 1)
    np.add.at(sums[2], everyone.nodes, steps[everyone.clients])
    result: Integers = np.cumsum(sums, axis=1)
    return result


@dataclass(frozen=True)
class Measured:
    """Evaluations of the models before and after a request, on the forgotten clients and on the remaining clients.

    An evaluation is None if it was not made, or was erased.
    """

    forgotten_before: EvaluationRow | None
    forgotten_after: EvaluationRow | None
    remaining_before: EvaluationRow | None
    remaining_after: EvaluationRow | None

    @staticmethod
    def of(reader: RunReader, row: RequestRow) -> Measured:
        """Return the evaluations of a request so far."""
        forgotten, remaining = f"forgotten:{row.request}", f"remaining:{row.request}"
        before: dict[str, EvaluationRow] = {}
        after: dict[str, EvaluationRow] = {}
        for evaluation in reader.evaluations():
            if evaluation.node == row.final_node:
                after[evaluation.subset] = evaluation
            elif evaluation.node < (row.noise_node or 0):
                before.setdefault(evaluation.subset, evaluation)
        return Measured(before.get(forgotten), after.get(forgotten), before.get(remaining), after.get(ACTIVE))


def node_before(reader: RunReader, row: RequestRow) -> int | None:
    """Return the node of the model before a request, or None if the request is strict or the node is unknown.

    For closed-form heads, whose requests do not evaluate training rows, the node is the last head before the request.
    """
    evaluated = Measured.of(reader, row).forgotten_before
    if evaluated is not None or row.terms.retention == "strict":
        return None if evaluated is None else evaluated.node
    return max((node for node in solves(reader) if node < (row.noise_node or 0)), default=None)


@dataclass(frozen=True)
class Outcome:
    """Outcome of one request.

    Attributes:
        request: Id of the request.
        clients: Names of its clients.
        records: Number of forgotten records, or None if clients were forgotten entirely.
        method: Method that executed it.
        level: Level of its certificate.
        epsilon: Epsilon of its privacy budget.
        delta: Delta of its privacy budget.
        delta_at_most: Delta once the whole budget is used.
        delta_reached: Delta that this release spent.
        sigma: Standard deviation of the noise.
        psi: Largest Psi that the noise had to hide.
        psi_star: Largest Psi that the noise hides.
        rollback_to: Number of rounds of the model that training restarted from, or 0 for the initial model.
        rounds: Rounds of retraining.
        accuracy: Accuracy on the training data of the active clients.
        target: Accuracy that retraining should have reached; 0 means no target.
        cost: Rounds, local steps and traffic of the request.
        held_out: Figures of the released model on the held-out rows of the remaining clients; None once another model
            is current.
        mean_squared_error: Mean squared error on the same data as `accuracy`, for regression.
        held_out_before: Figures of the previous model on the same rows, known only to the command that executed the
            request.
    """

    request: str
    clients: tuple[str, ...]
    records: int | None
    method: str
    level: str
    epsilon: float
    delta: float
    delta_at_most: float
    delta_reached: float
    sigma: float
    psi: float
    psi_star: float
    rollback_to: int
    rounds: int
    accuracy: float | None
    target: float
    cost: Cost
    held_out: HeldOutFigures | None = None
    mean_squared_error: float | None = None
    held_out_before: HeldOutFigures | None = field(default=None, compare=False)

    def to_mapping(self) -> dict[str, Any]:
        """Return the outcome as plain values, ready for JSON; an unbounded Psi becomes the string "inf"."""
        return asdict(self) | {"psi": finite_or_text(self.psi)}

    def lines(self) -> Iterator[str]:
        """Yield the outcome as text, without what does not apply."""
        whom = forgotten_words([names_words(self.clients)], self.records)
        told = [f"{self.request}: {whom}", f"method {self.method}", f"level {self.level}"]
        told += [f"sigma {self.sigma:.4g}"] if self.sigma else []
        told += [f"from round {self.rollback_to}"] if self.rollback_to else []
        told.append(f"{self.rounds} round{'' if self.rounds == 1 else 's'}")
        if self.accuracy is not None:
            told.append(f"accuracy {100 * self.accuracy:.1f} % {TRAINING_DATA}")
        if self.mean_squared_error is not None:
            told.append(f"mean squared error {self.mean_squared_error:.4g} {TRAINING_DATA}")
        yield ", ".join(told)
        if missed := missed_target_words(self.accuracy, self.target):
            yield f"  {missed}"
        if self.held_out is not None:
            before = self.held_out_before
            were = f", the one before {before.words.replace(before.where, 'on the same rows')}" if before else ""
            yield f"  The current model has {self.held_out.words}{were}."


def outcome_of(reader: RunReader, row: RequestRow) -> Outcome:
    """Return the outcome of a finished request."""
    recorded = RecordedRequest(reader, row)
    statements = [recorded.statement(exposure) for exposure in recorded.new_exposures]
    remaining, cost = Measured.of(reader, row).remaining_after, cost_of(reader, row)
    regime = recorded.view.spec.regime
    level = row.level or "none"
    psi = max((statement.psi for statement in statements), default=0.0)
    back_to = recorded.view.rounds_until(recorded.source_depth) if row.source_node is not None else 0
    return Outcome(
        request=row.request,
        clients=plain_names(reader, row.clients),
        records=len(row.records) or None,
        method=row.method,
        level=level,
        epsilon=row.terms.epsilon,
        delta=row.terms.delta,
        delta_at_most=0.0 if level == "exact" else recorded.delta_at_most,
        delta_reached=recorded.delta_reached,
        sigma=recorded.noise_std,
        psi=psi,
        psi_star=hidden_sensitivity(recorded.noise_std, recorded.multiplier),
        rollback_to=back_to,
        rounds=cost.rounds,
        accuracy=remaining.accuracy if remaining and regime.has_accuracy else None,
        target=recorded.view.spec.stop.target,
        cost=cost,
        held_out=None if row.final_node is None else read_held_out(reader.folder, row.final_node),
        mean_squared_error=regime.squared_error(remaining.loss if remaining else None),
    )
