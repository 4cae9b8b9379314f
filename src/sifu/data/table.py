"""Reader of tables: CSV in its dialects or Parquet, with a column for the client or one file per client.

Within `reading_once`, a command that needs a table several times parses it once. The parsed table is dropped at the end
of this block, because clients' rows must not stay in a service's memory.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from sifu.data.dataset import Dataset
from sifu.data.held_out import contents_of, held_out_rows, numbers_of
from sifu.data.table_coding import FAR_OUTSIDE, NO_SEPARATOR, TableCoding, TableFile
from sifu.data.table_values import Place, is_missing, stripped
from sifu.errors import InputError, SifuWarning, install_extra
from sifu.theory.arrays import Array

CSV_ENDINGS = (".csv", ".tsv", ".txt", ".data")
ENDINGS = (*CSV_ENDINGS, ".parquet")
LARGEST_FILE = 4 << 30
"""Largest size of one file, in bytes."""
MOST_FILES = 100_000
OTHER_FILES = {
    b"pk\x03\x04": "a workbook or a zip file: save the sheet as CSV",
    b"\xd0\xcf\x11\xe0": "an old workbook: save the sheet as CSV",
    b"\x1f\x8b": "compressed with gzip: unpack it first",
    b"par1": "Parquet: let its name end in .parquet",
    b"%pdf": "a PDF: export the table as CSV",
    b"<!doctype": "HTML: perhaps a page was saved instead of the table",
    b"<html": "HTML: perhaps a page was saved instead of the table",
    b"<?xml": "XML: write the table as CSV",
    b"[{": "JSON: write the table as CSV",
    b'{"': "JSON: write the table as CSV",
    b"sqlite format 3": "a database: export the table as CSV",
}
"""Descriptions of files that are often mistaken for CSV, by their first bytes in lower case."""
MOST_NAMED = 12
"""Largest number of columns that a message names."""
UTF_8 = "utf-8"
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_parsed: ContextVar[list[tuple[Any, Dataset]] | None] = ContextVar("parsed", default=None)


@contextmanager
def reading_once() -> Iterator[None]:
    """Parse each table only once within the block, unless its bytes or its coding change."""
    parsed = _parsed.get()
    token = _parsed.set([] if parsed is None else parsed)
    try:
        yield
    finally:
        _parsed.reset(token)


def read_table(path: Path, coding: TableCoding, *, owner: str = "", **options: Any) -> Dataset:
    """Return the data set in a file with a column for the client, or in a folder with one file per client.

    `owner` names the only client of a file that names none; `options` are further arguments of `_dataset`.

    Raises:
        InputError: If a file or a column is missing, or a value cannot be coded.
    """
    parsed = _parsed.get()
    key = None if parsed is None else (path, _digests(path), _digests(options.get("test_file")), coding, owner, options)
    for known, dataset in parsed or ():
        if known == key:
            return dataset
    tables = _read_tables(path, coding, one_file=bool(owner))
    dataset = _dataset(f"table:{path.stem}", tables, coding, owner=owner, **options)
    if parsed is not None:
        parsed.append((key, dataset))
    return dataset


def _digests(path: Path | None) -> list[tuple[str, bytes]]:
    """Return the name and digest of each file of a table; an empty list if the path is None or does not exist."""
    if path is None or not path.exists():
        return []
    digests = []
    for file in filter(Path.is_file, table_files(path) if path.is_dir() else [path]):  # a pipe would block
        with file.open("rb") as stream:
            digests.append((file.name, hashlib.file_digest(stream, "sha256").digest()))
    return digests


def read_frame(frame: Any, coding: TableCoding, **options: Any) -> Dataset:
    """Return the data set in a pandas or polars frame, a pyarrow table or a Hugging Face data set."""
    if not coding.client:
        raise InputError("the frame holds all clients: name the column with the client of each row (data.client)")
    names = frame_names(frame)
    odd = next((name for name in names if not isinstance(name, str) or names.count(name) > 1), None)
    if odd is not None:
        raise InputError(f"the frame's columns need distinct names, as texts; found {odd!r}")
    try:
        columns = {str(name): _values(frame[name]) for name in names}
    except TypeError as error:
        raise InputError(
            f"the columns of a {type(frame).__name__} cannot be read ({error}): a lazy frame needs .collect() first"
        ) from error
    table = TableFile("the frame", columns, separator=NO_SEPARATOR)
    if not columns or not table.rows:
        raise InputError("the frame has no rows")
    return _dataset("frame", [table], coding, **options)


def _values(column: Any) -> list[Any]:
    """Return the values of a column of pyarrow, pandas or polars, or of any iterable."""
    for method in ("to_pylist", "to_list", "tolist"):
        if hasattr(column, method):
            return list(getattr(column, method)())
    return list(column)


def _dataset(
    name: str,
    tables: Sequence[TableFile],
    coding: TableCoding,
    *,
    held_out: float = 0.0,
    test_file: Path | None = None,
    seed: int = 0,
    owner: str = "",
    columns: Sequence[str] = (),
) -> Dataset:
    """Return the data set in tables with equal columns.

    Args:
        name: Name of the data set.
        tables: Tables as read.
        coding: Role of every column.
        held_out: Share of each client's rows to hold out for testing, drawn by `seed` and the key of each row.
        test_file: File whose rows are used for testing instead.
        seed: Seed of the run.
        owner: Name of the only client, if the tables name none.
        columns: Required features in their order, whatever the order in the tables.
    """
    features = _feature_columns(tables, coding)
    other = sorted(set(columns) ^ set(features)) if columns else []
    if other:
        has, remedy = ("no", "add it") if other[0] in columns else ("another", "leave it out")
        raise InputError(
            f"{tables[0].name} has {has} column {other[0]!r}, unlike the table that the run was trained from: "
            f"{remedy}; its features are {', '.join(columns)[:400]}"
        )
    features = list(columns) or features
    samples, labels, owners, identities = [], [], [], []
    for table in tables:
        samples.append(coding.features(table, features))
        labels.append(coding.labels(table))
        owners += [owner] * table.rows if owner else _owners(table, coding)
        if coding.identity:
            identities += _filled(table, coding.identity, "the identity (data.id), is empty")
    x, y = np.concatenate(samples), np.concatenate(labels)
    client = np.array(owners)
    identity = np.array(identities) if coding.identity else numbers_of(owners)
    different = np.unique(identity).size  # rows of one person share an identity
    if coding.identity and len(identity) > 20 and different * 10 < len(identity):
        _warn(
            f"data.id has only {different} different values in {len(identity)} rows: a request for one of them takes "
            "many rows out"
        )
    warn_of_table(x, y, features, coding)
    kept = np.ones(len(y), dtype=bool)
    x_test, y_test, client_test = x[:0], y[:0], None
    if test_file is not None:
        (test,) = _read_tables(test_file, coding, one_file=True)
        _check_columns(test_file, test, features)
        x_test, y_test = coding.features(test, features), coding.labels(test).astype(y.dtype)
        client_test = np.array(_owners(test, coding)) if coding.client in test.columns else None
        if client_test is not None and not np.isin(client_test, client).any():
            _warn(
                f"no client of data.test_file has rows in the table (found {client_test[0]}), so nothing is measured: "
                f"leave out its column {coding.client} if its rows belong to no client"
            )
    elif held_out > 0:
        kept = ~held_out_rows(client, identity if coding.identity else contents_of(x, y), held_out, seed)
        x_test, y_test, client_test = x[~kept], y[~kept], client[~kept]
    classes = coding.class_names or (tuple(map(str, range(int(y.max()) + 1))) if y.dtype.kind == "i" else ())
    return Dataset(
        name,
        x[kept],
        y[kept],
        x_test,
        y_test,
        classes,
        client_train=client[kept],
        row_ids=identity[kept],
        client_test=client_test,
    )


def first_row(path: Path, separator: str = "", encoding: str = UTF_8) -> list[str]:
    """Return the fields of a CSV file's first line, which should be the names of its columns."""
    text = _decoded(path, encoding)
    try:
        return next((fields for _, fields in _csv_rows(text, separator or likely_separator(text))), [])
    except csv.Error as error:
        raise _not_csv(path, error) from error


