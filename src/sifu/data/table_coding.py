"""Coding of a table's columns as features and classes, by constants of the spec that are fixed before data are read.

A number is shifted and scaled by two constants. A category gives one feature per listed value. If the spec gives a
filler for missing values of a column, an indicator is added, so that a model can distinguish a filled-in value from a
measured one. No mean, range or list comes from the clients' rows, so a client that leaves has no influence on the
coding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from sifu.core.spec import DataSpec
from sifu.core.spec.sections import FeaturesSpec
from sifu.data.table_keys import (
    MOST_WORDS,
    parse_categories,
    parse_classes,
    parse_missing,
    parse_scales,
    split_names,
)
from sifu.data.table_values import MISSING_WORDS, Place, is_missing, number_of, plain_numbers, position_of, text_of
from sifu.errors import InputError
from sifu.theory.arrays import Array

FAR_OUTSIDE = 10.0
"""Largest plausible scaled number: beyond it, the constants or the value are probably wrong, and a warning is given."""
NO_SEPARATOR = ""
"""Value of `separator` for sources that are not text files: Parquet files and data frames."""


@dataclass(frozen=True)
class TableFile:
    """Columns of one file, as strings (CSV) or typed values (Parquet), and the line number of each row."""

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
        return self.separator not in (",", NO_SEPARATOR)


@dataclass(frozen=True)
class TableCoding:
    """Roles of a table's columns and constants of their coding; a column without another role is a number."""

    label: str
    client: str = ""
    classes: tuple[tuple[str, ...], ...] = ()
    """Label values of each class, or an empty tuple if labels are numbers."""
    class_names: tuple[str, ...] = ()
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    identity: str = ""
    ignored: tuple[str, ...] = ()
    scales: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Middle and spread of each column of numbers."""
    missing: Mapping[str, float | None] = field(default_factory=dict)
    """Filler for missing values of a column: a number, or None for a category."""
    header: tuple[str, ...] = ()
    """Names of the columns of files without a header line."""
    missing_words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Additional strings that denote a missing value, by column."""
    regression: bool = False
    """True for regression, whose labels are numbers even if all of them are whole."""
    text: str = ""
    """Free-text column; if given, it is the only feature."""
    model: str = ""
    """Language model whose tokenizer reads the text column."""
    tokens: int = 0
    """Number of tokens read from each row's text, or 0 for the default."""
    separator: str = ","
    encoding: str = "utf-8"
    """Field separator and encoding of CSV files."""

    @classmethod
    def from_spec(
        cls, data: DataSpec, features: FeaturesSpec | None = None, *, regression: bool = False
    ) -> TableCoding:
        """Return the coding that a spec declares; `features` names the language model for a column of texts."""
        classes = parse_classes(data.classes) if data.classes.strip() else {}
        missing, missing_words = parse_missing(data.missing)
        return cls(
            data.label,
            data.client,
            tuple(classes.values()),
            tuple(classes),
            parse_categories(data.categories),
            data.id,
            tuple(split_names(data.ignore, "data.ignore")),
            parse_scales(data.scale),
            missing,
            tuple(split_names(data.header, "data.header")),
            missing_words,
            regression,
            data.text,
            "" if features is None else features.model,
            0 if features is None else features.size,
            data.separator,
            data.encoding,
        )

    def to_mapping(self) -> dict[str, Any]:
        """Return the coding, without `regression`, as plain values for the description of an exported model."""
        mapping = asdict(self)
        del mapping["regression"]
        return mapping if self.missing_words else {key: mapping[key] for key in mapping if key != "missing_words"}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> TableCoding:
        """Return the coding in the description of an exported model."""

        def words_by_column(key: str) -> dict[str, tuple[str, ...]]:
            return {str(name): tuple(map(str, words)) for name, words in mapping.get(key, {}).items()}

        texts = ("label", "client", "identity", "text", "model", "separator", "encoding")
        given: dict[str, Any] = {name: str(mapping[name]) for name in texts}
        given |= {name: tuple(map(str, mapping[name])) for name in ("class_names", "ignored", "header")}
        return cls(
            **given,
            classes=tuple(tuple(map(str, words)) for words in mapping["classes"]),
            categories=words_by_column("categories"),
            scales={str(name): (float(pair[0]), float(pair[1])) for name, pair in mapping["scales"].items()},
            missing={str(name): None if fill is None else float(fill) for name, fill in mapping["missing"].items()},
            missing_words=words_by_column("missing_words"),
            tokens=int(mapping["tokens"]),
        )

    def features_of(self, columns: Sequence[str]) -> list[str]:
        """Return the columns that are features, in the given order."""
        if self.text:
            return [self.text]
        others = {self.label, self.client, self.identity, *self.ignored}
        return [name for name in columns if name not in others]

    def check_columns(self, columns: Sequence[str], file: str, separator: str = "") -> None:
        """Refuse a table without a column that the spec names, or without any feature."""
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
        """Return the features of these columns, one row per row of the table. A text column becomes token ids.

        If `refused` is given, it receives the reason for each row that cannot be coded, whose features are meaningless;
        otherwise such a row raises `InputError`.
        """
        if self.text:
            from sifu.data.feature_maps.transformer_networks import tokenised  # this import needs torch

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
        """Return the nonzero features of one value, each with its position among the column's features."""
        middle, spread = self.scales.get(name, (0.0, 1.0))
        if self._is_missing(name, value, positions):
            fill = self._fill_of(name, value, table.place(row))
            filled = [] if fill is None else [(0, (fill - middle) / spread)]
            return [*filled, (-1, 1.0)]
        if name in self.categories:
            return [(position_of(table.place(row), name, value, positions, "data.categories"), 1.0)]
        return [(0, (number_of(table.place(row), name, value, table.decimal_commas) - middle) / spread)]

    def _is_missing(self, name: str, value: Any, positions: Mapping[str, int]) -> bool:
        text = text_of(value)
        return text not in positions and (text.lower() in MISSING_WORDS or text in self.missing_words.get(name, ()))

    def _fill_of(self, name: str, value: Any, place: Place) -> float | None:
        """Return the filler of a missing value of a column: a number, or None for a category."""
        if name not in self.missing:
            example = f"{name}=" if name in self.categories else f"{name}=NUMBER"
            raise InputError(
                f"{place}: column {name!r} holds {text_of(value)[:40]!r}, which means a missing value: give a "
                f'replacement with data.missing = "{example}" (an indicator is added), or leave the column out with '
                "data.ignore"
            )
        return self.missing[name]

    def labels(self, table: TableFile) -> Array:
        """Return the labels: class numbers, or targets of a regression.

        Without declared classes, nonnegative whole numbers are class numbers unless the task is a regression, and
        other numbers are targets.

        Raises:
            InputError: If a label is missing, not a number or a listed class, or too large for a class number.
        """
        values, words = table.columns[self.label], {word for words in self.classes for word in words}
        plain = None if self.classes else plain_numbers(values)
        for row, value in enumerate(values if plain is None else ()):
            if is_missing(value) and text_of(value) not in words:
                raise InputError(
                    f"{table.place(row)}: column {self.label!r}, the label, holds {text_of(value)!r}, which means a "
                    "missing value: leave such rows out"
                )
        if self.classes:
            positions = {word: number for number, words in enumerate(self.classes) for word in words}
            return np.array(self._classes(table, values, positions), dtype=np.int64)
        numbers = plain
        if numbers is None:
            commas, key = table.decimal_commas, "data.classes"
            read = [number_of(table.place(row), self.label, value, commas, key) for row, value in enumerate(values)]
            numbers = np.array(read)
        if self.regression:  # whether all labels are whole numbers would depend on other clients
            return numbers
        whole = bool(numbers.size) and bool(((numbers == np.round(numbers)) & (numbers >= 0)).all())
        if whole and numbers.max() >= MOST_WORDS:
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
                number = position_of(table.place(row), self.label, value, positions, "data.classes")
                if isinstance(value, str):
                    known[value] = number
            coded.append(number)
        return coded
