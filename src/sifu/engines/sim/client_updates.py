"""Server side of a round: the weighted mean of the clients' models, and the distance of each model from the mean.

    mean = sum_i w_i theta_i,   w_i = |D_i| / sum_j |D_j|,   drift_i = ||theta_i - mean||

(eq. 5 of the paper; docs/theory.md, section 2.1). Models are given as theta_i = base + u_i with a common `base` (zero,
or a multiple of the model the round started from). Then mean = base + m with m = sum_i w_i u_i, and
drift_i = ||u_i - m||, independent of the base. Everything is computed in float64, whatever the type of the models.
Every norm is an upper bound on the distance to the *exact* mean (section 6.2 derives the errors). The u_i are given as
rows, or as duals u_i = X_i' V_i of linear models trained in sample space, which avoids computing u_i.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from sifu.core.round import Average
from sifu.engines.sim.client_blocks import Part, PartPlaces
from sifu.theory.arrays import Floats, Integers
from sifu.theory.rounding import UNIT_ROUNDOFF, enlargement, norm_up, up

LocalModels = Callable[[], Iterator[tuple[PartPlaces, Tensor]]]
"""Function that trains the participants and yields pairs (places among them, rows of flat models)."""

KEEP_BYTES = 2**30
"""Maximum size of local models kept between the two passes; above it, clients are trained twice."""
TOLERATED_EXCESS = 1e-6
"""Maximum relative rounding slack of a drift that is computed without the local models."""


class RowUpdates:
    """Updates u_i of some participants as rows, which are changed in place.

    If `keep` is True, the rows are stored between passes; otherwise every pass trains the clients again. Places are the
    positions of these participants among all participants. `DualUpdates` has the same methods.
    """

    def __init__(self, make: LocalModels, keep: bool) -> None:
        self._make, self._keep = make, keep
        self._kept: list[tuple[PartPlaces, Tensor]] = []
        self._largest = 0.0

    def rows(self) -> Iterable[tuple[PartPlaces, Tensor]]:
        """Return pairs (places, rows u_i) of the updates; do not call this after `distances`."""
        if not self._keep:
            return self._make()
        self._kept = self._kept or list(self._make())
        return self._kept

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return sum_i w_i u_i over these participants in float64; `weights` has an entry for every participant."""
        sums = [weights[places] @ rows.to(torch.float64) for places, rows in self.rows()]
        return sum(sums[1:], start=sums[0])

    def distances(self, mean: Tensor, norms: Floats) -> None:
        """Write upper bounds on ||u_i - mean|| to their places in `norms`."""
        factor = enlargement(mean.numel())
        for places, rows in self.rows():
            difference = rows.to(torch.float64).sub_(mean)
            lengths = torch.linalg.vector_norm(difference, dim=1).numpy()
            lengths = _repaired(lengths, difference.numpy()) * factor
            norms[places] = lengths
            self._largest = max(self._largest, float(lengths.max()))

    def sum_error(self, weights: Floats, mean_norm: float) -> float:
        """Return a bound on the error of `weighted_sum` and of its addition to other parts; call `distances` first."""
        if weights.size == 1:
            return 0.0
        return (weights.size + 2) * UNIT_ROUNDOFF * (mean_norm + self._largest) * 1.001


