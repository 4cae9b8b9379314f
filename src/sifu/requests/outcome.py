"""The outcome of a request, from what is recorded."""

from __future__ import annotations

from dataclasses import dataclass

from sifu.core.held_out import HeldOutFigures
from sifu.core.method_info import CLOSED_FORM
from sifu.requests.certification import RecordedRequest
from sifu.requests.cost import Cost, cost_of
from sifu.store.client_accuracy import read_held_out
from sifu.store.reader import RunReader
from sifu.store.remainders import plain_names
from sifu.store.table_rows import EvaluationRow, RequestRow
from sifu.theory.calibration import hidden_sensitivity
from sifu.theory.composition import TrainingNoise


@dataclass(frozen=True)
class Outcome:
    """The outcome of one request. `records` counts those of its one client, None where clients were forgotten whole.

    `rollback_to` counts the rounds that led to the model training went back to (0: the initial model), `rounds` those
    it took (FedEraser's calibration included), `scratch_rounds` those of training from scratch where it was
    compared. `accuracy` is on the training data of the active clients, and `target` what it should have reached (0:
    no target). `delta_reached` is what this release spent, `delta_at_most` what the budget gives once it is used up.
    `cost` is what the request took, `training_noise` what noise in training promises (method dp). `held_out` are the
    figures of the released model on the held-out rows of those who stay, as long as it is the current one.
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
    scratch_rounds: int | None
    accuracy: float | None
    target: float
    accuracy_forgotten_before: float | None
    accuracy_forgotten_after: float | None
    cost: Cost
    training_noise: TrainingNoise | None = None
    held_out: HeldOutFigures | None = None


def outcome_of(reader: RunReader, row: RequestRow) -> Outcome:
    """The outcome of a finished request, from what is recorded."""
    recorded = RecordedRequest(reader, row)
    statements = [recorded.statement(exposure) for exposure in recorded.new_exposures]
    final = next((node_row for node_row in reader.node_rows() if node_row.node.node == row.final_node), None)
    evaluations = {(evaluation.node, evaluation.subset): evaluation for evaluation in reader.evaluations()}
    scratch = next((c for c in reader.comparisons() if c.request == row.request and c.method == "scratch"), None)
    before = [
        evaluation
        for (node, subset), evaluation in evaluations.items()
        if subset == f"forgotten:{row.request}" and node < (row.noise_node or 0)
    ]

    has_accuracy = recorded.view.spec.has_accuracy

    def accuracy(key: tuple[int | None, str]) -> float | None:
        evaluation: EvaluationRow | None = evaluations.get(key)  # type: ignore[arg-type]
        return evaluation.accuracy if evaluation and has_accuracy else None

    cost = cost_of(reader, row)
    return Outcome(
        request=row.request,
        clients=plain_names(reader, row.clients),
        records=len(row.records) or None,
        method=row.method,
        level=row.level or "none",
        epsilon=row.terms.epsilon,
        delta=row.terms.delta,
        delta_at_most=recorded.delta_at_most,
        delta_reached=recorded.delta_reached,
        sigma=recorded.noise_std,
        psi=max((statement.psi for statement in statements), default=0.0),
        psi_star=hidden_sensitivity(recorded.noise_std, recorded.multiplier),
        rollback_to=recorded.view.path.rounds_until(recorded.source_depth) if row.source_node is not None else 0,
        rounds=cost.rounds if row.method == CLOSED_FORM else final.node.position if final else 0,
        scratch_rounds=scratch.rounds if scratch else None,
        accuracy=accuracy((row.final_node, "active")),
        target=recorded.terms.stop(recorded.view.spec.stop).target,
        accuracy_forgotten_before=before[0].accuracy if before and has_accuracy else None,
        accuracy_forgotten_after=accuracy((row.final_node, f"forgotten:{row.request}")),
        cost=cost,
        training_noise=recorded.training_noise,
        held_out=None if row.final_node is None else read_held_out(reader.folder, row.final_node),
    )
