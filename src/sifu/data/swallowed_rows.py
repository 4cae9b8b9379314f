"""Refusal of tables in which a stray quote made rows part of another row's field.

A quote that is not closed makes all lines up to the next quote part of one field. If that field is in an ignored column
or in a text column, the rows on these lines are lost without an error: a client that leaves would have decided which
rows of other clients are trained on. Fields of several lines are allowed, unless one of their lines is a complete row
by itself.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence

from sifu.data.table_coding import TableCoding, TableFile
from sifu.data.table_values import stripped
from sifu.errors import InputError


def possible_rows(
    last: int, further: Sequence[str], columns: int, separator: str
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield the number and the fields of each continuation line of a row that has a field for every column.

    Args:
        last: Number of the last line of the row.
        further: Lines of the row after its first one.
        columns: Number of columns of the table.
        separator: Separator of the fields.
    """
    for number, line in enumerate(further, start=last - len(further) + 1):
        fields = next(csv.reader([line], delimiter=separator, skipinitialspace=True), [])
        if len(fields) >= columns and not any(map(str.strip, fields[columns:])):
            yield number, tuple(fields[:columns])


def refuse_swallowed_rows(table: TableFile, coding: TableCoding, features: Sequence[str]) -> None:
    """Refuse a table in which a line inside a quoted field is a complete row by itself.

    Args:
        table: Table as read.
        coding: Role of every column.
        features: Columns that are features.

    Raises:
        InputError: If a client, a label and features can be read from such a line.
    """
    for line, fields in table.inside_quotes:
        columns = {name: [field] for name, field in zip(table.columns, fields, strict=True)}
        row = TableFile(table.name, columns, (line,), table.separator)
        if coding.client and not stripped(row.columns[coding.client][0]):
            continue
        try:
            coding.labels(row)
            if not coding.text:
                coding.features(row, features)
        except InputError:
            continue
        before = max((number for number in table.lines if number < line), default=1)
        raise InputError(
            f"{table.name}: line {line} is a row of its own, but lies inside a quoted field that begins after line "
            f"{before}, so it would be lost: close the quote there, or write two quotes for a quote inside a field"
        )
