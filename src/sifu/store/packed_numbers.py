"""Whole numbers in fewer bytes, exactly: the numbers of statistics files (docs/store.md, section 5a).

Statistics are int64 and rows int32, but most of their high bytes only repeat the sign. A number of 2h bytes is divided
into its lower half, h bytes as they are, and its upper half, a signed number of h bytes. Upper halves are stored in
runs of `RUN` numbers, each run in the fewest of 0, 1, 2 or 4 bytes per number that hold all of it. This halves rows of
features and saves a third of a sum, at the speed of a copy.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sifu.errors import InputError

Numbers = NDArray[np.signedinteger]
RUN = 64
"""Numbers whose upper halves have the same width."""
COUNT_TYPE = np.dtype("<u8")
"""Type of the first number of packed content: how many numbers follow."""


def pack(numbers: Numbers) -> bytes:
    """Return int32 or int64 numbers in packed form.

    >>> len(pack(np.arange(6400, dtype=np.int64))), 8 * 6400
    (25708, 51200)
    """
    values = np.ascontiguousarray(numbers).reshape(-1)
    count, half = values.size, values.dtype.itemsize // 2
    if count % RUN:
        values = np.concatenate([values, np.zeros(-count % RUN, dtype=values.dtype)])
    lower = values.astype(f"<u{half}")
    upper = (values >> (8 * half)).astype(f"<i{half}").reshape(-1, RUN)
    widths = _widths(upper)
    runs = (upper[widths == width].astype(f"<i{width}").tobytes() for width in _choices(half))
    return b"".join((np.array(count, dtype=COUNT_TYPE).tobytes(), lower.tobytes(), widths.tobytes(), *runs))


def unpack(content: bytes | memoryview, kind: np.dtype[np.signedinteger]) -> Numbers:
    """Return the numbers of packed content.

    Args:
        content: Result of `pack`.
        kind: Type of the numbers that were packed, int32 or int64.

    Raises:
        InputError: If the content is not packed numbers of this type.
    """
    half, first = kind.itemsize // 2, COUNT_TYPE.itemsize
    count = int(np.frombuffer(content, COUNT_TYPE, 1)[0]) if len(content) >= first else 0
    runs = -(-count // RUN)
    start = first + runs * RUN * half
    if len(content) < start + runs:
        raise InputError(f"packed numbers have {len(content)} bytes, too few for {count} numbers")
    lower = np.frombuffer(content, f"<u{half}", runs * RUN, first)
    widths = np.frombuffer(content, np.uint8, runs, start)
    start += runs
    if len(content) != start + RUN * int(widths.sum(dtype=np.int64)) or np.setdiff1d(widths, (0, *_choices(half))).size:
        raise InputError(f"packed numbers have {len(content)} bytes, which their widths do not explain")
    upper = np.zeros((runs, RUN), dtype=kind)
    for width in _choices(half):
        there = widths == width
        found = int(np.count_nonzero(there))
        upper[there] = np.frombuffer(content, f"<i{width}", found * RUN, start).reshape(found, RUN)
        start += found * RUN * width
    values = upper.reshape(-1)
    values <<= 8 * half
    values |= lower
    return values[:count]


def _choices(half: int) -> tuple[int, ...]:
    """Return the widths, besides 0, that runs of upper halves of this many bytes may have."""
    return tuple(width for width in (1, 2, 4) if width <= half)


def _widths(upper: Numbers) -> NDArray[np.uint8]:
    """Return the fewest bytes per number that hold each run."""
    least, most = upper.min(axis=1, initial=0), upper.max(axis=1, initial=0)
    widths = np.full(len(upper), upper.dtype.itemsize, dtype=np.uint8)
    for width in reversed(_choices(upper.dtype.itemsize)):
        bound = 1 << (8 * width - 1)
        widths[(least >= -bound) & (most < bound)] = width
    widths[(least == 0) & (most == 0)] = 0
    return widths
