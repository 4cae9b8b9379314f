"""Files of statistics for closed-form heads. A file is never changed."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from sifu.errors import InputError, RunDamagedError
from sifu.store import files
from sifu.store.files import SALT_BYTES, stored_path
from sifu.store.packed_numbers import Numbers, pack, unpack
from sifu.theory.closed_form import FixedPoint, Rows, Statistics
from sifu.theory.closed_form.rows import ROW_TYPE
from sifu.version import FORMAT

WORD_TYPE = np.dtype("<i8")
"""Type of the numbers of statistics."""


@dataclass(frozen=True)
class StatisticsRow:
    """A row of `statistics`: an existing file with the statistics of one client or the sum over several.

    `node` is the last node recorded by the event that wrote the file.
    """

    file: str
    node: int
    clients: tuple[int, ...]
    samples: int
    bytes: int
    digest: str

    @property
    def is_sum(self) -> bool:
        """True for the sum from which a head is solved."""
        return self.file.endswith(".sum.statistics")

    @property
    def is_rows(self) -> bool:
        """True if the file holds a client's samples as rows."""
        return self.file.endswith(".rows.statistics")


def write_sum(folder: Path, node: int, clients: Sequence[int], statistics: Statistics) -> dict[str, Any]:
    """Write the file with the sum from which a head is solved, and return its row; see `write_file`."""
    return write_file(folder, f"{node}.sum", node, clients, statistics, statistics.words)


def write_file(
    folder: Path,
    name: str,
    node: int,
    clients: Sequence[int],
    of: Statistics | Rows,
    numbers: Numbers,
) -> dict[str, Any]:
    """Write a file of statistics or rows, before the event that names it, and return its row of `statistics`.

    Args:
        folder: Folder of the run.
        name: Name of the file without its ending.
        node: Last node that the event records.
        clients: Indices of the clients.
        of: The statistics or rows from which the numbers are taken.
        numbers: Numbers of the file.
    """
    row = StatisticsRow(f"{name}.statistics", node, tuple(map(int, clients)), of.samples, 0, "")
    content = pack(numbers, heading(row, of.fixed), secrets.token_bytes(SALT_BYTES))
    files.write_atomically(stored_path(folder, "statistics", row.file), content)
    return asdict(row) | {"bytes": len(content), "digest": sha256(content).hexdigest()}


def heading(row: StatisticsRow, fixed: FixedPoint) -> bytes:
    """Return the first line of a file, which names its form and its fixed-point format."""
    return f"sifu {'rows' if row.is_rows else 'statistics'} {FORMAT} {fixed.describe()}\n".encode()


def begins_as_expected(folder: Path, row: StatisticsRow, fixed: FixedPoint) -> bool:
    """Return whether a file of statistics begins with the heading for this fixed-point format."""
    expected = heading(row, fixed)
    try:
        with stored_path(folder, "statistics", row.file).open("rb") as file:
            found = file.read(len(expected))
    except OSError as error:
        raise RunDamagedError(f"the statistics file {row.file} cannot be read: {error.strerror}") from error
    return found == expected


def read_statistics(folder: Path, row: StatisticsRow, fixed: FixedPoint) -> Statistics:
    """Return the statistics of a complete file, checked against its digest."""
    try:
        statistics = Statistics(fixed, read_numbers(folder, row, fixed).astype(np.int64, copy=False))
    except InputError as error:
        raise RunDamagedError(f"the statistics file {row.file} cannot be read: {error}") from error
    if statistics.samples != row.samples:
        raise RunDamagedError(f"the statistics file {row.file} counts {statistics.samples} samples, not {row.samples}")
    return statistics


def read_numbers(folder: Path, row: StatisticsRow, fixed: FixedPoint, *, of_rows: bool = False) -> Numbers:
    """Return the numbers of a file between its first line and its salt, checked against its digest.

    The file must hold rows if `of_rows` is true, and statistics otherwise.

    Raises:
        RunDamagedError: If the file is missing, changed, or has another form or format than expected.
    """
    path, what = stored_path(folder, "statistics", row.file), f"the statistics file {row.file}"
    if row.is_rows != of_rows:
        raise RunDamagedError(f"{what} does not hold {'rows' if of_rows else 'statistics'}, as it should")
    content, first_line = files.read_content(path, what, row.digest), heading(row, fixed)
    if len(content) != row.bytes:
        raise RunDamagedError(f"{what} has {len(content)} bytes, not {row.bytes}")
    kind = ROW_TYPE if row.is_rows else WORD_TYPE
    between = memoryview(content)[len(first_line) : len(content) - files.SALT_BYTES]
    if not content.startswith(first_line):
        raise RunDamagedError(f"{what} is not in [{fixed.describe()}]")
    try:
        return unpack(between, kind)
    except InputError as error:
        raise RunDamagedError(f"{what} cannot be read: {error}") from error
