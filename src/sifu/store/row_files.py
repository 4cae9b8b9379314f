"""Files of a client's rows: its samples in fixed point, complete or in parts (docs/store.md, section 5a).

A file begins with a line that describes its numbers. The features of the part follow, row by row. In the public part
and in a complete file, the targets come next. All numbers are packed int32 (`packed_numbers`). The salt comes last.
To drop a group's block, files are deleted; none is rewritten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from sifu.errors import InputError
from sifu.store.packed_numbers import Numbers
from sifu.theory.closed_form import FixedPoint, Rows
from sifu.theory.closed_form.blocks import Blocks, Part, places_of_rows
from sifu.theory.closed_form.rows import ROW_TYPE

WHOLE: Part = (-1,)
"""The single part of rows or statistics that are not divided."""


def part_of_rows(rows: Rows, blocks: Blocks | None, part: Part) -> Numbers:
    """Return the numbers of one part of the rows, in the order in which the file packs them."""
    features = rows.features[:, _places(rows.fixed, blocks, part)].ravel()
    return np.concatenate([features, rows.targets.ravel()]) if _has_targets(part) else features


def rows_of_parts(fixed: FixedPoint, blocks: Blocks | None, samples: int, contents: Mapping[Part, Numbers]) -> Rows:
    """Return the rows that consist of these parts; features of missing parts are zero.

    Args:
        fixed: Fixed-point format of the numbers.
        blocks: Division of the features into parts, or None if they are not divided.
        samples: Number of rows.
        contents: Numbers of each part.

    Raises:
        InputError: If the size of a part does not match `samples`, or the norm of a sample exceeds its bound.
    """
    features = np.zeros((samples, fixed.features), dtype=ROW_TYPE)
    targets = np.zeros((samples, fixed.outputs), dtype=ROW_TYPE)
    for part, numbers in contents.items():
        places = _places(fixed, blocks, part)
        expected = samples * (places.size + (fixed.outputs if _has_targets(part) else 0))
        if numbers.size != expected:
            raise InputError(f"rows of {samples} samples have {numbers.size} numbers, not {expected}")
        features[:, places] = numbers[: samples * places.size].reshape(samples, places.size)
        if _has_targets(part):
            targets[:] = numbers[samples * places.size :].reshape(samples, fixed.outputs)
    rows = Rows(fixed, features, targets)
    rows.check("the file")
    return rows


def bytes_of_parts(fixed: FixedPoint, blocks: Blocks | None, samples: int, parts: Iterable[Part]) -> int:
    """Return the size in bytes of the numbers of these parts."""
    numbers = [_places(fixed, blocks, part).size + fixed.outputs * _has_targets(part) for part in parts]
    return samples * sum(numbers) * ROW_TYPE.itemsize


def _places(fixed: FixedPoint, blocks: Blocks | None, part: Part) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(fixed.features) if blocks is None else places_of_rows(blocks, part)


def _has_targets(part: Part) -> bool:
    return part in ((), WHOLE)
