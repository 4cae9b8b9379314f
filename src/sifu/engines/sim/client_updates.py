"""The server's side of a round: the weighted mean, and how far each client's model is from it.

    mean = sum_i w_i theta_i,   w_i = |D_i| / sum_j |D_j|,   drift_i = ||theta_i - mean||

(eq. 5 of the paper; docs/theory.md, section 2.1). Models come as theta_i = base + u_i with one `base` for all of them
(zero, or a multiple of the model the round started from), so that mean = base + m with m = sum_i w_i u_i, and
drift_i = ||u_i - m||: the base drops out. Everything is float64, whatever the models are, and every norm is an upper
bound of the norm to the *exact* mean (section 6.2 has the errors): of rows u_i where they are available, and of duals
u_i = X_i' V_i of linear models trained between samples, where no u_i needs to be built.

Clipped and noised updates: theta' = theta + g sum_i w_i (c_i + z C xi_i) with ||c_i|| <= C.

c_i = u_i min(1, C / ||u_i||) is the update u_i = theta_i - theta of client i, clipped. The order of the sums matters
for what can be proven (docs/theory.md, section 10): the clipped updates are averaged by themselves, so their
rounding is bounded by C alone; the noise is averaged on its own and touches no data; one addition joins them, and
what follows is post-processing. Clipping is exact: the norm of c_i is at most C for the very numbers that are
averaged, since ||u_i|| is rounded up and the factor down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sifu.core.engine import Position
from sifu.core.round import Average, NoiseSource, NormalSource, SystemNormals, keyed_generator
from sifu.core.spec import Spec
from sifu.engines.sim.embedded_clients import Part, PartPlaces
from sifu.theory.arrays import Floats, Integers
from sifu.theory.participation import ClientIndices
from sifu.theory.rounding import ROUNDED_DOWN, ROUNDED_UP, UNIT_ROUNDOFF, enlargement, norm_up, up

LocalModels = Callable[[], Iterator[tuple[PartPlaces, Tensor]]]
"""Trains the participants when called: pairs of (places among them, rows of flat models)."""

KEEP_BYTES = 2**30
"""Local models are kept between the two passes up to this size, and trained again beyond it."""
TOLERATED_EXCESS = 1e-6
"""A drift found without building models exceeds the computed value by no more than this, relatively."""


class RowUpdates:
    """The u_i of some participants, made row by row, to be changed in place; kept between the passes if `keep`.

    `DualUpdates` has the same methods. Places are those of these participants among all.
    """

    def __init__(self, make: LocalModels, keep: bool) -> None:
        self._make, self._keep = make, keep
        self._kept: list[tuple[PartPlaces, Tensor]] | None = None
        self._centred = False
        self._largest = 0.0

    def rows(self) -> Iterator[tuple[PartPlaces, Tensor]]:
        """The u_i themselves: (places, rows); not asked for after `distances`."""
        if self._kept is not None:
            yield from self._kept
            return
        kept = []
        for places, rows in self._make():
            if self._keep:
                kept.append((places, rows))
            yield places, rows
        if self._keep:
            self._kept = kept

    def differences(self, mean: Tensor) -> Iterator[tuple[PartPlaces, Tensor]]:
        """u_i - mean in float64: (places, rows)."""
        if self._centred:
            yield from self.rows()
            return
        kept = []
        for places, rows in self.rows():
            rows = rows.to(torch.float64).sub_(mean)
            if self._keep:
                kept.append((places, rows))
            yield places, rows
        if self._keep:
            self._kept, self._centred = kept, True

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """sum_i w_i u_i over these participants, from the weights of all, in float64."""
        sums = [weights[places] @ rows.to(torch.float64) for places, rows in self.rows()]
        return sum(sums[1:], start=sums[0])

    def distances(self, mean: Tensor, norms: Floats) -> None:
        """Put upper bounds of ||u_i - mean|| to their places in `norms`."""
        factor = enlargement(mean.numel())
        for places, difference in self.differences(mean):
            lengths = torch.linalg.vector_norm(difference, dim=1).numpy()
            lengths = _repaired(lengths, difference.numpy()) * factor
            norms[places] = lengths
            self._largest = max(self._largest, float(lengths.max()))

    def sum_error(self, weights: Floats, mean_norm: float) -> float:
        """How far `weighted_sum`, added up with all others, can be from exact; asked for after `distances`."""
        if weights.size == 1:
            return 0.0
        return (weights.size + 2) * UNIT_ROUNDOFF * (mean_norm + self._largest) * 1.001

    def add_row_errors(self, errors: Floats) -> None:
        """Add to each place of `errors` how far its row of `differences` can be from u_i - mean: here nothing.

        Rows are the u_i themselves; the one rounding of a difference is within what a Gram form adds.
        """


class DualUpdates:
    """Updates u_i = X_i' V_i of clients of a linear model, by V_i' (clients, outputs, rows) in float64."""

    def __init__(self, part: Part, gram: Tensor, dual: Tensor, keep: bool) -> None:
        self._part, self._gram, self._dual = part, gram, dual
        self._let_go: Callable[[], None] = (lambda: None) if keep else part.let_go
        lengths = _repaired(torch.linalg.vector_norm(dual, dim=(1, 2)).numpy(), dual.flatten(1).numpy())
        self._sizes = part.lengths * lengths * enlargement(dual[0].numel() + 4)
        """F_i, rounded up."""

    def rows(self) -> Iterator[tuple[PartPlaces, Tensor]]:
        yield self._part.places, self._part.pulled_back(self._dual).flatten(1)

    def differences(self, mean: Tensor) -> Iterator[tuple[PartPlaces, Tensor]]:
        for places, rows in self.rows():
            yield places, rows.sub_(mean)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = self._part.summed(self._dual * weights[self._part.places][:, None, None]).flatten()
        self._let_go()
        return total

    def distances(self, mean: Tensor, norms: Floats) -> None:
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
            # Written so that NaN is not trusted either.
            trusted = (slack <= TOLERATED_EXCESS * square) & (square > 1e-280) & (square < 1e280)
        if not trusted.all():
            doubtful = np.flatnonzero(~trusted)
            chosen = torch.from_numpy(doubtful)
            built = torch.bmm(dual[chosen], self._part.x[chosen]).flatten(1) - mean
            lengths = _repaired(torch.linalg.vector_norm(built, dim=1).numpy(), built.numpy()) * enlargement(size)
            distances[doubtful] = lengths + (samples + 2) * UNIT_ROUNDOFF * self._sizes[doubtful] * 1.01
        norms[self._part.places] = distances
        self._let_go()

    def sum_error(self, weights: Floats, mean_norm: float) -> float:
        roundings = self._dual.shape[0] * self._dual.shape[2] + weights.size + 4
        return float(weights[self._part.places] @ self._sizes) * roundings * UNIT_ROUNDOFF * 1.001

    def add_row_errors(self, errors: Floats) -> None:
        """X_i' V_i is built by inner products of as many terms as a client has rows."""
        errors[self._part.places] += (self._dual.shape[2] + 2) * UNIT_ROUNDOFF * self._sizes * 1.01


