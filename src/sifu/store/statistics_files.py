"""Clients' updates of kept rounds and statistics of closed-form heads, as stored on disk.

Updates are stored in one safetensors file per kept round, with one flat tensor per client, named by client index.

The ledger keeps a digest of every update permanently. The digest is salted, and only the file holds the salt: once the
update is erased, the digest cannot confirm a guess of it.

A file is never changed. To remove a client, a new file without it is written, an event names the new file and drops the
old one, and only then is the old one deleted. A process killed at any instant leaves one of the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sifu.errors import InputError, RunDamagedError
from sifu.store import files
from sifu.store.files import SALT_BYTES, new_salt, read_tensors, stored_path
from sifu.store.packed_numbers import Numbers, pack, unpack
from sifu.store.row_files import WHOLE, bytes_of_parts, part_of_rows, rows_heading, rows_of_parts
from sifu.theory.arrays import Integers
from sifu.theory.closed_form import FixedPoint, Rows, Statistics, total
from sifu.theory.closed_form.blocks import Blocks, Part, cut, joined, parts_of_rows, parts_through, words_of_part
from sifu.theory.closed_form.rows import ROW_TYPE
from sifu.theory.participation import ClientIndices

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
        salts: Salts of updates that were stored before; None for new updates.
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

    def salted(self, seed: int | None) -> NewUpdates:
        """Return the updates with a salt each, from the operating system or from the seed of an experiment."""
        if self.salts is not None:
            return self
        salts = [new_salt(seed, f"{self.node}:{self.part}:{client}") for client in self.clients.tolist()]
        return replace(self, salts=np.frombuffer(b"".join(salts), dtype=np.uint8).reshape(len(salts), SALT_BYTES))

    def content(self) -> bytes:
        """Return the content of the file; the same updates and salts give the same bytes."""
        from safetensors.numpy import save

        rows = zip(self.clients.tolist(), self.values, strict=True)
        tensors = {str(client): np.ascontiguousarray(row) for client, row in rows}
        salts = np.asarray(self.salts)[np.argsort(self.clients)]
        return save(tensors | {SALTS: np.ascontiguousarray(salts)})

    def digests(self) -> dict[str, str]:
        """Return the salted digest of each client's tensor, by client index."""
        if self.salts is None:
            raise ValueError("updates are salted before their digests are taken")
        rows = zip(self.clients.tolist(), self.values, self.salts, strict=True)
        return {str(client): salted_digest(row, salt) for client, row, salt in rows}


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
    """Return a new file with the stored updates and salts of the clients in `stay` only."""
    stored, stay = read_updates(folder, row), sorted(stay)
    values, salts = ([kept[client] for client in stay] for kept in (stored.values, stored.salts))
    order = int(row.file.split(".")[2]) + 1
    return NewUpdates(row.node, row.part, order, np.array(stay), np.stack(values), np.stack(salts))