def column_names(path: Path, coding: TableCoding) -> list[str]:
    """Return the columns of a table, or of the first file of a folder, in order; rows of a CSV file are not parsed."""
    if path.is_dir():
        path = next(iter(table_files(path)), path / "none")
    if path.suffix.lower() not in CSV_ENDINGS or not path.is_file():
        return list(read_columns(path, coding).columns)
    return list(coding.header) or [
        name for name in map(stripped, first_row(path, coding.separator, coding.encoding)) if name
    ]


def frame_names(frame: Any) -> list[str]:
    """Return the columns of a frame, in order."""
    return list(frame.column_names if hasattr(frame, "column_names") else frame.columns)


def read_features(
    path: Path, coding: TableCoding, names: Sequence[str] | None = None, refused: dict[int, str] | None = None
) -> tuple[Array, list[str]]:
    """Return rows of features of new data, coded like the clients' rows, and their identities if a column holds them.

    Args:
        path: The file.
        coding: Coding of the clients' rows.
        names: Columns of the features, in the order of the result, or None for all feature columns of the file.
        refused: If given, it receives the reason for each row that cannot be coded, and no exception is raised.
    """
    (table,) = _read_tables(path, coding, one_file=True)
    features = coding.features_of(list(table.columns)) if names is None else list(names)
    _check_columns(path, table, features)
    identities = table.columns.get(coding.identity, ()) if coding.identity else ()
    return coding.features(table, features, refused), [str(value) for value in identities]


