"""`--records FILE`: which records of a client to forget, by row number, one a line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sifu.errors import InputError
from sifu.store.regular_files import read_plain

RecordsOption = Annotated[
    Path | None,
    typer.Option(
        "--records",
        help="Only these records of the one client, which stays: a text file with one row number a line, counted from "
        "0 in the data it joined with; # begins a comment.",
        metavar="FILE",
    ),
]


def read_records(path: Path) -> list[int]:
    """The row numbers in a file; which of them the client has is checked against the run."""
    try:
        lines = read_plain(path, links=True).decode().splitlines()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not a text file: write one row number a line") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        if not (text.isascii() and text.isdecimal() and len(text) < 16):
            raise InputError(f"line {number} of {path} is {text[:40]!r}: write one row number a line, counted from 0")
        rows.append(int(text))
    if not rows:
        raise InputError(f"{path} names no record: write one row number a line, counted from 0")
    return rows