class DualUpdates:
    """Updates u_i = X_i' V_i of clients of a linear model, given by V_i' (clients, outputs, rows) in float64.

    This class has the methods of `RowUpdates`.
    """

    def __init__(self, part: Part, gram: Tensor, dual: Tensor, keep: bool) -> None:
        self._part, self._gram, self._dual = part, gram, dual
        self._release_samples: Callable[[], None] = (lambda: None) if keep else part.release_samples
        lengths = _repaired(torch.linalg.vector_norm(dual, dim=(1, 2)).numpy(), dual.flatten(1).numpy())
        self._sizes = part.lengths * lengths * enlargement(dual[0].numel() + 4)
        """Upper bounds on F_i = ||X_i||_F ||V_i||_F."""

    def rows(self) -> Iterable[tuple[PartPlaces, Tensor]]:
        """Return pairs (places, rows u_i) of the updates."""
        return [(self._part.places, self._part.transposed_products(self._dual).flatten(1))]

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return sum_i w_i u_i over these participants; `weights` has an entry for every participant."""
        total = self._part.summed(self._dual * weights[self._part.places][:, None, None]).flatten()
        self._release_samples()
        return total

    def distances(self, mean: Tensor, norms: Floats) -> None:
        """Write upper bounds on ||u_i - mean|| to their places in `norms`, computing u_i only if necessary."""
        dual, (_, outputs, samples), size = self._dual, self._dual.shape, mean.numel()
        width = size // outputs
        own = torch.bmm(dual, self._gram).mul_(dual).sum(dim=(1, 2)).numpy()
        along = self._part.outputs(mean.reshape(outputs, width)).mul_(dual).sum(dim=(1, 2)).numpy()
        whole, mean_norm = float(torch.dot(mean, mean)), norm_up(mean.numpy())
        with np.errstate(over="ignore", invalid="ignore"):
            square = own - 2.0 * along + whole
            # a_i of docs/theory.md, section 6.2.
            slack = (
                (width + samples + samples * outputs + 8) * self._sizes**2
                + 2.0 * (width + samples * outputs + 8) * self._sizes * mean_norm
                + (size + 8) * whole
            ) * (1.01 * UNIT_ROUNDOFF)
            distances = np.sqrt(np.maximum(square, 0.0) + slack) * enlargement(4)
            # Comparisons with NaN are false, so a NaN counts as not trusted.
            trusted = (slack <= TOLERATED_EXCESS * square) & (square > 1e-280) & (square < 1e280)
        if not trusted.all():
            doubtful = np.flatnonzero(~trusted)
            chosen = torch.from_numpy(doubtful)
            built = torch.bmm(dual[chosen], self._part.x[chosen]).flatten(1) - mean
            lengths = _repaired(torch.linalg.vector_norm(built, dim=1).numpy(), built.numpy()) * enlargement(size)
            distances[doubtful] = lengths + (samples + 2) * UNIT_ROUNDOFF * self._sizes[doubtful] * 1.01
        norms[self._part.places] = distances
        self._release_samples()

    def sum_error(self, weights: Floats, mean_norm: float) -> float:
        """Return a bound on the error of `weighted_sum`."""
        roundings = self._dual.shape[0] * self._dual.shape[2] + weights.size + 4
        return float(weights[self._part.places] @ self._sizes) * roundings * UNIT_ROUNDOFF * 1.001


LocalUpdates = RowUpdates | DualUpdates


def average(
    updates: Sequence[LocalUpdates],
    offset: Floats | None,
    samples: Integers,
) -> Average:
    """Return the weighted mean of the participants' updates, and the distance of each participant from it.

    `offset` is base - start, or None for zero; `samples` are those of each participant.
    """
    count = samples.size
    weights = samples / samples.sum()
    shares = torch.from_numpy(weights)
    sums = [some.weighted_sum(shares) for some in updates]
    mean = sum(sums[1:], start=sums[0])
    step = mean.numpy() if offset is None else offset + mean.numpy()
    mean_norm = norm_up(mean.numpy())
    if not (math.isfinite(mean_norm) or np.isfinite(mean.numpy()).all()):
        return Average(step, np.zeros(count), 0.0, _not_finite(updates))
    drifts = np.zeros(count)
    if count > 1:  # a single model equals its mean exactly
        for some in updates:
            some.distances(mean, drifts)
    mean_error = sum(some.sum_error(weights, mean_norm) for some in updates)
    if count > 1:
        drifts += mean_error
        drifts = np.where(drifts == 0.0, 0.0, np.nextafter(drifts, np.inf))
        drifts[np.isnan(drifts)] = np.inf  # an overflow leaves no finite bound
    shift = mean_norm if offset is None else norm_up(step)
    if mean_error:
        shift = up(shift + mean_error)
    return Average(step, drifts, shift, ())


def average_models(local_models: LocalModels, start: Floats, samples: Integers, item_bytes: int) -> Average:
    """Return the mean of complete local models minus `start`, and the distance of each model from the mean."""
    keep = samples.size * start.size * item_bytes <= KEEP_BYTES
    return average([RowUpdates(local_models, keep)], -start, samples)


def _repaired(norms: Floats, rows: Floats) -> Floats:
    """Return `norms`; recompute with scaling each norm whose square may have over- or underflowed."""
    trusted = (norms > 1e-140) & (norms < 1e140)
    if not trusted.all():
        for place in np.flatnonzero(~trusted):
            norms[place] = norm_up(rows[place])
    return norms


def _not_finite(updates: Sequence[LocalUpdates]) -> tuple[int, ...]:
    """Return the places of participants whose model contains NaN or Inf."""
    bad: list[int] = []
    for some in updates:
        for places, rows in some.rows():
            if isinstance(places, slice):
                places = np.arange(places.start, places.stop)
            bad.extend(places[~torch.isfinite(rows).all(dim=1).numpy()].tolist())
    return tuple(sorted(bad))