def _check_columns(path: Path, table: TableFile, features: Sequence[str]) -> None:
    """Check that a file has the columns of all features."""
    absent = [name for name in features if name not in table.columns]
    if absent:
        read_as = f", read as separated by {SEPARATORS[table.separator]}," if table.separator else ""
        raise InputError(f"{path}{read_as} has no column {absent[0]!r}; it has {', '.join(table.columns)[:400]}")


def warn_of_table(x: Array, y: Array, columns: Sequence[str], coding: TableCoding) -> None:
    """Warn of likely mistakes, with one warning for each kind; nothing is refused."""
    start, numbers = 0, 0
    scaled, unscaled, unlike = dict[str, int](), dict[str, int](), []
    for name in () if coding.text else columns:
        values, start = x[:, start], start + coding.width(name)
        if name in coding.categories:
            continue
        numbers += 1
        far = int((np.abs(values) > FAR_OUTSIDE).sum())
        if far:
            (scaled if name in coding.scales else unscaled)[name] = far
        shift, factor = coding.scales.get(name, (0.0, 1.0))
        raw = values * factor + shift
        if len(raw) > 20 and np.allclose(raw, np.round(raw), rtol=0, atol=1e-6) and np.unique(values).size == len(raw):
            unlike.append(name)
    for far_outside, what, advice in (
        (scaled, "scaled values", "correct their constants in data.scale"),
        (unscaled, "values", "set data.scale"),
    ):
        if far_outside:
            counts = [f"{name!r} ({count} of {len(x)} rows)" for name, count in far_outside.items()]
            _warn(
                f"{len(far_outside)} of {numbers} columns of numbers have {what} beyond {FAR_OUTSIDE:g} and "
                f"outweigh the others: {some(counts)}; {advice}, from constants that no client's data decided"
            )
    if unlike:
        _warn(
            "columns with a different whole number in every row, like an identity: "
            f"{some([repr(name) for name in unlike])}; set data.id, or leave the column out with data.ignore"
        )
    if y.dtype.kind == "i" and y.size and y.ndim == 1 and not coding.regression:
        counts_of = np.bincount(y)
        if not coding.classes and (counts_of == 0).any():
            _warn(
                f"column {coding.label!r} has classes 0 to {len(counts_of) - 1}, and no row has class "
                f"{int(np.argmin(counts_of > 0))}: if there is none, list the others in data.classes"
            )
        share = counts_of.max() / y.size
        if share > 0.95 and y.size > 20:
            _warn(
                f"column {coding.label!r}: {share:.1%} of the rows have one class, so a model that always predicts it "
                "is as accurate; look at the AUC, not at the accuracy"
            )


