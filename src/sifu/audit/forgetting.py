"""How much the released model resembles one that never saw the clients: Scratch, watermarks, relearning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sifu.core.engine import Engine, Position
from sifu.core.layout import Vector
from sifu.engines.sim.scoring import Samples, Scorer
from sifu.store.table_rows import EvaluationRow
from sifu.theory.participation import ClientIndices

RELEARN_BRANCH = 1 << 40
"""Positions that no run uses, so that relearning draws its own participants and batches."""


@dataclass(frozen=True)
class WatermarkSuccess:
    """Accuracy on the clients' marked samples, with their own marks and with marks no one trained with.

    What the own marks give beyond fresh ones is owed to remembering the mark.
    """

    own: float
    fresh: float

    @property
    def success(self) -> float:
        """Own less fresh."""
        return self.own - self.fresh


@dataclass(frozen=True)
class ForgettingAudit:
    """The released model next to the one before the request and next to Scratch; dictionaries are by model.

    Accuracy and loss before the request are the recorded ones.

    `relearn` counts rounds with the clients back until the model is as good on their data as before (None: not within
    `relearn_limit`). `disagreement` is the share of samples on which released model and Scratch predict otherwise.
    """

    accuracy: dict[str, float]
    loss: dict[str, float]
    scratch_rounds: int
    relearn: dict[str, int | None]
    relearn_limit: int
    distance_to_scratch: float
    distance_from_start: float
    disagreement: dict[str, float]
    watermark: dict[str, WatermarkSuccess] | None


def relearn_rounds(
    engine: Engine,
    model: Vector,
    goal: tuple[float, float],
    forgotten: ClientIndices,
    everyone: ClientIndices,
    order: int,
    limit: int,
) -> int | None:
    """Rounds with the forgotten back among `everyone` until their accuracy (without labels: loss) is what it was."""
    accuracy, loss = goal
    for rounds in range(limit + 1):
        evaluation = engine.evaluate(model, forgotten)
        if evaluation.accuracy >= accuracy if accuracy > 0.0 else evaluation.loss <= loss * (1.0 + 1e-9):
            return rounds
        model = engine.run_round(model, Position(RELEARN_BRANCH + order, rounds), everyone).model
    return None


def forgetting_audit(
    engine: Engine,
    scorer: Scorer | None,
    models: Mapping[str, Vector],
    start: Vector,
    forgotten: ClientIndices,
    everyone: ClientIndices,
    order: int,
    scratch_rounds: int,
    samples: Mapping[str, Samples],
    watermark: dict[str, WatermarkSuccess] | None,
    before: EvaluationRow | None,
    relearn_limit: int,
) -> ForgettingAudit:
    """Compare the models `released` and `scratch` with each other, and with what was recorded before the request."""
    evaluations = {name: engine.evaluate(models[name], forgotten) for name in ("released", "scratch")}
    accuracy, loss = (
        {name: getattr(probe, kind) for name, probe in evaluations.items()} for kind in ("accuracy", "loss")
    )
    relearn = {}
    if before is not None:
        accuracy, loss = {"before": before.accuracy} | accuracy, {"before": before.loss} | loss
        relearn = {
            name: relearn_rounds(
                engine, models[name], (before.accuracy, before.loss), forgotten, everyone, order, relearn_limit
            )
            for name in evaluations
        }
    released, scratch = models["released"].astype(np.float64), models["scratch"].astype(np.float64)
    disagreement = {}
    if scorer is not None and scorer.labels:
        for name, probe in samples.items():
            pair = [scorer.predictions(models[kind], probe.x) for kind in ("released", "scratch")]
            disagreement[name] = float(np.mean(pair[0] != pair[1]))
    return ForgettingAudit(
        accuracy,
        loss,
        scratch_rounds,
        relearn,
        relearn_limit,
        float(np.linalg.norm(released - scratch)),
        float(np.linalg.norm(scratch - start.astype(np.float64))),
        disagreement,
        watermark,
    )
