"""Whether what is recorded agrees with what is recomputed: figures, and whole JSON values field by field."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

TOLERANCE = 1e-9
"""Another processor or library may differ in the last digits; recomputed figures may differ by this share."""


def agree(recorded: Any, recomputed: Any) -> bool:
    """Equal, or figures that agree to within the tolerance; a text is not a figure, and true is not 1."""
    if isinstance(recorded, bool) or isinstance(recomputed, bool):
        return recorded is recomputed
    if isinstance(recorded, int | float) and isinstance(recomputed, int | float):
        if recorded == recomputed or not (math.isfinite(recorded) and math.isfinite(recomputed)):
            return recorded == recomputed  # an infinite one is within no tolerance of any other
        return abs(recorded - recomputed) <= TOLERANCE * max(abs(recorded), abs(recomputed))
    return bool(type(recorded) is type(recomputed) and recorded == recomputed)


ABSENT = object()
"""What a field that is not there holds; a field that holds nothing is something else."""


def differing(stated: Any, expected: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The fields in which two JSON values differ: name, what was found, what was expected."""
    if isinstance(stated, dict) and isinstance(expected, dict):
        for key in sorted(stated.keys() | expected.keys()):
            inner = f"{name}.{key}" if name else str(key)
            yield from differing(stated.get(key, ABSENT), expected.get(key, ABSENT), inner)
    elif isinstance(stated, list) and isinstance(expected, list) and len(stated) == len(expected):
        for index, (item, expected_item) in enumerate(zip(stated, expected, strict=True)):
            yield from differing(item, expected_item, f"{name}[{index}]")
    elif isinstance(stated, dict | list) or isinstance(expected, dict | list) or not agree(stated, expected):
        yield name, stated, expected


def said(value: Any) -> str:
    """What a field says, short enough for a line."""
    return "nothing" if value is ABSENT else repr(value)[:200]
