"""Conservative floating point: sensitivities are rounded up, thresholds rounded down (docs/theory.md, section 6).

Norms in float32 are too small (by 2e-4 at 4 million parameters), so every norm is accumulated in float64 and then
enlarged by a bound on the error of that accumulation.
"""

from __future__ import annotations

import math
from typing import overload

import numpy as np
from numpy.typing import NDArray

from sifu.theory.arrays import Floats, Integers

UNIT_ROUNDOFF = 2.0**-53
"""Unit roundoff u: half the distance from 1 to the next float64."""


def norm(vector: NDArray[np.floating]) -> float:
    """Return the Euclidean norm of a vector, summed in float64 by the calling thread alone.

    `np.linalg.norm` passes long vectors to the threads of BLAS. These threads then wait for more work in a busy loop,
    and for tens of milliseconds occupy the cores that train clients.

    >>> norm(np.array([3.0, 4.0]))
    5.0
    """
    return math.sqrt(sum_of_squares(np.asarray(vector, dtype=np.float64).reshape(-1)))


def sum_of_squares(flat: Floats) -> float:
    """Return ||flat||^2, summed by the calling thread alone.

    >>> sum_of_squares(np.array([3.0, 4.0]))
    25.0
    """
    return float(np.einsum("i,i->", flat, flat))


def root_up(squares: float, terms: int) -> float | None:
    """Return an upper bound on the norm of `terms` numbers, given the sum of their squares in any order.

    The result is None if squares may have over- or underflowed: scale the numbers first, as `norm_up` does. A sum of d
    squares in any order is off by at most a factor 1 + d*u (Higham 2002, section 3.1).

    >>> root_up(25.0, 2) >= 5.0, root_up(0.0, 2)
    (True, None)
    """
    length = math.sqrt(squares)
    return math.nextafter(length * enlargement(terms), math.inf) if 1e-140 < length < 1e140 else None


def norm_up(vector: NDArray[np.floating]) -> float:
    """Return an upper bound on the Euclidean norm, too large by a factor of about 1 + (d + 8) * 2**-52 (see `root_up`).

    >>> norm_up(np.array([3.0, 4.0])) >= 5.0
    True
    """
    flat = np.asarray(vector, dtype=np.float64).reshape(-1)
    length = root_up(sum_of_squares(flat), flat.size)
    if length is not None:
        return length
    # Squares over- or underflow: scale first.
    largest = float(np.max(np.abs(flat), initial=0.0))
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    return math.nextafter(norm(flat / largest) * largest * enlargement(flat.size), math.inf)


@overload
def slack(operations: int) -> float: ...
@overload
def slack(operations: Integers) -> Floats: ...
def slack(operations: int | Integers) -> float | Floats:
    """Return 1 + 2u * operations, the factor that turns a result of `operations` operations into an upper bound.

    Each float64 operation is off by at most a factor 1 + u; 2u leaves room for the products of these factors and for
    the multiplication by the slack itself.

    >>> slack(4) == 1.0 + 2.0**-50
    True
    """
    if isinstance(operations, int):
        return 1.0 + operations * (2.0 * UNIT_ROUNDOFF)
    return np.asarray(1.0 + operations * (2.0 * UNIT_ROUNDOFF), dtype=np.float64)


ROUNDED_UP = slack(4)
"""Factor that makes the result of at most four operations an upper bound."""
ROUNDED_DOWN = 2.0 - ROUNDED_UP
"""Factor that makes the result of at most four operations a lower bound: 1 - 2**-50."""


def enlargement(terms: int) -> float:
    """Return the factor that turns the square root of a float64 sum of `terms` terms into an upper bound."""
    return slack(terms + 8)


def up(value: float) -> float:
    """Return the next float above `value` (0 for 0), an upper bound if `value` is the result of one operation."""
    return math.nextafter(value, math.inf) if value != 0.0 else 0.0


def down(value: float) -> float:
    """Return the next float below a positive `value`, never below zero."""
    return max(0.0, math.nextafter(value, -math.inf))
