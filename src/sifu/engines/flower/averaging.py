"""The mean of replies that are all at hand, and every drift, in one walk over them.

Replies are read in blocks small enough to stay in the processor's cache: a block's mean is made and every client's
distance to it added up before the next block is touched. Tracking so costs arithmetic on numbers that are at hand, and
never a second trip through memory. The bounds are those of rows in `sifu.engines.sim.averaging`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sifu.core.layout import Vector
from sifu.core.round import Average
from sifu.theory.arrays import Floats, Integers
from sifu.theory.rounding import UNIT_ROUNDOFF, enlargement, norm_up, up

BLOCK_WORDS = 2**17
"""Numbers of all replies together in a block: a megabyte."""


def average_replies(rows: Sequence[Vector], start: Floats, samples: Integers, want_gram: bool) -> Average:
    """The mean of `rows` less `start`, and each row's distance to the mean, rounded up; see `Average`."""
    count, size = len(rows), start.size
    weights = samples / samples.sum()
    mean, squares = np.empty(size), np.zeros(count)
    gram = np.zeros((count, count)) if want_gram else None
    width = max(1, BLOCK_WORDS // count)
    held = np.empty((count, min(width, size)))
    with np.errstate(over="ignore", invalid="ignore"):
        for first in range(0, size, width):
            block = held[:, : min(width, size - first)]
            for place, row in enumerate(rows):
                block[place] = row[first : first + width]
            here = weights @ block
            mean[first : first + width] = here
            block -= here
            for place, difference in enumerate(block):
                squares[place] += difference @ difference
            if gram is not None:
                gram += block @ block.T
        norms = np.sqrt(squares) * enlargement(size)
    bad = tuple(place for place in np.flatnonzero(~np.isfinite(norms)).tolist() if not np.isfinite(rows[place]).all())
    if bad or not np.isfinite(mean).all():
        return Average(mean - start, np.zeros(count), 0.0, None, bad)
    trusted = (norms > 1e-140) & (norms < 1e140)
    for place in np.flatnonzero(~trusted).tolist():  # its squares over- or underflowed
        norms[place] = norm_up(rows[place].astype(np.float64) - mean)
    # A float64 sum of M weighted rows is off by at most (M + 2) u max ||row||.
    error = (count + 2) * UNIT_ROUNDOFF * (norm_up(mean) + float(norms.max())) * 1.001 if count > 1 else 0.0
    step = mean - start
    if count == 1:  # a single model is its own mean, exactly
        return Average(step, np.zeros(1), norm_up(step), np.zeros((1, 1)) if want_gram else None, ())
    drifts = np.where(norms + error > 0.0, np.nextafter(norms + error, np.inf), 0.0)
    return Average(step, drifts, up(norm_up(step) + error), gram, ())
