"""Coding of a table's columns as features and classes, by constants of the spec that are fixed before data are read.

A number is shifted and scaled by two constants. A category is one feature per listed word. Where the spec gives a
filler for a missing value, an indicator is added, so that a model can distinguish a filled-in value from a measured
one. No mean, range or list comes from the clients' rows, so a client that leaves has no influence on the coding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from sifu.core.spec import DataSpec
from sifu.core.spec.sections import FeaturesSpec
from sifu.errors import InputError
from sifu.theory.arrays import Array

MOST_WORDS = 1000
MISSING_WORDS = frozenset({"", "?", "na", "n/a", "#n/a", "nan", "null", "none", "<na>", "nat", "-", "."})
"""Texts that mean a missing value, in lower case."""
FAR_OUTSIDE = 10.0
"""Largest plausible scaled number: beyond it, the constants or the value are probably wrong, and a warning says so."""
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
"""Invisible characters that programs leave at the ends of texts."""


@dataclass(frozen=True)
class Place:
    """Location of a value: file, line as in an editor (0 if the format has no lines), and row counted from 0."""

    file: str
    line: int
    row: int

    def __str__(self) -> str:
        return f"{self.file}, line {self.line} (row {self.row})" if self.line else f"{self.file}, row {self.row}"


NO_TEXT = ""
"""Separator of formats that are not text: Parquet, frames."""


@dataclass(frozen=True)
class TableFile:
    """One file as read: its columns as texts (CSV) or values (Parquet), and the line of each row."""

    name: str
    columns: dict[str, list[Any]]
    lines: tuple[int, ...] = ()
    separator: str = ","

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(next(iter(self.columns.values())))

    def place(self, row: int) -> Place:
        """Return the location of a row."""
        return Place(self.name, self.lines[row] if self.lines else 0, row)

    @property
    def decimal_commas(self) -> bool:
        """True if 1,5 is a number, because commas do not separate fields."""
        return self.separator not in (",", NO_TEXT)


@dataclass(frozen=True)
class TableCoding:
    """Role of every column; a column without another role is a number."""

    label: str
    client: str = ""
    classes: tuple[tuple[str, ...], ...] = ()
    """Words of each class; empty where labels are numbers already."""
    class_names: tuple[str, ...] = ()
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    identity: str = ""
    ignored: tuple[str, ...] = ()
    scales: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Middle and spread of each column of numbers."""
    missing: Mapping[str, float | None] = field(default_factory=dict)
    """Filler of a missing number; None for a missing category."""
    header: tuple[str, ...] = ()
    """Names of the columns of files without a header line."""
    missing_words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Further texts that mean a missing value, by column."""
    regression: bool = False
    """True if labels are numbers to predict; whole numbers are then not classes."""
    text: str = ""
    """Column of texts, which is then the only feature."""
    model: str = ""
    """Model whose tokenizer reads texts."""
    tokens: int = 0
    """Number of tokens of a text that are read."""

    @classmethod
    def from_spec(
        cls, data: DataSpec, features: FeaturesSpec | None = None, *, regression: bool = False
    ) -> TableCoding:
        """Return the coding that a spec declares.

        Args:
            data: Section on data.
            features: Section that names the model for texts.
            regression: True if labels are numbers to predict.
        """
        classes = parse_classes(data.classes) if data.classes.strip() else {}
        missing = {column: _split(text, "|", empty=True) for column, text in _entries(data.missing, "data.missing")}
        return cls(
            data.label,
            data.client,
            tuple(classes.values()),
            tuple(classes),
            parse_categories(data.categories),
            data.id,
            tuple(split_names(data.ignore, "data.ignore")),
            {column: _scale(column, text) for column, text in _entries(data.scale, "data.scale")},
            {column: _fill(column, parts[0]) for column, parts in missing.items()},
            tuple(split_names(data.header, "data.header")),
            {column: tuple(map(_unquoted, words)) for column, (_, *words) in missing.items() if words},
            regression,
            data.text,
            "" if features is None else features.model,
            0 if features is None else features.size,
        )

    def to_mapping(self) -> dict[str, Any]:
        """Return the coding of features as plain values, for the description of an exported model."""
        mapping = asdict(self)
        del mapping["regression"]
        return mapping if self.missing_words else {key: mapping[key] for key in mapping if key != "missing_words"}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> TableCoding:
        """Return the coding in the description of an exported model."""
        return cls(
            label=str(mapping["label"]),
            client=str(mapping["client"]),
            classes=tuple(tuple(map(str, words)) for words in mapping["classes"]),
            class_names=tuple(map(str, mapping["class_names"])),
            categories={str(name): tuple(map(str, words)) for name, words in mapping["categories"].items()},
            identity=str(mapping["identity"]),
            ignored=tuple(map(str, mapping["ignored"])),
            scales={str(name): (float(pair[0]), float(pair[1])) for name, pair in mapping["scales"].items()},
            missing={str(name): None if fill is None else float(fill) for name, fill in mapping["missing"].items()},
            header=tuple(map(str, mapping["header"])),
            missing_words={
                str(name): tuple(map(str, words)) for name, words in mapping.get("missing_words", {}).items()
            },
            text=str(mapping.get("text", "")),
            model=str(mapping.get("model", "")),
            tokens=int(mapping.get("tokens", 0)),
        )

    def features_of(self, columns: Sequence[str]) -> list[str]:
        """Return the columns that are features, in the given order."""
        if self.text:
            return [self.text]
        others = {self.label, self.client, self.identity, *self.ignored}
        return [name for name in columns if name not in others]

    def check_columns(self, columns: Sequence[str], file: str, separator: str = "") -> None:
        """Refuse a table without a column that the spec names, or without any feature.

        Args:
            columns: Columns of the table.
            file: Name of the file, for error messages.
            separator: Words for the separator of its fields, for error messages.
        """
        named = [
            ("data.label", [self.label]), ("data.client", [self.client]), ("data.id", [self.identity]),
            ("data.text", [self.text]),
            ("data.ignore", self.ignored), ("data.categories", self.categories), ("data.scale", self.scales),
            ("data.missing", self.missing),
        ]  # fmt: skip
        for key, names in named:
            for name in filter(None, names):
                if name not in columns:
                    near = next((column for column in columns if column.casefold() == name.casefold()), "")
                    hint = f": did you mean {near!r}?" if near else ""
                    read_as = f", read as separated by {separator}," if separator else ""
                    raise InputError(
                        f"{file}{read_as} has no column {name!r}, which {key} names; it has "
                        f"{', '.join(columns)[:400]}{hint}"
                    )
        filled = [name for name, fill in self.missing.items() if fill is not None]
        for key, others in (("data.scale", self.scales), ("data.missing", filled)):
            both = next((name for name in others if name in self.categories), None)
            if both is not None:
                remedy = f"leave it out of {key}" if key == "data.scale" else f'write data.missing = "{both}="'
                raise InputError(f"column {both!r} is in data.categories and has a number in {key}: {remedy}")
        roles = [self.label, *filter(None, (self.client, self.identity, self.text)), *self.ignored]
        twice = next((name for name in roles if roles.count(name) > 1), None)
        if twice is not None:
            raise InputError(f"column {twice!r} has two roles: name it once among data.label, client, id and ignore")
        if not self.features_of(columns):
            raise InputError(f"{file} has no column for features: all of {', '.join(columns)[:200]} have other roles")

    def width(self, name: str) -> int:
        """Return the number of features of a column."""
        return len(self.categories.get(name, [name])) + (name in self.missing)

    def features(self, table: TableFile, names: Sequence[str], refused: dict[int, str] | None = None) -> Array:
        """Return the features of these columns, one row per row of the table; tokens for a column of texts.

        Args:
            table: Table as read.
            names: Its columns that are features.
            refused: Receives the reason for each row with a value that cannot be coded, instead of an exception.

        Returns:
            The features; those of a refused row are meaningless.

        Raises:
            InputError: If a value cannot be coded and `refused` is None.
        """
        if self.text:
            from sifu.data.feature_maps.transformer_networks import tokenised  # imports torch

            texts = ["" if value is None else str(value) for value in table.columns[self.text]]
            return tokenised(self.model, texts, self.tokens)
        return np.concatenate([self._coded(name, table, refused) for name in names], axis=1)

    def _coded(self, name: str, table: TableFile, refused: dict[int, str] | None) -> Array:
        words, values = self.categories.get(name), table.columns[name]
        features = np.zeros((table.rows, self.width(name)))
        numbers = None if words is not None or name in self.missing_words else plain_numbers(values)
        if numbers is not None:
            middle, spread = self.scales.get(name, (0.0, 1.0))
            features[:, 0] = (numbers - middle) / spread
            return features
        positions = {} if words is None else {word: position for position, word in enumerate(words)}
        known: dict[str, list[tuple[int, float]]] = {}
        for row, value in enumerate(values):
            coded = known.get(value) if isinstance(value, str) else None
            if coded is None:
                try:
                    coded = self._value(name, value, positions, table, row)
                except InputError as error:
                    if refused is None:
                        raise
                    refused.setdefault(row, str(error))
                    continue
                if isinstance(value, str):
                    known[value] = coded
            for position, number in coded:
                features[row, position] = number
        return features

    def _value(
        self, name: str, value: Any, positions: Mapping[str, int], table: TableFile, row: int
    ) -> list[tuple[int, float]]:
        """Return the features of one value that are not 0, each with its position among those of the column."""
        middle, spread = self.scales.get(name, (0.0, 1.0))
        if self._is_missing(name, value, positions):
            fill = self._fill_of(name, value, table.place(row))
            filled = [] if fill is None else [(0, (fill - middle) / spread)]
            return [*filled, (-1, 1.0)]
        if name in self.categories:
            return [(_position(table.place(row), name, value, positions, "data.categories"), 1.0)]
        return [(0, (_number(table.place(row), name, value, table.decimal_commas) - middle) / spread)]

    def _is_missing(self, name: str, value: Any, positions: Mapping[str, int]) -> bool:
        text = _text(value)
        return text not in positions and (text.lower() in MISSING_WORDS or text in self.missing_words.get(name, ()))

    def _fill_of(self, name: str, value: Any, place: Place) -> float | None:
        """Return the filler of a missing value of a column: a number, or None for a category."""
        if name not in self.missing:
            example = f"{name}=" if name in self.categories else f"{name}=NUMBER"
            raise InputError(
                f"{place}: column {name!r} holds {_text(value)[:40]!r}, which means a missing value: give a "
                f'replacement with data.missing = "{example}" (an indicator is added), or leave the column out with '
                "data.ignore"
            )
        return self.missing[name]

    def labels(self, table: TableFile) -> Array:
        """Return the labels: class numbers, or targets of a regression.

        Without declared classes, nonnegative whole numbers are class numbers, and other numbers are targets.

        Raises:
            InputError: If a label is missing, not listed, or too large for a class number.
        """
        values, words = table.columns[self.label], {word for words in self.classes for word in words}
        plain = None if self.classes else plain_numbers(values)
        for row, value in enumerate(values if plain is None else ()):
            if is_missing(value) and _text(value) not in words:
                raise InputError(
                    f"{table.place(row)}: column {self.label!r}, the label, holds {_text(value)!r}, which means a "
                    "missing value: leave such rows out"
                )
        if self.classes:
            positions = {word: number for number, words in enumerate(self.classes) for word in words}
            return np.array(self._classes(table, values, positions), dtype=np.int64)
        numbers = (
            plain
            if plain is not None
            else np.array(
                [
                    _number(table.place(row), self.label, value, table.decimal_commas, "data.classes")
                    for row, value in enumerate(values)
                ]
            )
        )
        whole = bool(numbers.size) and bool((numbers == np.round(numbers)).all()) and bool((numbers >= 0).all())
        if whole and numbers.max() >= MOST_WORDS:
            if self.regression:
                return numbers
            worst = table.place(int(numbers.argmax()))
            raise InputError(
                f"{worst}: column {self.label!r} holds {int(numbers.max())}; classes are numbered from 0 to "
                f'{MOST_WORDS - 1}. For a regression set model.kind = "ridge" and ridge.task = "regression"'
            )
        return numbers.astype(np.int64) if whole else numbers

    def _classes(self, table: TableFile, values: Sequence[Any], positions: Mapping[str, int]) -> list[int]:
        """Return the class of each label."""
        known: dict[str, int] = {}
        coded = []
        for row, value in enumerate(values):
            number = known.get(value) if isinstance(value, str) else None
            if number is None:
                number = _position(table.place(row), self.label, value, positions, "data.classes")
                if isinstance(value, str):
                    known[value] = number
            coded.append(number)
        return coded


def plain_numbers(values: Sequence[Any]) -> Array | None:
    """Return a column as numbers, if every value is a finite number in plain ASCII digits; else None.

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


