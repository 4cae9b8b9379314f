"""Expansion of a client's local steps (docs/store.md, section 3)."""

from __future__ import annotations

import math

from sifu_verifier.canonical import Row


def expansion(client: Row, spec: Row) -> float:
    """Return a client's P_i: what it reported, or what the spec assumes for each of its steps."""
    if spec["regularity"]["kind"] == "assumed":
        return _power(spec["regularity"]["factor"], client["local_steps"])
    return math.inf if client["expansion"] is None else client["expansion"]


def is_possible(client: Row, spec: Row) -> bool:
    """Return whether safe steps can have the reported expansion: in (0, 1], and 1 without weight decay."""
    reported = client["expansion"]
    if spec["regularity"]["kind"] == "assumed" or reported is None:
        return True
    return bool(0 < reported <= 1 and (spec["local"]["weight_decay"] or reported == 1))


def _power(base: float, exponent: int) -> float:
    """Return base ** exponent, or infinity where float64 overflows."""
    try:
        return base**exponent
    except OverflowError:
        return math.inf
