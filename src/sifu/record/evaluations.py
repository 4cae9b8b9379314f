"""Evaluations as they are recorded."""

from __future__ import annotations

import math

from sifu.core.engine import Evaluation
from sifu.errors import RoundRejectedError
from sifu.store.table_rows import EvaluationRow

ACTIVE = "active"
"""The subset of clients that evaluations for the stop rule are made on."""


def evaluation_row(node: int, subset: str, evaluation: Evaluation) -> EvaluationRow:
    """An evaluation as it is recorded; one that is not finite is refused."""
    if not math.isfinite(evaluation.loss):
        raise RoundRejectedError(
            f"the loss on {subset} clients is {evaluation.loss}: training diverged, lower local.rate; "
            "the last good state stays"
        )
    return EvaluationRow(node, subset, int(evaluation.samples.sum()), evaluation.accuracy, evaluation.loss)
