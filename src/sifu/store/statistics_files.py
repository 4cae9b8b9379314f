"""Files of clients' updates in kept rounds, and files of statistics for closed-form heads.

Updates are stored in one safetensors file per kept round, with one flat tensor per client, named by client index.

The ledger keeps a digest of every update permanently. The digest is salted, and only the file holds the salt. Once an
update is erased, its digest cannot confirm a guess of the update.

A file is never changed. To remove a client, a new file without its update is written, an event names the new file and
drops the old one, and only then is the old file deleted. The file that the ledger names therefore exists even if the
process is killed at any of these steps.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sifu.errors import InputError, RunDamagedError
from sifu.store import files
from sifu.store.files import SALT_BYTES, read_tensors, stored_path
from sifu.store.packed_numbers import Numbers, pack, unpack
from sifu.theory.closed_form import FixedPoint, Rows, Statistics
from sifu.theory.closed_form.rows import ROW_TYPE
from sifu.theory.participation import ClientIndices
from sifu.version import FORMAT

WORD_TYPE = np.dtype("<i8")
"""Type of the numbers of statistics."""
SALTS = "salts"
"""Name of the tensor of salts, with one row per client in ascending order."""


@dataclass(frozen=True)
class NewUpdates:
    """Updates theta_i - theta of one kept round, to be written with an event.

    Attributes:
        node: Node that the round made, or the node of a heuristic method that replayed rounds.
        part: 0, or the number of the replayed round (1, 2, ...).
        order: Number of requests executed when the file was first written, plus one for each time it was rewritten.
        clients: Indices of the clients.
        values: One update per row.
        salts: Salts of updates that were stored before, or None for new updates.
    """

    node: int
    part: int
    order: int
    clients: ClientIndices
    values: NDArray[np.floating]
    salts: NDArray[np.uint8] | None = None

    @property
    def file(self) -> str:
        """Name of the file; a rewritten file gets a new name."""
        return f"{self.node}.{self.part}.{self.order}.safetensors"

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the file and return its row; equal updates and salts give equal bytes.

        Call it before recording the event that names the file. New updates get new salts.
        """
        from safetensors.numpy import save

        clients, salts = self.clients.tolist(), self.salts
        if salts is None:
            new = secrets.token_bytes(SALT_BYTES * len(clients))
            salts = np.frombuffer(new, dtype=np.uint8).reshape(len(clients), SALT_BYTES)
        tensors = {str(client): np.ascontiguousarray(row) for client, row in zip(clients, self.values, strict=True)}
        digests = {name: salted_digest(row, salt) for (name, row), salt in zip(tensors.items(), salts, strict=True)}
        content = save(tensors | {SALTS: np.ascontiguousarray(salts[np.argsort(self.clients)])})
        files.write_atomically(stored_path(folder, "updates", self.file), content)
        digest = sha256(content).hexdigest()
        place = {"file": self.file, "node": self.node, "part": self.part}
        return place | {"bytes": len(content), "digest": digest, "clients": digests}


@dataclass(frozen=True)
class UpdatesRow:
    """A row of `updates`: an existing file, with the salted digest of each client's tensor."""

    file: str
    node: int
    part: int
    bytes: int
    digest: str
    clients: dict[int, str]


@dataclass(frozen=True)
class StoredUpdates:
    """Content of a file of updates: updates and salts by client."""

    values: dict[int, NDArray[np.floating]]
    salts: dict[int, NDArray[np.uint8]]


def salted_digest(values: NDArray[np.floating], salt: NDArray[np.uint8]) -> str:
    """Return the SHA-256 of the salt and the little-endian bytes of one update."""
    content = values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
    return sha256(salt.tobytes() + content).hexdigest()


def read_updates(folder: Path, row: UpdatesRow) -> StoredUpdates:
    """Return the updates of a file by client, each checked against its digest."""
    path, what = stored_path(folder, "updates", row.file), f"the updates file {row.file}"
    stored = read_tensors(path, what, row.digest, _by_client)
    digests = {client: salted_digest(values, stored.salts[client]) for client, values in stored.values.items()}
    if digests != row.clients:
        raise RunDamagedError(f"{what} does not contain the recorded updates")
    return stored


def _by_client(tensors: dict[str, NDArray[np.floating]]) -> StoredUpdates:
    values = {int(name): tensor for name, tensor in tensors.items() if name != SALTS}
    salts = tensors.get(SALTS)
    if salts is None or salts.dtype.str != "|u1" or salts.shape != (len(values), SALT_BYTES):
        raise ValueError("it does not have a salt for every update")
    return StoredUpdates(values, dict(zip(sorted(values), salts.view(np.uint8), strict=True)))


def only_clients(folder: Path, row: UpdatesRow, stay: Sequence[int]) -> NewUpdates:
    """Return the content of a new file with the stored updates and salts of the clients in `stay` only."""
    stored, stay = read_updates(folder, row), sorted(stay)
    values, salts = ([kept[client] for client in stay] for kept in (stored.values, stored.salts))
    order = int(row.file.split(".")[2]) + 1
    return NewUpdates(row.node, row.part, order, np.array(stay), np.stack(values), np.stack(salts))


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