LocalUpdates = RowUpdates | DualUpdates


def average(
    updates: Sequence[LocalUpdates],
    offset: Floats | None,
    offset_error: float,
    samples: Integers,
    want_gram: bool,
) -> Average:
    """Average participants with `samples` samples each; `offset` is base - start, off by at most `offset_error`.

    None is an offset of zero.

    Gram entries are plain float64 inner products of differences to the mean as it was computed: `gram_errors` says how
    far these are off.
    """
    count = samples.size
    weights = samples / samples.sum()
    shares = torch.from_numpy(weights)
    sums = [some.weighted_sum(shares) for some in updates]
    mean = sum(sums[1:], start=sums[0])
    step = mean.numpy() if offset is None else offset + mean.numpy()
    mean_norm = norm_up(mean.numpy())
    if not (math.isfinite(mean_norm) or np.isfinite(mean.numpy()).all()):
        return Average(step, np.zeros(count), 0.0, None, _not_finite(updates))
    drifts = np.zeros(count)
    if count > 1:  # a single model is its own mean, exactly
        for some in updates:
            some.distances(mean, drifts)
    mean_error = sum(some.sum_error(weights, mean_norm) for some in updates)
    if count > 1:
        drifts += mean_error
        drifts = np.where(drifts == 0.0, 0.0, np.nextafter(drifts, np.inf))
        drifts[np.isnan(drifts)] = np.inf  # what overflowed on the way bounds nothing
    shift = mean_norm if offset is None else norm_up(step)
    if mean_error or offset_error:
        shift = up(shift + mean_error + offset_error)
    if not want_gram:
        return Average(step, drifts, shift, None, ())
    errors = np.full(count, mean_error if count > 1 else 0.0)
    for some in updates if count > 1 else ():
        some.add_row_errors(errors)
    return Average(step, drifts, shift, _gram(updates, mean, count), (), gram_errors=errors)