def split_names(text: str, key: str) -> list[str]:
    """Split a text into names at commas or line breaks; names with such a character are written in double quotes.

    >>> split_names('age, "weight, in kg"', "data.ignore")
    ['age', 'weight, in kg']
    """
    names = [_unquoted(part) for part in _split(text, ",\n")]
    if len(set(names)) != len(names):
        raise InputError(f"{key} names a column twice: {text[:80]!r}")
    return names


def join_names(names: Sequence[str]) -> str:
    """Join names into a text that `split_names` reads.

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
    """Parse columns of words from the text in a spec.

    >>> parse_categories('colour=red,green; "size; EU"=S,M,L')
    {'colour': ('red', 'green'), 'size; EU': ('S', 'M', 'L')}
    """
    return {
        column: tuple(map(_unquoted, _listed_words(words, f"data.categories, column {column[:80]!r}")))
        for column, words in _entries(text, "data.categories")
    }


def _listed_words(text: str, what: str) -> list[str]:
    """Return a list of different words as written, with their quotes."""
    words = _split(text, ",")
    if not words or len(words) > MOST_WORDS or len(set(words)) != len(words) or text.rstrip().endswith(","):
        raise InputError(
            f"{what}: list 1 to {MOST_WORDS} different words with commas between them, found {text[:80]!r}"
        )
    return words


def parse_classes(text: str) -> dict[str, tuple[str, ...]]:
    """Return the words of each class, by the name of the class.

    >>> parse_classes("<=50K, >50K"), parse_classes("healthy=0, ill=1|2|3")
    ({'<=50K': ('<=50K',), '>50K': ('>50K',)}, {'healthy': ('0',), 'ill': ('1', '2', '3')})
    """
    classes: dict[str, tuple[str, ...]] = {}
    for part in _listed_words(text, "data.classes"):
        name, equals, listed = _partition(part)
        if name in ("<", ">"):  # "<=50K" is a word, not a name with a value
            name, equals = part, ""
        classes[name] = tuple(map(_unquoted, _split(listed if equals else part, "|")))
    every = [word for words in classes.values() for word in words]
    if len(set(every)) != len(every) or not all(classes) or not all(classes.values()):
        raise InputError(f"data.classes: each word must belong to one class, found {text[:80]!r}")
    return classes


def is_missing(value: Any) -> bool:
    """Return whether a value means a missing one.

    >>> [is_missing(value) for value in (None, "?", " NA ", float("nan"), "0", 0)]
    [True, True, True, True, False, False]
    """
    return _text(value).lower() in MISSING_WORDS


def looks_like_a_number(text: str, commas: bool = False) -> bool:
    """Return whether a text is a number as written in files; `commas` allows 1,5."""
    return bool(_NUMBER.fullmatch(text) or (commas and _DECIMAL_COMMA.fullmatch(text)))


def looks_like_a_date(text: str) -> bool:
    """Return whether a text is a date, a time or both.

    >>> looks_like_a_date("2024-01-31"), looks_like_a_date("31 Jan 2024"), looks_like_a_date("10:30")
    (True, True, True)
    >>> looks_like_a_date("3.14"), looks_like_a_date("12 kg")
    (False, False)
    """
    return bool(_DATE.fullmatch(text))


def _entries(text: str, key: str) -> Iterator[tuple[str, str]]:
    """Yield column and text of entries COLUMN=TEXT, separated by semicolons or line breaks."""
    seen = set()
    for part in _split(text, ";\n"):
        column, equals, rest = _partition(part)
        if not equals or not column or column in seen:
            raise InputError(f"{key}: write COLUMN=...; COLUMN=..., each column once, found {part[:80]!r}")
        seen.add(column)
        yield column, rest


def _split(text: str, separators: str, *, empty: bool = False) -> list[str]:
    """Return the parts between separators outside double quotes; empty parts only if `empty`."""
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


def stripped(text: str) -> str:
    r"""Return a text without white space and invisible characters at its ends.

    >>> stripped("\ufeff age\u200b ")
    'age'
    """
    return text.strip().strip(_INVISIBLE).strip()


def _text(value: Any) -> str:
    return "" if value is None else stripped(str(value))


def _number(place: Place, column: str, value: Any, commas: bool, words_key: str = "data.categories") -> float:
    if isinstance(value, int | float | np.number | np.bool_):
        number = float(value)
    else:
        text = _text(value).replace("\u2212", "-")  # the typographic minus sign
        if commas and _DECIMAL_COMMA.fullmatch(text):
            text = text.replace(",", ".")
        number = float(text) if _NUMBER.fullmatch(text) else math.nan
    if math.isfinite(number):
        return number
    raise InputError(
        f"{place}: column {column!r} holds {_text(value)[:40]!r}, {_why_no_number(_text(value), words_key)}"
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


def _position(place: Place, column: str, value: Any, positions: Mapping[str, int], key: str) -> int:
    """Return the class or category of a value: by its text, else as a whole number (1.0 is 1) or a truth value."""
    text = _text(value)
    for word in (text, whole_number(value), {"true": "1", "false": "0"}.get(text.lower(), text)):
        if word in positions:
            return positions[word]
    raise InputError(
        f"{place}: column {column!r} holds {text[:40]!r}, which {key} does not list; it lists "
        f"{', '.join(positions)[:200]}"
    )


def whole_number(value: Any) -> str:
    """Return a value as a text, with 1.0 as 1.

    >>> whole_number("1.0"), whole_number(2.5), whole_number(" red ")
    ('1', '2.5', 'red')
    """
    text = _text(value)
    if looks_like_a_number(text) and abs(float(text)) < 2**53 and float(text) == int(float(text)):
        return str(int(float(text)))
    return text
