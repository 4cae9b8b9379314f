"""The server's side of a round: the weighted mean, and how far each client's model is from it.

    mean = sum_i w_i theta_i,   w_i = |D_i| / sum_j |D_j|,   drift_i = ||theta_i - mean||     (DESIGN section 2)

Everything is float64, whatever the models are, and every norm is an upper bound of the norm to the *exact*
mean: a float64 sum of M weighted models is off by at most (M + 2) u max_i ||theta_i||, which is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sifu.core.upward import UNIT_ROUNDOFF, enlargement, norm_up, up

LocalModels = Callable[[], Iterator[tuple[slice | Tensor, Tensor]]]
"""Trains the participants when called: pairs of (places among them, rows of flat models)."""

KEEP_BYTES = 2**30
"""Local models are kept between the two passes up to this size, and trained again beyond it."""


@dataclass(frozen=True)
class Average:
    """The mean of a round in float64 and every participant's distance to it, rounded up.

    `not_finite` lists the places of participants whose model has a NaN or an Inf; if it is not empty, or if
    the mean overflowed, nothing else means anything.
    """

    mean: NDArray[np.float64]
    drifts: NDArray[np.float64]
    mean_shift: float
    gram: NDArray[np.float64] | None
    not_finite: tuple[int, ...]


def average(
    local_models: LocalModels,
    start: NDArray[np.float64],
    samples: NDArray[np.int64],
    item_bytes: int,
    want_gram: bool,
) -> Average:
    """Average the local models of participants with `samples` samples each, trained from `start`.

    Gram entries are plain float64 inner products, off by at most (d + M + 8) u drift_i drift_j or so.
    """
    count, size = samples.size, start.size
    weights = torch.from_numpy(samples / samples.sum())
    keep = want_gram or count * size * item_bytes <= KEEP_BYTES
    kept: list[tuple[slice | Tensor, Tensor]] = []
    mean = torch.zeros(size, dtype=torch.float64)
    for places, models in local_models():
        mean += weights[places] @ models.to(torch.float64)
        if keep:
            kept.append((places, models))
    again: LocalModels = (lambda: iter(kept)) if keep else local_models
    if not bool(torch.isfinite(mean).all()):
        return Average(mean.numpy(), np.zeros(count), 0.0, None, _not_finite(again))

    norms = torch.zeros(count, dtype=torch.float64)
    differences = torch.zeros((count, size), dtype=torch.float64) if want_gram else None
    for places, models in again():
        difference = models.to(torch.float64) - mean
        norms[places] = torch.linalg.vector_norm(difference, dim=1)
        if differences is not None:
            differences[places] = difference
    drifts = _safe(norms.numpy(), again, mean)
    drifts *= enlargement(size)
    mean_error = 0.0
    if count > 1:
        mean_error = (count + 2) * UNIT_ROUNDOFF * (_norm_up(mean.numpy()) + float(drifts.max())) * 1.001
    gram = (differences @ differences.T).numpy() if differences is not None else None
    shift = _norm_up((mean - torch.from_numpy(start)).numpy())
    drifts = np.where(drifts + mean_error > 0.0, np.nextafter(drifts + mean_error, np.inf), 0.0)
    return Average(mean.numpy(), drifts, shift + mean_error, gram, ())


def _safe(norms: NDArray[np.float64], models: LocalModels, mean: Tensor) -> NDArray[np.float64]:
    """Norms whose squares over- or underflowed, computed again with scaling."""
    doubtful = (norms < 1e-140) | (norms > 1e140)
    if not doubtful.any():
        return norms
    repaired = norms.copy()
    for places, rows in models():
        chosen = np.arange(norms.size)[places if isinstance(places, slice) else places.numpy()]
        for place, row in zip(chosen, rows, strict=True):
            if doubtful[place]:
                repaired[place] = _norm_up((row.to(torch.float64) - mean).numpy())
    return repaired


def _norm_up(vector: NDArray[np.float64]) -> float:
    """`norm_up`, also where every square underflows to zero."""
    length, largest = norm_up(vector), float(np.max(np.abs(vector), initial=0.0))
    return length if length > 0.0 or largest == 0.0 else up(norm_up(vector / largest) * largest)


def _not_finite(models: LocalModels) -> tuple[int, ...]:
    """Places of the participants whose model holds a NaN or an Inf."""
    found: list[int] = []
    for places, rows in models():
        bad = ~torch.isfinite(rows).all(dim=1)
        if isinstance(places, slice):
            places = torch.arange(places.start, places.stop)
        found.extend(places[bad].tolist())
    return tuple(sorted(found))