def average_models(
    local_models: LocalModels, start: Floats, samples: Integers, item_bytes: int, want_gram: bool
) -> Average:
    """Average whole local models, trained from `start`."""
    keep = want_gram or samples.size * start.size * item_bytes <= KEEP_BYTES
    return average([RowUpdates(local_models, keep)], -start, 0.0, samples, want_gram)


def _gram(updates: Sequence[LocalUpdates], mean: Tensor, count: int) -> Floats:
    differences = torch.zeros((count, mean.numel()), dtype=torch.float64)
    for some in updates if count > 1 else ():
        for places, rows in some.differences(mean):
            differences[places] = rows
    return (differences @ differences.T).numpy()


def _repaired(norms: Floats, rows: Floats) -> Floats:
    """Norms whose squares over- or underflowed, computed again with scaling."""
    trusted = (norms > 1e-140) & (norms < 1e140)
    if not trusted.all():
        for place in np.flatnonzero(~trusted):
            norms[place] = norm_up(rows[place])
    return norms


def _not_finite(updates: Sequence[LocalUpdates]) -> tuple[int, ...]:
    """Places of the participants whose model holds a NaN or an Inf."""
    bad: list[int] = []
    for some in updates:
        for places, rows in some.rows():
            if isinstance(places, slice):
                places = np.arange(places.start, places.stop)
            bad.extend(places[~torch.isfinite(rows).all(dim=1).numpy()].tolist())
    return tuple(sorted(bad))


OUTSIDE = "clipping of updates"
"""What `TrainingFacts.outside` says of it: theta + clip(u(theta)) may expand distances, so no bound on L holds."""


def clip_rows(updates: NDArray[np.floating], clip: float) -> Floats:
    """Each row scaled to a norm of at most `clip`, exactly; rows within it stay as they are, NaN and Inf stay bad.

    >>> clip_rows(np.array([[3.0, 4.0], [0.3, 0.4]]), 1.0).round(6).tolist()
    [[0.6, 0.8], [0.3, 0.4]]
    """
    rows = np.asarray(updates, dtype=np.float64)
    norms = np.array([norm_up(row) for row in rows])
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        factors = np.where(norms <= clip, 1.0, clip / norms * ROUNDED_DOWN)
        return rows * factors[:, None]


@dataclass(frozen=True)
class Clipping:
    """Clipping to `clip`, and noise of `noise` times that, from the operating system or keyed by place."""

    clip: float
    noise: float
    source: NoiseSource
    seed: int

    @staticmethod
    def of(spec: Spec) -> Clipping | None:
        """Return what the spec's extensions ask for; None where updates are averaged as they are."""
        extras = spec.round_extras
        if extras.update_clip == 0.0:
            return None
        return Clipping(extras.update_clip, extras.update_noise, spec.privacy.noise, spec.seed)

    def average(
        self,
        updates: NDArray[np.floating],
        position: Position,
        numbers: ClientIndices,
        samples: Integers,
        want_gram: bool,
    ) -> Average:
        """Clip, add noise, average: `updates` are the c_i + noise_i as they were sent, `step` is their mean.

        `numbers` are those that noise is drawn for, where it is keyed.
        """
        sent = clip_rows(updates, self.clip)
        count, size = sent.shape
        bad = tuple(int(place) for place in np.flatnonzero(~np.isfinite(sent).all(axis=1)))
        if bad:
            return Average(np.zeros(size), np.zeros(count), 0.0, None, bad, updates=sent)
        weights = samples / samples.sum()
        step = weights @ sent
        if self.noise > 0.0:
            noises = np.stack([self._draw(position, int(number), size) for number in numbers])
            step = step + weights @ noises
            sent = sent + noises
        differences = sent - step
        drifts = np.linalg.norm(differences, axis=1) * enlargement(size)
        largest = float(drifts.max()) + norm_up(step)
        error = (count + 4) * UNIT_ROUNDOFF * largest * 1.01  # of the two weighted sums and what joins them
        gram = differences @ differences.T if want_gram else None
        drifts = (drifts + error) * ROUNDED_UP
        # Twice: an update with its noise was rounded, too.
        errors = np.full(count, 2.0 * error)
        return Average(step, drifts, norm_up(step) + error, gram, (), updates=sent, gram_errors=errors)

    def _draw(self, position: Position, client: int, size: int) -> Floats:
        normals: NormalSource = SystemNormals()
        if self.source == "seeded":
            normals = keyed_generator(self.seed, "training noise", position.branch, position.round, client)
        return self.noise * self.clip * normals.standard_normal(size)