@dataclass(frozen=True)
class OwnStatistics:
    """Each client's own statistics of the features that the groups' networks computed.

    Attributes:
        fixed: Fixed-point format of the numbers.
        blocks: Division of the statistics into parts; None if they are not divided.
        networks: Node of each group's network, in the order of the groups.
        rows: Files by client and part. All files of a client have the same form, either statistics or rows of its
            samples. Files of rows have no part for a pair of groups.
    """

    fixed: FixedPoint
    blocks: Blocks | None
    networks: Mapping[int, int]
    rows: Mapping[int, Mapping[Part, StatisticsRow]]

    @staticmethod
    def among(
        stored: Iterable[StatisticsRow], fixed: FixedPoint, blocks: Blocks | None, networks: Mapping[int, int]
    ) -> OwnStatistics:
        """Return the clients' own statistics among stored files that can be used with these networks.

        Args:
            stored: Rows of all stored files.
            fixed: Fixed-point format of the numbers.
            blocks: Division of the statistics into parts; None if they are not divided.
            networks: Node of each group's network, in the order of the groups.
        """
        rows: dict[int, dict[Part, StatisticsRow]] = {}
        for row in stored:
            if not row.is_sum and can_be_used(row, networks.values()):
                rows.setdefault(row.clients[0], {})[WHOLE if row.part is None else row.part] = row
        return OwnStatistics(fixed, blocks, networks, rows)

    def parts(self, groups: Iterable[int] | None = None) -> tuple[Part, ...]:
        """Return the parts of a client's statistics, for all groups or for some."""
        return (WHOLE,) if self.blocks is None else parts_through(self.networks if groups is None else groups)

    def _in_form(self, parts: Iterable[Part], *, of_rows: bool) -> tuple[Part, ...]:
        """Return the parts of rows, or of statistics, that are needed to compute `parts`."""
        return parts_of_rows(parts) if of_rows and self.blocks is not None else tuple(parts)

    def _keeps_rows(self, client: int) -> bool:
        return any(row.is_rows for row in self.rows.get(client, {}).values())

    def lacking(self, client: int, parts: Iterable[Part]) -> tuple[Part, ...]:
        """Return the parts that a client must send for `parts`, in the form that is stored for it."""
        own = self.rows.get(client, {})
        return tuple(part for part in self._in_form(parts, of_rows=self._keeps_rows(client)) if part not in own)

    @property
    def complete(self) -> set[int]:
        """Clients with all parts stored."""
        parts = self.parts()
        return {client for client in self.rows if not self.lacking(client, parts)}

    def parts_to_write(self, client: int, sent: Statistics | Rows, lacking: Sequence[Part]) -> Sequence[Part]:
        """Return the parts of a client's message to write, in the form in which the client sent them.

        Args:
            client: Index of the client.
            sent: Statistics or rows that the client sent.
            lacking: Parts that are not stored.
        """
        new = isinstance(sent, Rows) and not self._keeps_rows(client)
        return self._in_form(lacking, of_rows=True) if new else lacking

    def bytes_of(self, sent: Statistics | Rows, parts: Iterable[Part]) -> int:
        """Return the size in bytes of these parts of a client's message."""
        if isinstance(sent, Rows):
            return bytes_of_parts(self.fixed, self.blocks, sent.samples, parts)
        if self.blocks is None:
            return sent.nbytes
        return 8 * sum(words_of_part(self.fixed, self.blocks, part) for part in parts)

    def read(self, folder: Path, client: int, parts: Iterable[Part]) -> Statistics | Rows:
        """Return these parts of a client's statistics with all other entries zero, after checking each file's digest.

        A client that is stored as rows gives all features that the networks of these parts computed. If `parts` has a
        pair of groups without the parts of each group, apply `only` to the sum.

        Args:
            folder: Folder of the run.
            client: Index of the client.
            parts: Parts to read.

        Raises:
            RunDamagedError: If a file is missing, changed, or inconsistent.
        """
        own = self.rows[client]
        try:
            if self._keeps_rows(client):
                files_of = {part: own[part] for part in self._in_form(parts, of_rows=True)}
                contents = {part: self._numbers_of(folder, row) for part, row in files_of.items()}
                return rows_of_parts(self.fixed, self.blocks, next(iter(files_of.values())).samples, contents)
            if self.blocks is None:
                return read_statistics(folder, own[WHOLE], self.fixed)
            words = {part: read_part(folder, own[part], self.fixed) for part in parts}
            statistics = joined(self.fixed, self.blocks, words)
        except InputError as error:
            raise RunDamagedError(f"statistics of client {client} cannot be read: {error}") from error
        if () in words and statistics.samples != own[()].samples:
            counted = f"counts {statistics.samples} samples, not {own[()].samples}"
            raise RunDamagedError(f"the statistics file {own[()].file} {counted}")
        return statistics

    def _numbers_of(self, folder: Path, row: StatisticsRow) -> Numbers:
        name = None if row.part is None else part_name(row.part)
        return _numbers(folder, row, rows_heading(self.fixed, name), self.fixed)

    def only(self, statistics: Statistics, parts: Iterable[Part]) -> Statistics:
        """Return these parts of a client's message, with all other entries zero."""
        if self.blocks is None:
            return statistics
        return joined(self.fixed, self.blocks, {part: cut(statistics, self.blocks, part) for part in parts})

    def in_kept_form(self, client: int, sent: Statistics | Rows) -> Statistics | Rows:
        """Convert a client's message to the form in which its other parts are stored.

        Raises:
            InputError: If the client sent statistics although rows are stored for it.
        """
        if isinstance(sent, Rows) and client in self.rows and not self._keeps_rows(client):
            return total(self.fixed, [sent])
        if not isinstance(sent, Rows) and self._keeps_rows(client):
            raise InputError(f"client {client} sent statistics although this run stores rows: it must send rows")
        return sent

    def completed(
        self, folder: Path, client: int, sent: Statistics | Rows, parts: Iterable[Part], lacking: Sequence[Part]
    ) -> Statistics | Rows:
        """Return `parts` of a client's statistics: `lacking` parts as the client sent them, other parts as stored.

        Args:
            folder: Folder of the run.
            client: Index of the client.
            sent: Statistics or rows that the client sent.
            parts: Parts to return.
            lacking: Parts that are not stored.
        """
        if self.blocks is None:
            return sent
        if not isinstance(sent, Rows):
            on_disk = [part for part in parts if part not in lacking]
            result = self.only(sent, lacking)
            return result + self.read(folder, client, on_disk) if on_disk else result
        wanted, kept = self._in_form(parts, of_rows=True), self.rows.get(client, {})
        contents: dict[Part, Numbers] = {
            part: part_of_rows(sent, self.blocks, part)
            if part in lacking or part not in kept
            else self._numbers_of(folder, kept[part])
            for part in wanted
        }
        return rows_of_parts(self.fixed, self.blocks, sent.samples, contents)

    def write(
        self,
        folder: Path,
        node: int,
        client: int,
        statistics: Statistics | Rows,
        parts: Sequence[Part],
        seed: int | None,
    ) -> list[dict[str, Any]]:
        """Write these parts of a client's statistics before the event that names them.

        Args:
            folder: Folder of the run.
            node: Last node that the event records.
            client: Index of the client.
            statistics: Statistics or rows that the client sent.
            parts: Parts to write.
            seed: Seed of the salts; None for the operating system's generator.

        Returns:
            A row of `statistics` for each file.
        """
        contents: dict[str, tuple[bytes, Numbers, Sequence[int]]] = {}
        if isinstance(statistics, Rows):
            for part in parts:
                name = None if part == WHOLE else part_name(part)
                numbers = part_of_rows(statistics, self.blocks, part)
                backbones = tuple(self.networks.values()) if part == WHOLE else tuple(self.networks[g] for g in part)
                file = f"{client}{'' if name is None else f'.{name}'}.rows"
                contents[file] = (rows_heading(self.fixed, name), numbers, backbones)
            return _write(folder, node, [client], statistics.samples, contents, seed)
        if self.blocks is None:
            backbones = tuple(self.networks.values())
            return [write_statistics(folder, node, [client], statistics, is_sum=False, seed=seed, backbones=backbones)]
        for part in parts:
            backbones = tuple(self.networks[group] for group in part)
            words = cut(statistics, self.blocks, part)
            contents[f"{client}.{part_name(part)}"] = (heading(statistics.fixed, part), words, backbones)
        return _write(folder, node, [client], statistics.samples, contents, seed)