def some(names: Sequence[str]) -> str:
    """Join names for a message; at most `MOST_NAMED` are written out.

    >>> some(["a", "b"]), len(some([str(number) for number in range(1000)]))
    ('a, b', 49)
    """
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _warn(sentence: str) -> None:
    warnings.warn(sentence, SifuWarning, stacklevel=4)


def table_files(folder: Path) -> list[Path]:
    """Return the files of a folder that hold tables, sorted by name."""
    return sorted(
        file for file in folder.iterdir() if file.suffix.lower() in ENDINGS and file.name[0] != "." and file.is_file()
    )


def _read_tables(path: Path, coding: TableCoding, *, one_file: bool) -> list[TableFile]:
    if not path.is_dir():
        if not coding.client and not one_file:
            raise InputError(f"{path} holds all clients: name the column with the client of each row (data.client)")
        return [read_columns(path, coding)]
    if one_file:
        raise InputError(f"{path} is a folder: give one file")
    files = table_files(path)
    if not files or len(files) > MOST_FILES:
        raise InputError(f"{path} has {len(files)} files that end in {', '.join(ENDINGS)}: 1 to {MOST_FILES} are read")
    if len({file.stem for file in files}) != len(files):
        raise InputError(f"{path} has two files for one client: the file name without its ending names the client")
    if coding.client:
        raise InputError(f"{path} has one file per client: leave data.client empty")
    return [read_columns(file, coding) for file in files]


def _feature_columns(tables: Sequence[TableFile], coding: TableCoding) -> list[str]:
    """Return the feature columns in their order; refuse files that differ in their columns."""
    first = tables[0]
    coding.check_columns(list(first.columns), first.name, SEPARATORS.get(first.separator, ""))
    for table in tables[1:]:
        if list(table.columns) != list(first.columns):
            raise InputError(
                f"{table.name} and {first.name} differ in their columns or their order: "
                f"{', '.join(table.columns)[:200]}"
            )
    return coding.features_of(list(first.columns))


def _owners(table: TableFile, coding: TableCoding) -> list[str]:
    if not coding.client:
        return [Path(table.name).stem] * table.rows
    return _filled(table, coding.client, "the client, is empty: name the client of each row")


def _filled(table: TableFile, column: str, trouble: str) -> list[str]:
    """Return a column's values as strings; refuse empty cells. "NA" is a valid value here, not a missing one."""
    values = table.columns[column]
    texts = [stripped(value) if isinstance(value, str) else "" if is_missing(value) else str(value) for value in values]
    if "" in texts:
        raise InputError(f"{table.place(texts.index(''))}: column {column!r}, {trouble}")
    return texts


def read_columns(path: Path, coding: TableCoding) -> TableFile:
    """Return every column of a file, read with the header, separator and encoding of a coding."""
    if not path.is_file():
        raise InputError(f"there is no file {path}: give a {', '.join(ENDINGS)} file, or a folder with one per client")
    if path.stat().st_size > LARGEST_FILE:
        raise InputError(f"{path} has {path.stat().st_size} bytes; files of up to {LARGEST_FILE} bytes are read")
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise InputError(f"the name of {path} must end in {', '.join(ENDINGS)}")
    table = _read_parquet(path) if ending == ".parquet" else _read_csv(path, coding)
    if not table.columns or not table.rows:
        raise InputError(f"{path} has no rows: give a table with a line of names and a line per row")
    return table


