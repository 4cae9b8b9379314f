"""Data as people have them: CSV or Parquet, with a column for the label, and one for the client or one file a client.

A column of numbers is a feature. A column of words is coded by a list of its words that stands in the spec, one feature
a word: the coding is fixed before anybody's data are looked at, so nobody leaves a trace in it. A word that is not on
the list is refused, and so is a value that is missing.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sifu.data.dataset import Dataset
from sifu.data.npz import MOST_CLASSES
from sifu.errors import InputError

ENDINGS = (".csv", ".parquet")
LARGEST_FILE = 4 << 30
"""Bytes of one file."""
MOST_WORDS = 1000
MOST_FILES = 100_000
Columns = dict[str, list[Any]]


@dataclass(frozen=True)
class TableCoding:
    """How columns are read: which is the label and which the client, and the words of those that hold words."""

    label: str
    client: str = ""
    classes: tuple[str, ...] = ()
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def parse_categories(text: str) -> dict[str, tuple[str, ...]]:
    """Columns of words as a spec writes them.

    >>> parse_categories("colour=red,green; size=S,M,L")
    {'colour': ('red', 'green'), 'size': ('S', 'M', 'L')}
    """
    categories: dict[str, tuple[str, ...]] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        column, equals, words = part.partition("=")
        if not equals or not column.strip() or column.strip() in categories:
            raise InputError(f"data.categories: write COLUMN=WORD,WORD; COLUMN=WORD,WORD, found {part[:80]!r}")
        categories[column.strip()] = parse_words(words, f"data.categories, column {column.strip()[:80]!r}")
    return categories


def parse_words(text: str, what: str) -> tuple[str, ...]:
    """A list of different words.

    >>> parse_words("no,yes", "data.classes")
    ('no', 'yes')
    """
    words = tuple(word.strip() for word in text.split(","))
    if len(words) > MOST_WORDS or len(set(words)) != len(words) or not all(words):
        raise InputError(
            f"{what}: list 1 to {MOST_WORDS} different words with commas between them, found {text[:80]!r}"
        )
    return words


def read_table(path: Path, coding: TableCoding) -> Dataset:
    """The data set in a file with a column for the client, or in a folder with one file a client."""
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in ENDINGS and file.is_file())
        if not files or len(files) > MOST_FILES:
            raise InputError(
                f"{path} has {len(files)} files that end in {' or '.join(ENDINGS)}: 1 to {MOST_FILES} are read"
            )
        if len({file.stem for file in files}) != len(files):
            raise InputError(f"{path} has two files for one client: a file's name without its ending is the client's")
        if coding.client:
            raise InputError(f"{path} has one file a client, so there is no column for it: leave data.client empty")
        tables = [(file, _read_columns(file)) for file in files]
    else:
        if not coding.client:
            raise InputError(f"{path} holds all clients: name the column that says whose a row is (data.client)")
        tables = [(path, _read_columns(path))]
    features = _feature_columns(tables, coding)
    rows, labels, owners = [], [], []
    for file, columns in tables:
        rows.append(_features(file, columns, features, coding))
        labels.append(_labels(file, columns[coding.label], coding.classes))
        count = len(columns[coding.label])
        owners += [str(owner) for owner in columns[coding.client]] if coding.client else [file.stem] * count
    x, y = np.concatenate(rows), np.concatenate(labels)
    classes = coding.classes or (tuple(map(str, range(int(y.max()) + 1))) if y.dtype.kind == "i" and y.size else ())
    return Dataset(f"table:{path.stem}", x, y, x[:0], y[:0], classes, client_train=np.array(owners))


def feature_names(path: Path, coding: TableCoding) -> list[str]:
    """The columns of a table that are features, in their order."""
    first = path
    if path.is_dir():
        first = next((file for file in sorted(path.iterdir()) if file.suffix.lower() in ENDINGS), path)
    return [name for name in _read_columns(first) if name not in (coding.label, coding.client)]


def read_features(path: Path, coding: TableCoding, names: Sequence[str] | None = None) -> Any:
    """Rows of features of new data, coded in the same way; `names` are the columns they must have, in any order."""
    columns = _read_columns(path)
    wanted = [name for name in columns if name not in (coding.label, coding.client)] if names is None else list(names)
    missing = [name for name in wanted if name not in columns]
    if missing:
        raise InputError(f"{path} has no column {missing[0]!r}; it has {', '.join(columns)[:400]}")
    return _features(path, columns, wanted, coding)


def _feature_columns(tables: Sequence[tuple[Path, Columns]], coding: TableCoding) -> list[str]:
    """The columns that are features, the same in every file and in the order of the first."""
    first, columns = tables[0]
    for name in filter(None, (coding.label, coding.client, *coding.categories)):
        if name not in columns:
            raise InputError(f"{first} has no column {name!r}; it has {', '.join(columns)[:400]}")
    for file, other in tables[1:]:
        if list(other) != list(columns):
            raise InputError(f"{file} has other columns than {first}: {', '.join(other)[:200]}")
    features = [name for name in columns if name not in (coding.label, coding.client)]
    if not features:
        raise InputError(f"{first} has no column beside the label and the client")
    return features


def _features(file: Path, columns: Columns, names: Sequence[str], coding: TableCoding) -> Any:
    parts = []
    for name in names:
        words = coding.categories.get(name)
        if words is None:
            parts.append(
                np.array([_number(file, name, row, value) for row, value in enumerate(columns[name], 1)])[:, None]
            )
            continue
        place = {word: index for index, word in enumerate(words)}
        coded = np.zeros((len(columns[name]), len(words)))
        for row, value in enumerate(columns[name]):
            coded[row, _place(file, name, row + 1, value, place)] = 1.0
        parts.append(coded)
    return np.concatenate(parts, axis=1)


def _number(file: Path, column: str, row: int, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise InputError(
            f"{file}, row {row}: column {column!r} holds {str(value)[:40]!r}, which is not a number. List the words of "
            "a column of words in data.categories; fill in what is missing before"
        )
    return number


def _place(file: Path, column: str, row: int, value: Any, place: Mapping[str, int]) -> int:
    word = "" if value is None else str(value).strip()
    if word not in place:
        raise InputError(
            f"{file}, row {row}: column {column!r} holds {word[:40]!r}, which the spec does not list for it"
        )
    return place[word]


def _labels(file: Path, values: Sequence[Any], classes: tuple[str, ...]) -> Any:
    """Class numbers; without declared classes whole numbers are classes, and other numbers targets of a regression."""
    if classes:
        place = {word: index for index, word in enumerate(classes)}
        return np.array(
            [_place(file, "label", row, value, place) for row, value in enumerate(values, 1)], dtype=np.int64
        )
    numbers = np.array([_number(file, "label", row, value) for row, value in enumerate(values, 1)])
    whole = bool(numbers.size) and bool((numbers == np.round(numbers)).all()) and bool((numbers >= 0).all())
    if whole and numbers.max() >= MOST_CLASSES:
        row = int(numbers.argmax())
        raise InputError(
            f"{file}, row {row + 1}: the label is {str(values[row])[:40]}. Whole numbers are classes: number them from "
            f"0, {MOST_CLASSES} at most; targets of a regression have a fraction somewhere"
        )
    return numbers.astype(np.int64) if whole else numbers


def _read_columns(path: Path) -> Columns:
    """Every column of a file, as texts (CSV) or as values (Parquet)."""
    if not path.is_file():
        raise InputError(f"there is no file {path}: give a {' or '.join(ENDINGS)} file, or a folder with one a client")
    if path.stat().st_size > LARGEST_FILE:
        raise InputError(f"{path} has {path.stat().st_size} bytes; files of up to {LARGEST_FILE} bytes are read")
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise InputError(f"{path} must end in {' or '.join(ENDINGS)}")
    columns = _read_csv(path) if ending == ".csv" else _read_parquet(path)
    if not columns or not next(iter(columns.values())):
        raise InputError(f"{path} has no rows")
    return columns


def _read_csv(path: Path) -> Columns:
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream)
            header = [name.strip() for name in next(reader, [])]
            if len(set(header)) != len(header) or not all(header):
                raise InputError(f"{path}: the first row must name the columns, each by a name of its own")
            columns: Columns = {name: [] for name in header}
            for number, row in enumerate(reader, start=1):
                if not row:
                    continue
                if len(row) != len(header):
                    raise InputError(f"{path}, row {number} has {len(row)} fields, the first row names {len(header)}")
                for name, value in zip(header, row, strict=True):
                    columns[name].append(value)
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is not a CSV file in UTF-8 ({error})") from error
    return columns


def _read_parquet(path: Path) -> Columns:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError as error:
        raise InputError(f"to read {path}, install pyarrow: pip install 'sifu[parquet]'") from error
    try:
        table = parquet.read_table(path)
        return {str(name): table.column(name).to_pylist() for name in table.column_names}
    except (ArrowException, OSError, ValueError) as error:
        raise InputError(f"{path} is not a readable Parquet file ({type(error).__name__})") from error