def can_be_used(row: StatisticsRow, networks: Iterable[int]) -> bool:
    """Return whether the statistics in a file can be used together with these networks.

    A file with one part may depend on these networks only. A file with all parts must depend on exactly these networks.
    """
    nodes = tuple(networks)
    return row.trunks == nodes if row.part is None else set(row.trunks) <= set(nodes)


PUBLIC = "public"
"""Name, in file names, of the part of statistics that used no group's network."""


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
    trunks: tuple[int, ...] = ()
    """Nodes of the groups' networks that computed the features, if groups tune one."""

    @property
    def is_sum(self) -> bool:
        """True for the sum from which a head is solved."""
        return self.file.endswith(".sum.statistics")

    @property
    def is_rows(self) -> bool:
        """True if the file holds a client's samples as rows."""
        return self.file.endswith(".rows.statistics")

    @property
    def part(self) -> Part | None:
        """The part of a client's statistics in the file; None if it holds all of them.

        >>> names = ("", ".rows", ".public", ".0-2", ".4.rows")
        >>> [StatisticsRow(f"7.3{name}.statistics", 7, (3,), 5, 99, "").part for name in names]
        [None, None, (), (0, 2), (4,)]
        """
        names = self.file.removesuffix(".statistics").removesuffix(".rows").split(".")
        if len(names) < 3:
            return None
        return () if names[2] == PUBLIC else tuple(int(group) for group in names[2].split("-"))


def write_statistics(
    folder: Path,
    node: int,
    clients: Sequence[int],
    statistics: Statistics,
    *,
    is_sum: bool,
    seed: int | None,
    backbones: Sequence[int] = (),
) -> dict[str, Any]:
    """Write a file of statistics before the event that names it.

    Args:
        folder: Folder of the run.
        node: Last node that the event records.
        clients: Indices of the clients.
        statistics: Statistics of one client, or the sum over several.
        is_sum: True if it is the sum from which a head is solved.
        seed: Seed of the salt; None for the operating system's generator.
        backbones: Nodes of the groups' networks that computed the features.

    Returns:
        The row of `statistics` for the file.
    """
    contents = {"sum" if is_sum else str(clients[0]): (heading(statistics.fixed), statistics.words, backbones)}
    return _write(folder, node, clients, statistics.samples, contents, seed)[0]


