"""Clipped and noised updates: theta' = theta + g sum_i w_i (c_i + z C xi_i) with ||c_i|| <= C.

c_i = u_i min(1, C / ||u_i||) is the update u_i = theta_i - theta of client i, clipped. The order of the sums matters
for what can be proven (docs/theory.md, section 10): the clipped updates are averaged by themselves, so their
rounding is bounded by C alone; the noise is averaged by itself and touches no data; one addition joins them, and
what follows is post-processing. Everything is float64, also where the model is not.

Clipping is exact: the norm of c_i is at most C for the very numbers that are averaged, since ||u_i|| is rounded up
and the factor down.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sifu.core.engine import Position
from sifu.core.randomness import NoiseSource, NormalSource, SystemNormals, keyed_generator
from sifu.core.round import Average
from sifu.theory.arrays import Floats, Integers
from sifu.theory.participation import ClientIndices
from sifu.theory.rounding import ROUNDED_DOWN, ROUNDED_UP, UNIT_ROUNDOFF, enlargement, norm_up

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
