"""Parsing of table values as written in files: numbers, missing values, dates and categories."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sifu.errors import InputError
from sifu.theory.arrays import Array

MISSING_WORDS = frozenset({"", "?", "na", "n/a", "#n/a", "nan", "null", "none", "<na>", "nat", "-", "."})
"""Strings that denote a missing value, in lower case."""
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+([eE][+-]?\d+)?")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}([,.'\u2019 \u00a0\u202f]\d{3})+([.,]\d+)?")
_WITH_A_SIGN = re.compile(
    r"[<>=~\u2264\u2265$\u20ac\u00a3]*\s*[+-]?\d[\d.,]*\s*(%|[^\W\d_]{1,6}(/\w{1,6})?|[$\u20ac\u00a3])?"
)
_DATE = re.compile(
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}([T ].*)?|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2})([T ].*)?"
    r"|\d{1,2}[-. ]*[^\W\d_]{3,9}[-., ]*\d{2,4}|\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?"
)
_INVISIBLE = "\ufeff\u200b\u200c\u200d\u200e\u200f\u2060"
"""Invisible characters that programs leave at the start or end of a value."""


@dataclass(frozen=True)
class Place:
    """Location of a value: file, line as in an editor (0 if the format has no lines), and row counted from 0."""

    file: str
    line: int
    row: int

    def __str__(self) -> str:
        return f"{self.file}, line {self.line} (row {self.row})" if self.line else f"{self.file}, row {self.row}"


def plain_numbers(values: Sequence[Any]) -> Array | None:
    """Return a column as numbers if every value is a finite number in plain ASCII digits, otherwise None.

    >>> plain_numbers(["1", " 2.5 "]).tolist(), plain_numbers(["1", "?"]), plain_numbers(["1_000"])
    ([1.0, 2.5], None, None)
    """
    types = set(map(type, values))
    if types == {str}:
        text = "".join(values)
        if "_" in text or not text.isascii():
            return None
    elif not types <= {int, float, bool}:
        return None
    try:
        numbers = np.array(list(map(float, values)))
    except (ValueError, OverflowError):
        return None
    return numbers if np.isfinite(numbers).all() else None


def is_missing(value: Any) -> bool:
    """Return whether a value is missing: None, NaN, or one of `MISSING_WORDS`, in upper or lower case.

    >>> [is_missing(value) for value in (None, "?", " NA ", float("nan"), "0", 0)]
    [True, True, True, True, False, False]
    """
    return text_of(value).lower() in MISSING_WORDS


def looks_like_a_number(text: str, commas: bool = False) -> bool:
    """Return whether a string is a number as written in files; `commas` allows 1,5."""
    return bool(_NUMBER.fullmatch(text) or (commas and _DECIMAL_COMMA.fullmatch(text)))


def looks_like_a_date(text: str) -> bool:
    """Return whether a string is a date, a time or both.

    >>> looks_like_a_date("2024-01-31"), looks_like_a_date("31 Jan 2024"), looks_like_a_date("10:30")
    (True, True, True)
    >>> looks_like_a_date("3.14"), looks_like_a_date("12 kg")
    (False, False)
    """
    return bool(_DATE.fullmatch(text))


def stripped(text: str) -> str:
    r"""Return a string without white space and invisible characters at its ends.

    >>> stripped("\ufeff age\u200b ")
    'age'
    """
    return text.strip().strip(_INVISIBLE).strip()


def text_of(value: Any) -> str:
    """Return a value as a string without white space at its ends, and None as an empty string."""
    return "" if value is None else stripped(str(value))


def number_of(place: Place, column: str, value: Any, commas: bool, words_key: str = "data.categories") -> float:
    """Return a value as a number; `commas` allows 1,5, and errors name the key `words_key` that can list values.

    Raises:
        InputError: If the value is not a finite number; the message states why, and what to do.
    """
    if isinstance(value, int | float | np.number | np.bool_):
        number = float(value)
    else:
        text = text_of(value).replace("\u2212", "-")  # the typographic minus sign
        if commas and _DECIMAL_COMMA.fullmatch(text):
            text = text.replace(",", ".")
        number = float(text) if _NUMBER.fullmatch(text) else math.nan
    if math.isfinite(number):
        return number
    raise InputError(
        f"{place}: column {column!r} holds {text_of(value)[:40]!r}, {_why_no_number(text_of(value), words_key)}"
    )


def _why_no_number(text: str, words_key: str) -> str:
    if looks_like_a_date(text):
        return (
            "which looks like a date: turn it into a number first (days since a fixed date), or leave the column out "
            "with data.ignore"
        )
    if _THOUSANDS.fullmatch(text):
        return "a number with marks between the thousands: write it without them (a decimal comma as a point)"
    if _DECIMAL_COMMA.fullmatch(text):
        return "a decimal comma in a file that commas separate: separate it by semicolons, or write a decimal point"
    if text.lower().lstrip("+-") in {"inf", "infinity"} or _NUMBER.fullmatch(text):
        return "which is not a finite number: correct it, or write ? and give a replacement with data.missing"
    if words_key == "data.classes":
        return 'which is not a number: list the words of the label in data.classes, for example classes = "no,yes"'
    if _WITH_A_SIGN.fullmatch(text):
        return (
            "a number with a sign or a unit: write the number alone, name the text as missing with data.missing = "
            '"COLUMN=NUMBER|TEXT", or leave the column out with data.ignore'
        )
    return "which is not a number: list the words of this column in data.categories, or leave it out with data.ignore"


def position_of(place: Place, column: str, value: Any, positions: Mapping[str, int], key: str) -> int:
    """Return the index of a value in the list of categories; 1.0 also matches 1, and true and false match 1 and 0."""
    text = text_of(value)
    for word in (text, whole_number(value), {"true": "1", "false": "0"}.get(text.lower(), text)):
        if word in positions:
            return positions[word]
    raise InputError(
        f"{place}: column {column!r} holds {text[:40]!r}, which {key} does not list; it lists "
        f"{', '.join(positions)[:200]}"
    )


def whole_number(value: Any) -> str:
    """Return a value as a string, in which 1.0 is written as 1.

    >>> whole_number("1.0"), whole_number(2.5), whole_number(" red ")
    ('1', '2.5', 'red')
    """
    text = text_of(value)
    if looks_like_a_number(text) and abs(float(text)) < 2**53 and float(text) == int(float(text)):
        return str(int(float(text)))
    return text
