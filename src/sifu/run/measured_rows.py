"""Measuring a model on held-out rows."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np

from sifu.core.engine import Engine
from sifu.core.held_out import HeldOutFigures
from sifu.core.layout import Vector
from sifu.core.spec import Spec
from sifu.errors import SifuError, SifuWarning
from sifu.run.clients_and_engine import TABLE, HeldOutRows, held_out_rows_from_spec
from sifu.theory.arrays import Array, Floats

TABLES = (TABLE, "hospitals")
BINS = 10
"""Of equal width, for the calibration error."""


def rows_at_hand(spec: Spec, data_folder: str | Path | None = None) -> HeldOutRows | None:
    """The held-out rows of a spec's data; None where there are none, or the data cannot be read any more."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SifuWarning)  # training has said it
            return held_out_rows_from_spec(spec, data_folder)
    except (SifuError, OSError):
        return None


def held_out_figures(spec: Spec, engine: Engine, model: Vector, rows: HeldOutRows) -> HeldOutFigures | None:
    """Figures of a model on rows; None where there is no row, or the engine does not show its model."""
    from sifu.engines.sim.scoring import Samples, scorer_of

    samples, scorer = Samples(np.asarray(rows.x), np.asarray(rows.y)), scorer_of(engine)
    if scorer is None or samples.count == 0:
        return None
    if not spec.has_accuracy:
        error = scorer.squared_error(model, samples)
        return HeldOutFigures(samples.count, mean_squared_error=error) if math.isfinite(error) else None
    predicted = scorer.predictions(model, samples.x)
    right = predicted == samples.y.reshape(predicted.shape)
    accuracy = float(np.mean(right if right.ndim == 1 else right.all(axis=1)))
    if spec.data.name not in TABLES or right.ndim > 1:
        return HeldOutFigures(samples.count, accuracy)
    probabilities = scorer.probabilities(model, samples.x)
    scores = scorer.outputs(model, samples.x) if probabilities is None else probabilities
    return HeldOutFigures(
        samples.count,
        accuracy,
        auc=area_under_curve(samples.y, scores),
        f1=f1_score(samples.y, predicted, scores.shape[1]),
        calibration_error=None if probabilities is None else calibration_error(samples.y, probabilities),
    )


def area_under_curve(labels: Array, scores: Floats) -> float | None:
    """Area under the ROC curve; of several classes the mean of each against the rest. None where a class has no row."""
    from sklearn.metrics import roc_auc_score

    classes = range(1, 2) if scores.shape[1] == 2 else range(scores.shape[1])
    if any(not 0 < int((labels == each).sum()) < labels.size for each in classes):
        return None
    if scores.shape[1] == 2:
        return float(roc_auc_score(labels, scores[:, 1] - scores[:, 0]))
    return float(np.mean([roc_auc_score(labels == each, scores[:, each]) for each in classes]))


def f1_score(labels: Array, predicted: Array, outputs: int) -> float:
    """F1 of class 1 of two classes, of several the mean over the classes that are among the rows or predicted."""
    from sklearn.metrics import f1_score as f1

    return float(f1(labels, predicted, average="binary" if outputs == 2 else "macro", zero_division=0.0))


def calibration_error(labels: Array, probabilities: Floats) -> float:
    """How far confidence and accuracy are apart: the mean over rows, in bins of the predicted class's probability.

    The expected calibration error of Guo et al. 2017, equation 3.

    >>> calibration_error(np.array([1, 1, 0, 1]), np.array([[0.25, 0.75]] * 4))
    0.0
    """
    confidence = probabilities.max(axis=1)
    right = probabilities.argmax(axis=1) == labels
    bins = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    apart = np.bincount(bins, weights=right - confidence, minlength=BINS)
    return float(np.abs(apart).sum() / labels.size)