def _write(
    folder: Path,
    node: int,
    clients: Sequence[int],
    samples: int,
    contents: Mapping[str, tuple[bytes, Numbers, Sequence[int]]],
    seed: int | None,
) -> list[dict[str, Any]]:
    """Write files, given by name with heading, numbers and networks (`backbones`), and return their rows."""
    rows, salted = [], {}
    for name, (first_line, numbers, backbones) in contents.items():
        file = f"{node}.{name}.statistics"
        content = pack(numbers, first_line, new_salt(seed, f"statistics:{file}"))
        salted[stored_path(folder, "statistics", file)] = content
        row = StatisticsRow(
            file, node, tuple(map(int, clients)), samples, len(content), sha256(content).hexdigest(), tuple(backbones)
        )
        rows.append(asdict(row))
    files.write_all_atomically(salted)
    return rows


def part_name(part: Part) -> str:
    """Return the name of a part for file names.

    >>> [part_name(part) for part in ((), (3,), (0, 2))]
    ['public', '3', '0-2']
    """
    return "-".join(map(str, part)) or PUBLIC


def heading(fixed: FixedPoint, part: Part | None = None) -> bytes:
    """Return the first line of a file of statistics, complete or with one part."""
    return f"sifu statistics 2 {fixed.describe()}{'' if part is None else f' part={part_name(part)}'}\n".encode()


def begins_as_expected(folder: Path, row: StatisticsRow, fixed: FixedPoint) -> bool:
    """Return whether a file of statistics begins with the heading for this fixed-point format."""
    expected = heading(fixed)
    try:
        with stored_path(folder, "statistics", row.file).open("rb") as file:
            found = file.read(len(expected))
    except OSError as error:
        raise RunDamagedError(f"the statistics file {row.file} cannot be read: {error.strerror}") from error
    return found in (expected, _unpacked(expected))


def read_statistics(folder: Path, row: StatisticsRow, fixed: FixedPoint) -> Statistics:
    """Return the statistics of a file, checked against its digest."""
    words = _numbers(folder, row, heading(fixed), fixed).astype(np.int64, copy=False)
    try:
        statistics = Statistics(fixed, words)
    except InputError as error:
        raise RunDamagedError(f"the statistics file {row.file} cannot be read: {error}") from error
    if statistics.samples != row.samples:
        raise RunDamagedError(f"the statistics file {row.file} counts {statistics.samples} samples, not {row.samples}")
    return statistics


def read_part(folder: Path, row: StatisticsRow, fixed: FixedPoint) -> Integers:
    """Return the words of a part, checked against the digest of its file."""
    part = row.part
    if part is None:
        raise RunDamagedError(f"the statistics file {row.file} is not one of a part")
    return _numbers(folder, row, heading(fixed, part), fixed).astype(np.int64, copy=False)


def _unpacked(first_line: bytes) -> bytes:
    """Return the first line in the format of older runs, which do not pack the numbers."""
    return first_line.replace(b" 2 ", b" 1 ", 1)


def _numbers(folder: Path, row: StatisticsRow, first_line: bytes, fixed: FixedPoint) -> Numbers:
    """Return the numbers of a file between its first line and its salt, checked against its digest.

    Files of older runs have a first line with the version 1, and their numbers are not packed.
    """
    content = files.read_content(
        stored_path(folder, "statistics", row.file), f"the statistics file {row.file}", row.digest
    )
    if len(content) != row.bytes:
        raise RunDamagedError(f"the statistics file {row.file} has {len(content)} bytes, not {row.bytes}")
    kind = ROW_TYPE if row.is_rows else WORD_TYPE
    between = memoryview(content)[len(first_line) : len(content) - files.SALT_BYTES]
    if content.startswith(first_line):
        try:
            return unpack(between, kind)
        except InputError as error:
            raise RunDamagedError(f"the statistics file {row.file} cannot be read: {error}") from error
    if content.startswith(_unpacked(first_line)) and len(between) % kind.itemsize == 0:
        return np.array(np.frombuffer(between, kind), dtype=kind)
    raise RunDamagedError(
        f"the statistics file {row.file} is not in [{fixed.describe()}]. If the run's groups tune a network and an "
        "earlier version trained it, use that version: features of tuned networks had another length"
    )
