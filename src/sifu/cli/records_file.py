"""`--records`: which records of a client to forget, by identity or by row number."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sifu.errors import InputError

RecordsOption = Annotated[
    str | None,
    typer.Option(
        "--records",
        help="Only these records of the one client, which stays: A,B,... or a text file with one per line. Each is an "
        "identity where the spec has data.id, else a row number counted from 0 in the data of this client.",
        metavar="FILE|A,B",
    ),
]


def read_records(text: str, by_identity: bool) -> list[int | str]:
    """The records that `--records` names; which of them the client has is checked against the run.

    >>> read_records("P0001,P0002", by_identity=True), read_records("3,5", by_identity=False)
    (['P0001', 'P0002'], [3, 5])
    """
    path = Path(text)
    entries = _lines(path) if path.is_file() else [(f"{entry!r}", entry) for entry in text.split(",")]
    records = [_record(where, entry.strip(), by_identity) for where, entry in entries if entry.strip()]
    if not records:
        raise InputError(f"--records {text[:80]!r} names no record: write one per line in a file, or A,B,...")
    return records


def _lines(path: Path) -> list[tuple[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not a text file: write one record per line") from error
    return [(f"line {number} of {path}", line.partition("#")[0]) for number, line in enumerate(lines, start=1)]


def _record(where: str, entry: str, by_identity: bool) -> int | str:
    if by_identity:
        return entry
    if not (entry.isascii() and entry.isdecimal() and len(entry) < 16):
        raise InputError(
            f"{where} is {entry[:40]!r}, which is not a row number counted from 0. Identities need a column for them "
            "(data.id of the spec); a file of that name does not exist"
        )
    return int(entry)
