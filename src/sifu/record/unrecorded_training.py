"""Training that is recorded nowhere: what Scratch would take."""

from __future__ import annotations

import math

import numpy as np

from sifu.core.engine import Engine, Position
from sifu.core.layout import Vector
from sifu.core.round_stream import RoundsWanted, is_evaluated, should_stop, stream_rounds
from sifu.core.spec import StopSpec
from sifu.record.progress import Progress, ProgressCallback
from sifu.theory.participation import ClientIndices


def retrain_unrecorded(
    engine: Engine,
    active: ClientIndices,
    stop: StopSpec,
    branch: int,
    progress: ProgressCallback | None = None,
    start: Vector | None = None,
) -> tuple[Vector, int, float, bool]:
    """Training among `active`, recorded nowhere, from `start` or a fresh model: what Scratch would take.

    Returns the model, the rounds, the accuracy, and whether the target was reached.
    """
    first = engine.initial_model(branch) if start is None else start

    def fetch_model() -> Vector:
        return first

    rounds, accuracy = 0, math.nan
    evaluated = engine.evaluate(first, active).accuracy if is_evaluated(stop, 0) else None
    wanted = RoundsWanted(stop, first.astype(np.float64), accuracy=evaluated)
    stream = stream_rounds(engine, first, Position(branch, 0), active, wanted)
    while True:
        accuracy = accuracy if evaluated is None else evaluated
        if should_stop(stop, rounds, evaluated):
            return fetch_model(), rounds, accuracy, bool(stop.target > 0 and accuracy >= stop.target)
        done = next(stream)
        fetch_model, rounds = done.fetch_model, rounds + 1
        evaluated = done.evaluation.accuracy if done.evaluation is not None else None
        if progress:
            progress(Progress("Scratch", rounds, accuracy, stop.target, stop.max_rounds))
