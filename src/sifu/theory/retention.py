"""Which models are kept while training, and which are erased after a request (docs/theory.md, sections 9.5 and 9.6).

With L >= 1, Psi only grows, so theta^n is needed later only if round n+1 takes some client across the
level Psi* it will be held to: it is written then, and only then, so at most one model a client and level. When
sigma is chosen at the request, Psi* is not known beforehand; the same rule is applied to a geometric
ladder of levels and the result thinned to a stated number of models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from sifu.choices import Retention
from sifu.errors import InputError
from sifu.theory.arrays import Floats


def level_ladder(lowest: float, highest: float, ratio: float) -> Floats:
    """Levels lowest, lowest * ratio, ... up to `highest`.

    >>> level_ladder(1.0, 2.0, 1.25).round(4)
    array([1.    , 1.25  , 1.5625, 1.9531])
    """
    if not (0.0 < lowest <= highest < math.inf and ratio > 1.0):
        raise InputError(f"levels need 0 < lowest <= highest and ratio > 1, found {lowest}, {highest}, {ratio}")
    count = math.floor(math.log(highest / lowest) / math.log(ratio) + 1e-9) + 1
    return np.asarray(lowest * ratio ** np.arange(count), dtype=np.float64)


def crosses_a_level(levels: Floats, before: Floats, after: Floats) -> bool:
    """Whether some client goes from at most a level to above it: Psi(n) <= level < Psi(n+1)."""
    return bool((levels.searchsorted(after) > levels.searchsorted(before)).any())


def thin(depths: Sequence[int], protected: set[int], limit: int) -> list[int]:
    """Depths to drop so that at most `limit` stay; protected ones always stay.

    Rolling back k rounds too far costs k rounds again, and early rounds are the ones that gain most, so the
    next to go is always the one whose neighbours are closest together relative to how far training had got.
    """
    kept, dropped = sorted(depths), []
    while len(kept) > limit:
        middle = [i for i in range(1, len(kept) - 1) if kept[i] not in protected]
        if not middle:
            break
        closest = min(middle, key=lambda i: (kept[i + 1] - kept[i - 1]) / (kept[i] + 8.0))
        dropped.append(kept.pop(closest))
    return dropped


def depths_to_erase(
    depths: Sequence[int],
    cut_after: int,
    retention: Retention,
    uncovered_trace: Callable[[int], bool],
) -> list[int]:
    """Kept depths whose models must go after a rollback to `cut_after`.

    Everything later is cut off the history and still holds the forgotten. Under `strict`, so does every
    node at or before it with Psi(n, f) > 0 and no f-charged noise edge on its path (`uncovered_trace`).
    """
    return [depth for depth in depths if depth > cut_after or (retention == "strict" and uncovered_trace(depth))]
