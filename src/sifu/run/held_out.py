"""Accuracy and other figures of a model on the rows that are held out for testing."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np

from sifu.core.engine import Engine
from sifu.core.held_out_figures import HeldOutFigures
from sifu.core.layout import Vector
from sifu.core.spec import Spec
from sifu.data.client_data import is_frame
from sifu.errors import InputError, SifuWarning
from sifu.run.clients_and_engine import HeldOutRows, framed, held_out_rows_from_spec, is_table
from sifu.theory.arrays import Array, Floats

BINS = 10
"""Number of equally wide bins for the calibration error."""


def held_out_rows(spec: Spec, clients: Any = None) -> HeldOutRows | None:
    """Return the held-out rows of a spec's data, or of the frame in `clients`, or None if there are none.

    Raises:
        InputError: If the file of the rows cannot be read.
    """
    if clients is not None and not is_frame(clients):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SifuWarning)  # training has already warned
            if clients is not None:
                return held_out_rows_from_spec(**framed(spec, clients))
            return held_out_rows_from_spec(spec)
    except OSError as error:
        raise InputError(f"their file cannot be read: {error}") from error


def held_out_figures(spec: Spec, engine: Engine, model: Vector, rows: HeldOutRows) -> HeldOutFigures | None:
    """Return figures of a model on rows.

    None if there are no rows, if the engine does not expose its model, or if the squared error is not finite.
    """
    from sifu.engines.sim.scorers import Samples, scorer_of

    samples, scorer = Samples(np.asarray(rows.x), np.asarray(rows.y)), scorer_of(engine)
    if scorer is None or samples.count == 0:
        return None
    if not spec.regime.has_accuracy:
        error = scorer.squared_error(model, samples)
        if not math.isfinite(error):
            return None
        spread = float(np.mean(np.var(np.asarray(samples.y, dtype=np.float64).reshape(samples.count, -1), axis=0)))
        explained = 1.0 - error / spread if spread > 0.0 else None
        return HeldOutFigures(samples.count, mean_squared_error=error, r2=explained)
    predicted = scorer.predictions(model, samples.x)
    right = predicted == samples.y.reshape(predicted.shape)
    accuracy = float(np.mean(right if right.ndim == 1 else right.all(axis=1)))
    if not is_table(spec.data) or right.ndim > 1:
        return HeldOutFigures(samples.count, accuracy)
    probabilities = scorer.probabilities(model, samples.x)
    scores = scorer.outputs(model, samples.x) if probabilities is None else probabilities
    return HeldOutFigures(
        samples.count,
        accuracy,
        auc=area_under_curve(samples.y, scores),
        f1=f1_score(samples.y, predicted, scores.shape[1]),
        calibration_error=None if probabilities is None else calibration_error(samples.y, probabilities),
        positive=_positive_class(spec) if scores.shape[1] == 2 else "",
    )


def _positive_class(spec: Spec) -> str:
    """Return the name of the second of two classes."""
    from sifu.data.table_coding import TableCoding

    names = TableCoding.from_spec(spec.data).class_names
    return names[1] if len(names) == 2 else "1"


def area_under_curve(labels: Array, scores: Floats) -> float | None:
    """Return the area under the ROC curve, or None if a class has no row.

    With several classes, it is the mean over each class against the rest.

    >>> area_under_curve(np.array([0, 1, 1]), np.array([[0.0, 1.0], [0.0, 1.0], [0.0, 2.0]]))
    0.75
    """
    classes = range(1, 2) if scores.shape[1] == 2 else range(scores.shape[1])
    if any(not 0 < int((labels == each).sum()) < labels.size for each in classes):
        return None
    if scores.shape[1] == 2:
        return _pairs_in_order(labels == 1, scores[:, 1] - scores[:, 0])
    return float(np.mean([_pairs_in_order(labels == each, scores[:, each]) for each in classes]))


def _pairs_in_order(positive: Array, scores: Floats) -> float:
    """Return the share of pairs in which a positive row has a higher score than another row; a tie counts half."""
    others, own = np.sort(scores[~positive]), scores[positive]
    below, not_above = (np.searchsorted(others, own, side) for side in ("left", "right"))
    return float((below + not_above).sum() / (2 * own.size * others.size))


def f1_score(labels: Array, predicted: Array, outputs: int) -> float:
    """Return F1 of class 1 if the model has two `outputs`, otherwise the mean over all classes that occur."""
    classes = [1] if outputs == 2 else np.union1d(labels, predicted).tolist()
    right = [int(((labels == each) & (predicted == each)).sum()) for each in classes]
    both = [int((labels == each).sum() + (predicted == each).sum()) for each in classes]
    return float(np.mean([2 * hits / rows if rows else 0.0 for hits, rows in zip(right, both, strict=True)]))


def calibration_error(labels: Array, probabilities: Floats) -> float:
    """Return the mean absolute difference of confidence and accuracy, over bins of the predicted class's probability.

    This is the expected calibration error of Guo et al. 2017, equation 3; bins are weighted by their number of rows.

    >>> calibration_error(np.array([1, 1, 0, 1]), np.array([[0.25, 0.75]] * 4))
    0.0
    """
    confidence = probabilities.max(axis=1)
    right = probabilities.argmax(axis=1) == labels
    bins = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    gaps = np.bincount(bins, weights=right - confidence, minlength=BINS)
    return float(np.abs(gaps).sum() / labels.size)
