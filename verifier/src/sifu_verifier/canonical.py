"""Canonical JSON (RFC 8785), digests, and equality of JSON values (docs/store.md, section 6)."""

from __future__ import annotations

import hashlib
import json
import math
from decimal import Decimal
from typing import Any

from sifu_verifier.tolerances import RELATIVE

Row = dict[str, Any]


def canonical(value: Any) -> str:
    """Return a value as canonical JSON, implemented from the text of RFC 8785."""
    if isinstance(value, dict):
        keys = sorted(value, key=lambda key: key.encode("utf-16-be"))
        return "{" + ",".join(f"{canonical(key)}:{canonical(value[key])}" for key in keys) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(canonical, value)) + "]"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number_text(value)
    return json.dumps(value, ensure_ascii=False)


def number_text(value: float) -> str:
    """Return a number as ECMAScript writes it (ECMA-262, Number::toString); integers beyond 2^53 are float64."""
    if abs(value) < 2**53 and value == int(value):
        return str(int(value))
    sign, digits, exponent = Decimal(repr(float(value))).normalize().as_tuple()
    text, length = "".join(map(str, digits)), len(digits)
    point = length + int(exponent)
    if length <= point <= 21:
        text += "0" * (point - length)
    elif 0 < point <= 21:
        text = f"{text[:point]}.{text[point:]}"
    elif -6 < point <= 0:
        text = "0." + "0" * -point + text
    else:
        text = text[0] + (f".{text[1:]}" if length > 1 else "") + f"e{point - 1:+d}"
    return "-" * sign + text


def parsed(text: str) -> Any:
    """Return a payload as section 6 defines it: an integer of 2^53 or more becomes a float64."""
    return json.loads(text, parse_int=lambda digits: int(digits) if abs(int(digits)) < 2**53 else float(digits))


def sha256(*parts: bytes) -> str:
    """Return the SHA-256 digest of the concatenated parts in hexadecimal digits."""
    return hashlib.sha256(b"".join(parts)).hexdigest()


def same(a: Any, b: Any) -> bool:
    """Return whether two JSON values are equal, with a tolerance for floats."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if {type(a), type(b)} == {float} or {type(a), type(b)} == {int, float}:
        return a == b or abs(a - b) <= RELATIVE * max(abs(a), abs(b)) < math.inf
    return type(a) is type(b) and a == b