def _read_csv(path: Path, coding: TableCoding) -> TableFile:
    text, header, separator = _decoded(path, coding.encoding), coding.header, coding.separator
    rows: list[tuple[int, list[str]]] = []
    try:
        rows.extend(_csv_rows(text, separator))
    except csv.Error as error:
        raise _not_csv(path, error, f" after line {rows[-1][0]}" if rows else "") from error
    if not rows:
        return TableFile(str(path), {})
    names, first = header, 0
    if header and [stripped(field) for field in rows[0][1]] == list(header):
        rows = rows[1:]  # skip the file's own header line
    elif not header:
        first, fields = rows.pop(0)
        names = tuple(map(stripped, fields))
        while names and not names[-1]:  # the line ends with a separator
            names = names[:-1]
    if len(set(names)) != len(names) or not all(names):
        twice = next((name for name in names if name and names.count(name) > 1), "")
        what = f"{twice!r} occurs twice" if twice else f"column {names.index('') + 1} has none"
        raise InputError(
            f"{path}, line {first}: the first line must name the columns, each with its own name; {what}. Give it one "
            "(pandas: index=False leaves its index out), or for a file without such a line name the columns in "
            "data.header"
        )
    for row, (line, fields) in enumerate(rows):
        if len(fields) != len(names) and (len(fields) < len(names) or any(map(str.strip, fields[len(names) :]))):
            hint = (
                f"the file's first line, {names[0][:60]!r}, does not name them: remove the lines above the names"
                if len(names) == 1
                else "look for a separator or a quote too many or too few there"
            )
            raise InputError(
                f"{Place(str(path), line, row)} has {len(fields)} fields separated by {SEPARATORS[separator]}, and the "
                f"columns are {len(names)}: {hint}"
            )
    # A separator at the end of a line makes an empty field, which has no name.
    lines, every = zip(*rows, strict=True) if rows else ((), ())
    columns: dict[str, list[Any]] = {name: list(map(itemgetter(number), every)) for number, name in enumerate(names)}
    return TableFile(str(path), columns, lines, separator)


def _not_csv(path: Path, error: csv.Error, where: str = "") -> InputError:
    return InputError(f"{path} is not a CSV file{where} ({error}): look for a quote that is not closed")


def _csv_rows(text: str, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each row that is not blank: the number of its last line, and its fields."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True, strict=True)
    for fields in reader:
        if reader.line_num == 1 and re.fullmatch(r"sep=.?", separator.join(fields).strip()):
            continue  # Excel declares the separator in such a line
        if any(field.strip() for field in fields):
            yield reader.line_num, fields


def likely_separator(text: str) -> str:
    """Return the separator that splits the first line into the most fields; ties go to the comma."""
    first = next((line for line in text.splitlines() if line.strip() and not line.startswith("sep=")), "")
    fields = {mark: len(next(csv.reader([first], delimiter=mark))) for mark in SEPARATORS}
    return max(SEPARATORS, key=lambda mark: (fields[mark], mark == ","))


def separator_of(path: Path) -> str:
    """Return the likely separator of a CSV file, for a proposed spec."""
    try:
        return likely_separator(_decoded(path, UTF_8))
    except csv.Error as error:
        raise _not_csv(path, error) from error


def _decoded(path: Path, encoding: str) -> str:
    """Return the text of a file; a byte-order mark of UTF-8 is skipped."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    kind = next((kind for start, kind in OTHER_FILES.items() if content[:16].lower().startswith(start)), None)
    if kind is not None:
        raise InputError(f"{path} is not a CSV file but {kind}")
    try:
        return content.decode(encoding).removeprefix("\ufeff")
    except (UnicodeDecodeError, LookupError) as error:
        raise InputError(
            f"{path} is not a text file in {encoding}: save it as UTF-8, or name its encoding in data.encoding"
        ) from error


def _read_parquet(path: Path) -> TableFile:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError as error:
        raise InputError(f"to read {path}, install pyarrow: {install_extra('parquet')}") from error
    try:
        table = parquet.read_table(path)
        columns = {str(name): table.column(name).to_pylist() for name in table.column_names}
    except (ArrowException, OSError, ValueError) as error:
        raise InputError(f"{path} is not a readable Parquet file ({type(error).__name__})") from error
    return TableFile(str(path), columns, separator=NO_SEPARATOR)
