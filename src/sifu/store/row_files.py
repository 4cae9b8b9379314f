"""Files of a client's rows: its samples in fixed point, whole or in parts (docs/store.md, section 5a).

A file begins with a line that names its numbers. The features of the part follow, row by row, then the targets where
the file has the public part or all of it, as little-endian int32 numbers; the salt comes last. Dropping a
group's block deletes files and never rewrites one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from sifu.errors import InputError
from sifu.theory.closed_form import FixedPoint, Rows
from sifu.theory.closed_form.blocks import Blocks, Part, places_of_rows
from sifu.theory.closed_form.rows import ROW_TYPE

WHOLE: Part = (-1,)
"""The only part of what is not cut."""


def rows_heading(fixed: FixedPoint, name: str | None) -> bytes:
    """Return the line that a file of rows begins with; `name` is that of its part, None where it has all of them."""
    return f"sifu rows 1 {fixed.describe()}{'' if name is None else f' part={name}'}\n".encode()


def part_of_rows(rows: Rows, blocks: Blocks | None, part: Part) -> bytes:
    """Return the numbers of one part of rows, as its file has them between heading and salt."""
    places = _places(rows.fixed, blocks, part)
    return rows.features[:, places].tobytes() + (rows.targets.tobytes() if _has_targets(part) else b"")


def rows_of_parts(
    fixed: FixedPoint, blocks: Blocks | None, samples: int, contents: Mapping[Part, bytes | memoryview]
) -> Rows:
    """Return the rows whose parts these are; features of parts that are not among them are zero.

    Raises:
        InputError: If a part does not have the numbers of this many samples, or a sample is longer than allowed.
    """
    features = np.zeros((samples, fixed.features), dtype=ROW_TYPE)
    targets = np.zeros((samples, fixed.outputs), dtype=ROW_TYPE)
    for part, content in contents.items():
        places = _places(fixed, blocks, part)
        expected = samples * (places.size + (fixed.outputs if _has_targets(part) else 0)) * ROW_TYPE.itemsize
        if len(content) != expected:
            raise InputError(f"rows of {samples} samples have {len(content)} bytes, not {expected}")
        numbers = np.frombuffer(content, ROW_TYPE)
        features[:, places] = numbers[: samples * places.size].reshape(samples, places.size)
        if _has_targets(part):
            targets[:] = numbers[samples * places.size :].reshape(samples, fixed.outputs)
    rows = Rows(fixed, features, targets)
    rows.check("the file")
    return rows


def bytes_of_parts(fixed: FixedPoint, blocks: Blocks | None, samples: int, parts: Iterable[Part]) -> int:
    """Return how many bytes the numbers of these parts have."""
    numbers = [_places(fixed, blocks, part).size + fixed.outputs * _has_targets(part) for part in parts]
    return samples * sum(numbers) * ROW_TYPE.itemsize


def _places(fixed: FixedPoint, blocks: Blocks | None, part: Part) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(fixed.features) if blocks is None else places_of_rows(blocks, part)


def _has_targets(part: Part) -> bool:
    return part in ((), WHOLE)
