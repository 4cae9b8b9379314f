"""Files of statistics for closed-form heads, which are never changed (docs/store.md, section 5a).

Statistics are int64 and rows are int32, but most of their high bytes only repeat the sign, so numbers are packed
without loss: a number of 2h bytes is divided into its lower half, stored unchanged, and its upper half, a signed number
of h bytes. Upper halves are stored in runs of `RUN` numbers, each with the smallest width (0, 1, 2 or 4 bytes per
number) that fits. Files of rows become half as large and sums a third smaller, about as fast as a copy.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sifu.errors import InputError, RunDamagedError
from sifu.store import files
from sifu.store.files import SALT_BYTES, stored_path
from sifu.theory.closed_form import FixedPoint, Rows, Statistics
from sifu.theory.closed_form.rows import ROW_TYPE
from sifu.version import FORMAT

Numbers = NDArray[np.signedinteger]
RUN = 64
"""Number of values in a run; their upper halves share one width."""
COUNT_TYPE = np.dtype("<u8")
"""Type of the first number of packed content, which counts the numbers that follow."""


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
    """Write a file of statistics or rows, before the event that names it, and return its row of `statistics`."""
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


@dataclass(frozen=True)
class OwnStatistics:
    """Files with the statistics or rows of single clients, from which a closed-form head can be solved again.

    A file of rows holds the features of a client's samples in fixed point, row by row, and then their targets.

    Attributes:
        fixed: Fixed-point format of the numbers.
        rows: File of each client.
    """

    fixed: FixedPoint
    rows: Mapping[int, StatisticsRow]

    @staticmethod
    def among(stored: Iterable[StatisticsRow], fixed: FixedPoint) -> OwnStatistics:
        """Return the clients' own statistics among `stored` files."""
        return OwnStatistics(fixed, {row.clients[0]: row for row in stored if not row.is_sum})

    def read(self, folder: Path, client: int) -> Statistics | Rows:
        """Return a client's statistics or rows, read from a checked file.

        Raises:
            RunDamagedError: If the file is missing, changed, or inconsistent.
        """
        row, fixed = self.rows[client], self.fixed
        if not row.is_rows:
            return read_statistics(folder, row, fixed)
        numbers, features = read_numbers(folder, row, fixed, of_rows=True), row.samples * fixed.features
        try:
            rows = Rows(
                fixed,
                numbers[:features].reshape(row.samples, fixed.features),
                numbers[features:].reshape(row.samples, fixed.outputs),
            )
            rows.check("the file")
        except (InputError, ValueError) as error:
            raise RunDamagedError(f"the statistics file {row.file} cannot be read: {error}") from error
        return rows

    @staticmethod
    def write(folder: Path, node: int, client: int, statistics: Statistics | Rows) -> dict[str, Any]:
        """Write the statistics or rows that a client sent, and return the row of the file; see `write_file`."""
        if isinstance(statistics, Rows):
            numbers = np.concatenate([statistics.features.ravel(), statistics.targets.ravel()])
            return write_file(folder, f"{node}.{client}.rows", node, [client], statistics, numbers)
        return write_file(folder, f"{node}.{client}", node, [client], statistics, statistics.words)


def pack(numbers: Numbers, before: bytes = b"", after: bytes = b"") -> memoryview:
    """Return int32 or int64 numbers in packed form, preceded by `before` and followed by `after`.

    >>> len(pack(np.arange(6400, dtype=np.int64))), 8 * 6400
    (25708, 51200)
    """
    values = np.ascontiguousarray(numbers).reshape(-1)
    values = values.astype(values.dtype.newbyteorder("<"), copy=False)
    count, half = values.size, values.dtype.itemsize // 2
    if count % RUN:
        values = np.concatenate([values, np.zeros(-count % RUN, dtype=values.dtype)])
    lower, upper = _halves(values)
    widths = _widths(values.reshape(-1, RUN), half)
    counted = np.array(count, dtype=COUNT_TYPE).tobytes()
    size = len(counted) + lower.nbytes + widths.nbytes + RUN * int(widths.sum(dtype=np.int64))
    content = np.empty(len(before) + size + len(after), dtype=np.uint8)
    start = len(before) + len(counted)
    content[:start] = np.frombuffer(before + counted, np.uint8)
    content[start : start + lower.nbytes].view(lower.dtype)[:] = lower
    start += lower.nbytes
    content[start : start + widths.nbytes] = widths
    start += widths.nbytes
    for width in _choices(half):
        runs = upper[widths == width].astype(f"<i{width}").reshape(-1)
        content[start : start + runs.nbytes].view(runs.dtype)[:] = runs
        start += runs.nbytes
    content[start:] = np.frombuffer(after, np.uint8)
    return content.data


def unpack(content: bytes | memoryview, kind: np.dtype[np.signedinteger]) -> Numbers:
    """Return the numbers in packed content.

    Raises:
        InputError: If the content is not packed numbers of this type.
    """
    half, first = kind.itemsize // 2, COUNT_TYPE.itemsize
    count = int(np.frombuffer(content, COUNT_TYPE, 1)[0]) if len(content) >= first else 0
    runs = -(-count // RUN)
    start = first + runs * RUN * half
    if len(content) < start + runs:
        raise InputError(f"packed numbers have {len(content)} bytes, too few for {count} numbers")
    lower = np.frombuffer(content, f"<u{half}", runs * RUN, first)
    widths = np.frombuffer(content, np.uint8, runs, start)
    start += runs
    if len(content) != start + RUN * int(widths.sum(dtype=np.int64)) or np.setdiff1d(widths, (0, *_choices(half))).size:
        raise InputError(f"packed numbers have {len(content)} bytes, which their widths do not explain")
    values = np.empty(runs * RUN, dtype=kind.newbyteorder("<"))
    lower_halves, upper_halves = _halves(values)
    lower_halves[:] = lower
    for width in (0, *_choices(half)):
        there = widths == width
        found = int(np.count_nonzero(there))
        upper_halves[there] = (
            np.frombuffer(content, f"<i{width}", found * RUN, start).reshape(found, RUN) if width else 0
        )
        start += found * RUN * width
    return values[:count]


def _halves(values: Numbers) -> tuple[NDArray[np.unsignedinteger], Numbers]:
    """Return views of the lower halves of little-endian numbers, and of their upper halves in runs."""
    half = values.dtype.itemsize // 2
    return values.view(f"<u{half}")[::2], values.view(f"<i{half}")[1::2].reshape(-1, RUN)


def _choices(half: int) -> tuple[int, ...]:
    """Return the possible widths, besides 0, of runs of upper halves with `half` bytes."""
    return tuple(width for width in (1, 2, 4) if width <= half)


def _widths(runs: Numbers, half: int) -> NDArray[np.uint8]:
    """Return the fewest bytes per number that hold the upper halves of each run."""
    least, most = runs.min(axis=1, initial=0) >> 8 * half, runs.max(axis=1, initial=0) >> 8 * half
    widths = np.full(len(runs), half, dtype=np.uint8)
    for width in reversed(_choices(half)):
        bound = 1 << (8 * width - 1)
        widths[(least >= -bound) & (most < bound)] = width
    widths[(least == 0) & (most == 0)] = 0
    return widths
