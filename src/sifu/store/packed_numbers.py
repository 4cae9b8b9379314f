"""Lossless packing of the whole numbers in statistics files (docs/store.md, section 5a).

Statistics are int64 and rows are int32, but most of their high bytes only repeat the sign. A number of 2h bytes is
divided into its lower half, which is stored unchanged, and its upper half, a signed number of h bytes. Upper halves are
stored in runs of `RUN` numbers. Each run uses the smallest width (0, 1, 2 or 4 bytes per number) that fits all of its
numbers. This makes files of rows half as large and sums a third smaller, and is about as fast as a copy.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sifu.errors import InputError

Numbers = NDArray[np.signedinteger]
RUN = 64
"""Number of values in a run; their upper halves share one width."""
COUNT_TYPE = np.dtype("<u8")
"""Type of the first number of packed content, which counts the numbers that follow."""


def pack(numbers: Numbers, before: bytes = b"", after: bytes = b"") -> memoryview:
    """Return int32 or int64 numbers in packed form, preceded by `before` and followed by `after`.

    >>> len(pack(np.arange(6400, dtype=np.int64))), 8 * 6400
    (25708, 51200)
    """
    values = np.ascontiguousarray(numbers).reshape(-1)
    values = values.astype(values.dtype.newbyteorder("<"), copy=False)
    count, half = values.size, values.dtype.itemsize // 2
    if count % RUN:
        values = np.concatenate([values, np.zeros(-count % RUN, dtype=values.dtype)])
    lower, upper = _halves(values)
    widths = _widths(values.reshape(-1, RUN), half)
    counted = np.array(count, dtype=COUNT_TYPE).tobytes()
    size = len(counted) + lower.nbytes + widths.nbytes + RUN * int(widths.sum(dtype=np.int64))
    content = np.empty(len(before) + size + len(after), dtype=np.uint8)
    start = len(before) + len(counted)
    content[:start] = np.frombuffer(before + counted, np.uint8)
    content[start : start + lower.nbytes].view(lower.dtype)[:] = lower
    start += lower.nbytes
    content[start : start + widths.nbytes] = widths
    start += widths.nbytes
    for width in _choices(half):
        runs = upper[widths == width].astype(f"<i{width}").reshape(-1)
        content[start : start + runs.nbytes].view(runs.dtype)[:] = runs
        start += runs.nbytes
    content[start:] = np.frombuffer(after, np.uint8)
    return content.data


def unpack(content: bytes | memoryview, kind: np.dtype[np.signedinteger]) -> Numbers:
    """Return the numbers in packed content.

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
    values = np.empty(runs * RUN, dtype=kind.newbyteorder("<"))
    lower_halves, upper_halves = _halves(values)
    lower_halves[:] = lower
    for width in (0, *_choices(half)):
        there = widths == width
        found = int(np.count_nonzero(there))
        upper_halves[there] = (
            np.frombuffer(content, f"<i{width}", found * RUN, start).reshape(found, RUN) if width else 0
        )
        start += found * RUN * width
    return values[:count]


def _halves(values: Numbers) -> tuple[NDArray[np.unsignedinteger], Numbers]:
    """Return views of the lower halves of little-endian numbers, and of their upper halves in runs."""
    half = values.dtype.itemsize // 2
    return values.view(f"<u{half}")[::2], values.view(f"<i{half}")[1::2].reshape(-1, RUN)


def _choices(half: int) -> tuple[int, ...]:
    """Return the possible widths, besides 0, of runs of upper halves with `half` bytes."""
    return tuple(width for width in (1, 2, 4) if width <= half)


def _widths(runs: Numbers, half: int) -> NDArray[np.uint8]:
    """Return the fewest bytes per number that hold the upper halves of each run."""
    least, most = runs.min(axis=1, initial=0) >> 8 * half, runs.max(axis=1, initial=0) >> 8 * half
    widths = np.full(len(runs), half, dtype=np.uint8)
    for width in reversed(_choices(half)):
        bound = 1 << (8 * width - 1)
        widths[(least >= -bound) & (most < bound)] = width
    widths[(least == 0) & (most == 0)] = 0
    return widths
