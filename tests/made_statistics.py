"""Statistics of a head with any content, as a hostile client may send them."""

from __future__ import annotations

import numpy as np

from sifu.theory.arrays import Integers
from sifu.theory.closed_form import FixedPoint, Statistics


def made_statistics(fixed: FixedPoint, gram: Integers, cross: Integers, samples: int, target_energy: int) -> Statistics:
    """Return the statistics with these G, H, n and q; only the lower triangle of G is used."""
    triangle = [gram[row, : row + 1] for row in range(fixed.width)]
    return Statistics(fixed, np.concatenate([*triangle, cross.ravel(), [samples, target_energy]], dtype=np.int64))
