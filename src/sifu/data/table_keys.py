"""Parsers of the spec's keys about tables: names, categories, classes, scales and fillers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from sifu.data.table_values import looks_like_a_number
from sifu.errors import InputError

MOST_WORDS = 1000


def split_names(text: str, key: str) -> list[str]:
    """Split a string into names at commas or line breaks; a name that contains either is written in double quotes.

    >>> split_names('age, "weight, in kg"', "data.ignore")
    ['age', 'weight, in kg']
    """
    names = [_unquoted(part) for part in _split(text, ",\n")]
    if len(set(names)) != len(names):
        raise InputError(f"{key} names a column twice: {text[:80]!r}")
    return names


def join_names(names: Sequence[str]) -> str:
    """Join names into a string that `split_names` parses.

    >>> split_names(join_names(["age", "weight, in kg"]), "data.columns")
    ['age', 'weight, in kg']
    """
    return ", ".join(map(quoted, names))


def quoted(name: str) -> str:
    """Return a name for a spec, in double quotes if it contains a special character; inner quotes are doubled.

    >>> print(quoted('12" pipe'), quoted("age"))
    "12"" pipe" age
    """
    return '"' + name.replace('"', '""') + '"' if re.search(r"^\s|[,;=|\n\"]|\s$", name) else name


def parse_categories(text: str) -> dict[str, tuple[str, ...]]:
    """Parse the allowed values of each categorical column.

    >>> parse_categories('colour=red,green; "size; EU"=S,M,L')
    {'colour': ('red', 'green'), 'size; EU': ('S', 'M', 'L')}
    """
    return {
        column: tuple(map(_unquoted, _listed_words(words, f"data.categories, column {column[:80]!r}")))
        for column, words in _entries(text, "data.categories")
    }


def _listed_words(text: str, what: str) -> list[str]:
    """Return the distinct values in a list, unchanged and with their quotes."""
    words = _split(text, ",")
    if not words or len(words) > MOST_WORDS or len(set(words)) != len(words) or text.rstrip().endswith(","):
        raise InputError(
            f"{what}: list 1 to {MOST_WORDS} different words with commas between them, found {text[:80]!r}"
        )
    return words


def parse_classes(text: str) -> dict[str, tuple[str, ...]]:
    """Return the label values of each class, by the name of the class.

    >>> parse_classes("<=50K, >50K"), parse_classes("healthy=0, ill=1|2|3")
    ({'<=50K': ('<=50K',), '>50K': ('>50K',)}, {'healthy': ('0',), 'ill': ('1', '2', '3')})
    """
    classes: dict[str, tuple[str, ...]] = {}
    for part in _listed_words(text, "data.classes"):
        name, equals, listed = _partition(part)
        if name in ("<", ">"):  # "<=50K" is a label value, not NAME=VALUE
            name, equals = part, ""
        classes[name] = tuple(map(_unquoted, _split(listed if equals else part, "|")))
    every = [word for words in classes.values() for word in words]
    if len(set(every)) != len(every) or not all(classes) or not all(classes.values()):
        raise InputError(f"data.classes: each word must belong to one class, found {text[:80]!r}")
    return classes


def parse_scales(text: str) -> dict[str, tuple[float, float]]:
    """Parse the middle and the spread of each column of numbers.

    >>> parse_scales("age=50,10")
    {'age': (50.0, 10.0)}
    """
    return {column: _scale(column, pair) for column, pair in _entries(text, "data.scale")}


def parse_missing(text: str) -> tuple[dict[str, float | None], dict[str, tuple[str, ...]]]:
    """Parse, per column, the replacement for a missing value (None for a category), and additional strings for one.

    >>> parse_missing("age=40|unknown; colour=")
    ({'age': 40.0, 'colour': None}, {'age': ('unknown',)})
    """
    parts = {column: _split(rest, "|", empty=True) for column, rest in _entries(text, "data.missing")}
    fillers = {column: _fill(column, filler) for column, (filler, *_) in parts.items()}
    return fillers, {column: tuple(map(_unquoted, words)) for column, (_, *words) in parts.items() if words}


def _entries(text: str, key: str) -> Iterator[tuple[str, str]]:
    """Yield column and value of each entry COLUMN=VALUE; semicolons or line breaks separate the entries."""
    seen = set()
    for part in _split(text, ";\n"):
        column, equals, rest = _partition(part)
        if not equals or not column or column in seen:
            raise InputError(f"{key}: write COLUMN=...; COLUMN=..., each column once, found {part[:80]!r}")
        seen.add(column)
        yield column, rest


def _split(text: str, separators: str, *, empty: bool = False) -> list[str]:
    """Return the parts between separators outside double quotes; empty parts are included only if `empty` is true."""
    parts, quoted = [""], False
    for character in text:
        if character == '"':
            quoted = not quoted
        if character in separators and not quoted:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if empty or part.strip()]


def _partition(part: str) -> tuple[str, str, str]:
    quotes = re.match(r'"((?:[^"]|"")*)"\s*(=?)(.*)', part, re.DOTALL)
    if quotes:
        return _unquoted(f'"{quotes[1]}"'), quotes[2], quotes[3].strip()
    name, equals, rest = part.partition("=")
    return name.strip(), equals, rest.strip()


def _unquoted(text: str) -> str:
    return text[1:-1].replace('""', '"') if len(text) > 1 and text[0] == text[-1] == '"' else text


def _scale(column: str, text: str) -> tuple[float, float]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(looks_like_a_number(part) for part in parts) or float(parts[1]) <= 0:
        raise InputError(
            f"data.scale: write {column}=MIDDLE,SPREAD with a positive spread, for example {column}=50,10; found "
            f"{text[:80]!r}"
        )
    return float(parts[0]), float(parts[1])


def _fill(column: str, text: str) -> float | None:
    if text and not looks_like_a_number(text):
        raise InputError(
            f"data.missing: write {column}=NUMBER, or {column}= for a column of categories, with |TEXT for each "
            f"further text that means a missing value; found {text[:80]!r}"
        )
    return float(text) if text else None
