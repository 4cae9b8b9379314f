"""What a run keeps of its clients on disk: updates of kept rounds, and statistics of closed-form heads.

Clients' updates on disk: one safetensors file per kept round, one flat tensor per client, named by its number.

The ledger keeps a digest of every update for ever. It is salted, and the salt lies in the file alone: once the update
is erased, the digest cannot confirm a guess of it.

A file is never changed. To take a client out, a new file without it is written, an event names the new one
and drops the old one, and only then the old one is deleted: a kill at any instant leaves one of the two.
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
from sifu.store.row_files import WHOLE, bytes_of_parts, part_of_rows, rows_heading, rows_of_parts
from sifu.theory.arrays import Integers
from sifu.theory.closed_form import FixedPoint, Rows, Statistics, total
from sifu.theory.closed_form.blocks import Blocks, Part, cut, joined, parts_of_rows, parts_through, words_of_part
from sifu.theory.closed_form.rows import ROW_TYPE
from sifu.theory.participation import ClientIndices

SALTS = "salts"
"""The name of the tensor with the salts, a row for each client in ascending order."""


@dataclass(frozen=True)
class NewUpdates:
    """Updates theta_i - theta of one kept round, to be written with an event.

    `node` is the node the round made, with `part` 0; or a heuristic's node, with `part` 1, 2, ... for the rounds it
    replayed. `order` counts the requests carried out when the file is first written, and one more each time it is
    rewritten. `salts` are those of updates that were stored before; new ones get theirs when they are written.
    """

    node: int
    part: int
    order: int
    clients: ClientIndices
    values: NDArray[np.floating]
    salts: NDArray[np.uint8] | None = None

    @property
    def file(self) -> str:
        """The name of the file; a new one each time it is rewritten."""
        return f"{self.node}.{self.part}.{self.order}.safetensors"

    def salted(self, seed: int | None) -> NewUpdates:
        """With a salt for each update: of the operating system, or of the seed of an experiment."""
        if self.salts is not None:
            return self
        salts = [new_salt(seed, f"{self.node}:{self.part}:{client}") for client in self.clients.tolist()]
        return replace(self, salts=np.frombuffer(b"".join(salts), dtype=np.uint8).reshape(len(salts), SALT_BYTES))

    def content(self) -> bytes:
        """The file, byte for byte the same for the same updates and salts."""
        from safetensors.numpy import save

        rows = zip(self.clients.tolist(), self.values, strict=True)
        tensors = {str(client): np.ascontiguousarray(row) for client, row in rows}
        salts = np.asarray(self.salts)[np.argsort(self.clients)]
        return save(tensors | {SALTS: np.ascontiguousarray(salts)})

    def digests(self) -> dict[str, str]:
        """The salted digest of each client's tensor, by the client's number."""
        if self.salts is None:
            raise ValueError("updates are salted before their digests are taken")
        rows = zip(self.clients.tolist(), self.values, self.salts, strict=True)
        return {str(client): salted_digest(row, salt) for client, row, salt in rows}


@dataclass(frozen=True)
class UpdatesRow:
    """A row of `updates`: a file that exists, with the salted digest of each client's tensor."""

    file: str
    node: int
    part: int
    bytes: int
    digest: str
    clients: dict[int, str]


@dataclass(frozen=True)
class StoredUpdates:
    """What a file of updates holds: updates and salts by client."""

    values: dict[int, NDArray[np.floating]]
    salts: dict[int, NDArray[np.uint8]]


def salted_digest(values: NDArray[np.floating], salt: NDArray[np.uint8]) -> str:
    """SHA-256 over the salt and the little-endian bytes of one update."""
    content = values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
    return sha256(salt.tobytes() + content).hexdigest()


def read_updates(folder: Path, row: UpdatesRow) -> StoredUpdates:
    """The updates of a file by client, each checked against its digest."""
    path, what = stored_path(folder, "updates", row.file), f"the updates file {row.file}"
    stored = read_tensors(path, what, row.digest, _by_client)
    digests = {client: salted_digest(values, stored.salts[client]) for client, values in stored.values.items()}
    if digests != row.clients:
        raise RunDamagedError(f"{what} does not hold the updates that were recorded")
    return stored


def _by_client(tensors: dict[str, NDArray[np.floating]]) -> StoredUpdates:
    values = {int(name): tensor for name, tensor in tensors.items() if name != SALTS}
    salts = tensors.get(SALTS)
    if salts is None or salts.dtype.str != "|u1" or salts.shape != (len(values), SALT_BYTES):
        raise ValueError("it does not have a salt for every update")
    return StoredUpdates(values, dict(zip(sorted(values), salts.view(np.uint8), strict=True)))


def only_clients(folder: Path, row: UpdatesRow, stay: Sequence[int]) -> NewUpdates:
    """The same updates, with their salts, in a new file with the clients that `stay` alone."""
    stored, stay = read_updates(folder, row), sorted(stay)
    values, salts = ([kept[client] for client in stay] for kept in (stored.values, stored.salts))
    order = int(row.file.split(".")[2]) + 1
    return NewUpdates(row.node, row.part, order, np.array(stay), np.stack(values), np.stack(salts))


@dataclass(frozen=True)
class OwnStatistics:
    """Clients' own statistics of features through these networks (nodes by group, in the order of the groups).

    `rows` are files by client and part. `blocks` is None where statistics are not cut. A client's files are all of
    one form, statistics or rows of its samples; those of rows have no part for two groups.
    """

    fixed: FixedPoint
    blocks: Blocks | None
    networks: Mapping[int, int]
    rows: Mapping[int, Mapping[Part, StatisticsRow]]

    @staticmethod
    def among(
        stored: Iterable[StatisticsRow], fixed: FixedPoint, blocks: Blocks | None, networks: Mapping[int, int]
    ) -> OwnStatistics:
        """Those of the stored files that are clients' own and went through these networks and no other."""
        rows: dict[int, dict[Part, StatisticsRow]] = {}
        for row in stored:
            if not row.is_sum and can_be_used(row, networks.values()):
                rows.setdefault(row.clients[0], {})[WHOLE if row.part is None else row.part] = row
        return OwnStatistics(fixed, blocks, networks, rows)

    def parts(self, groups: Iterable[int] | None = None) -> tuple[Part, ...]:
        """What a client's statistics consist of, through the networks of all groups or of some."""
        return (WHOLE,) if self.blocks is None else parts_through(self.networks if groups is None else groups)

    def _in_form(self, parts: Iterable[Part], *, of_rows: bool) -> tuple[Part, ...]:
        """Return the parts of rows, or of statistics, that these parts need."""
        return parts_of_rows(parts) if of_rows and self.blocks is not None else tuple(parts)

    def _keeps_rows(self, client: int) -> bool:
        return any(row.is_rows for row in self.rows.get(client, {}).values())

    def lacking(self, client: int, parts: Iterable[Part]) -> tuple[Part, ...]:
        """Those of `parts` that are not kept."""
        own = self.rows.get(client, {})
        return tuple(part for part in self._in_form(parts, of_rows=self._keeps_rows(client)) if part not in own)

    @property
    def complete(self) -> set[int]:
        """The clients of whom nothing is lacking."""
        parts = self.parts()
        return {client for client in self.rows if not self.lacking(client, parts)}

    def parts_to_write(self, client: int, sent: Statistics | Rows, lacking: Sequence[Part]) -> Sequence[Part]:
        """Return the parts of what a client sent that are lacking, in the form that it sent."""
        new = isinstance(sent, Rows) and not self._keeps_rows(client)
        return self._in_form(lacking, of_rows=True) if new else lacking

    def bytes_of(self, sent: Statistics | Rows, parts: Iterable[Part]) -> int:
        """Return the size of these parts of what a client sent."""
        if isinstance(sent, Rows):
            return bytes_of_parts(self.fixed, self.blocks, sent.samples, parts)
        if self.blocks is None:
            return sent.nbytes
        return 8 * sum(words_of_part(self.fixed, self.blocks, part) for part in parts)

    def read(self, folder: Path, client: int, parts: Iterable[Part]) -> Statistics | Rows:
        """These parts of a client's statistics, everything else zero; each file is checked against its digest.

        Rows have all features through the networks of these parts: use `only` on a sum where `parts` has a pair of
        groups without the parts of each.
        """
        own = self.rows[client]
        try:
            if self._keeps_rows(client):
                files_of = {part: own[part] for part in self._in_form(parts, of_rows=True)}
                contents = {part: self._row_content(folder, row) for part, row in files_of.items()}
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

    def _row_content(self, folder: Path, row: StatisticsRow) -> memoryview:
        name = None if row.part is None else part_name(row.part)
        return _content(folder, row, rows_heading(self.fixed, name), self.fixed)

    def only(self, statistics: Statistics, parts: Iterable[Part]) -> Statistics:
        """These parts of what a client sent, everything else zero."""
        if self.blocks is None:
            return statistics
        return joined(self.fixed, self.blocks, {part: cut(statistics, self.blocks, part) for part in parts})

    def in_kept_form(self, client: int, sent: Statistics | Rows) -> Statistics | Rows:
        """Return what a client sent in the form of the parts that are kept of it."""
        if isinstance(sent, Rows) and client in self.rows and not self._keeps_rows(client):
            return total(self.fixed, [sent])
        if not isinstance(sent, Rows) and self._keeps_rows(client):
            raise InputError(f"client {client} sent statistics where rows of its samples are kept: let it send rows")
        return sent

    def completed(
        self, folder: Path, client: int, sent: Statistics | Rows, parts: Iterable[Part], lacking: Sequence[Part]
    ) -> Statistics | Rows:
        """Return `parts` of a client's statistics: those that are `lacking` as sent, the others as they are kept."""
        if self.blocks is None:
            return sent
        if not isinstance(sent, Rows):
            on_disk = [part for part in parts if part not in lacking]
            result = self.only(sent, lacking)
            return result + self.read(folder, client, on_disk) if on_disk else result
        wanted, kept = self._in_form(parts, of_rows=True), self.rows.get(client, {})
        contents: dict[Part, bytes | memoryview] = {
            part: part_of_rows(sent, self.blocks, part)
            if part in lacking or part not in kept
            else self._row_content(folder, kept[part])
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
        """Write these parts of a client's statistics before the event that names them; returns the files' rows."""
        contents: dict[str, tuple[bytes, Sequence[int]]] = {}
        if isinstance(statistics, Rows):
            for part in parts:
                name = None if part == WHOLE else part_name(part)
                content = rows_heading(self.fixed, name) + part_of_rows(statistics, self.blocks, part)
                trunks = tuple(self.networks.values()) if part == WHOLE else tuple(self.networks[g] for g in part)
                contents[f"{client}{'' if name is None else f'.{name}'}.rows"] = (content, trunks)
            return _write(folder, node, [client], statistics.samples, contents, seed)
        if self.blocks is None:
            trunks = tuple(self.networks.values())
            return [write_statistics(folder, node, [client], statistics, is_sum=False, seed=seed, trunks=trunks)]
        for part in parts:
            words = cut(statistics, self.blocks, part).astype("<i8", copy=False).tobytes()
            trunks = tuple(self.networks[group] for group in part)
            contents[f"{client}.{part_name(part)}"] = (part_heading(statistics.fixed, part) + words, trunks)
        return _write(folder, node, [client], statistics.samples, contents, seed)


def can_be_used(row: StatisticsRow, networks: Iterable[int]) -> bool:
    """Whether a file is of use where features go through these networks: a part through some, others through all."""
    nodes = tuple(networks)
    return row.trunks == nodes if row.part is None else set(row.trunks) <= set(nodes)


PUBLIC = "public"
"""The part of statistics that went through no network of a group, as files are named."""


@dataclass(frozen=True)
class StatisticsRow:
    """A row of `statistics`: a file that exists, of one client or of the sum of several.

    `node` is the one that the event which wrote the file recorded last.
    """

    file: str
    node: int
    clients: tuple[int, ...]
    samples: int
    bytes: int
    digest: str
    trunks: tuple[int, ...] = ()
    """The nodes of the groups' networks that features went through, where groups tune one."""

    @property
    def is_sum(self) -> bool:
        """Whether it is the sum that a head is solved from."""
        return self.file.endswith(".sum.statistics")

    @property
    def is_rows(self) -> bool:
        """Whether it has a client's samples as rows."""
        return self.file.endswith(".rows.statistics")

    @property
    def part(self) -> Part | None:
        """Which part of a client's statistics the file has; None where it has all of them.

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
    trunks: Sequence[int] = (),
) -> dict[str, Any]:
    """Write a file before the event that names it; returns its row. `seed` is that of its salt, if it has one."""
    contents = {"sum" if is_sum else str(clients[0]): (statistics.canonical(), trunks)}
    return _write(folder, node, clients, statistics.samples, contents, seed)[0]


def _write(
    folder: Path,
    node: int,
    clients: Sequence[int],
    samples: int,
    contents: Mapping[str, tuple[bytes, Sequence[int]]],
    seed: int | None,
) -> list[dict[str, Any]]:
    """Write files, each under what it is called after its node, with its content and its trunks; returns their rows."""
    rows, salted = [], {}
    for name, (content, trunks) in contents.items():
        file = f"{node}.{name}.statistics"
        content += new_salt(seed, f"statistics:{file}")
        salted[stored_path(folder, "statistics", file)] = content
        row = StatisticsRow(
            file, node, tuple(map(int, clients)), samples, len(content), sha256(content).hexdigest(), tuple(trunks)
        )
        rows.append(asdict(row))
    files.write_all_atomically(salted)
    return rows


def part_name(part: Part) -> str:
    """As files are named.

    >>> [part_name(part) for part in ((), (3,), (0, 2))]
    ['public', '3', '0-2']
    """
    return "-".join(map(str, part)) or PUBLIC


def part_heading(fixed: FixedPoint, part: Part) -> bytes:
    """The line that a file of a part begins with."""
    return Statistics.heading(fixed)[:-1] + f" part={part_name(part)}\n".encode()


def read_statistics(folder: Path, row: StatisticsRow, fixed: FixedPoint) -> Statistics:
    """The statistics of a file, checked against its digest."""
    words = _words(folder, row, Statistics.heading(fixed), fixed)
    try:
        statistics = Statistics.from_words(fixed, words)
    except InputError as error:
        raise RunDamagedError(f"the statistics file {row.file} cannot be read: {error}") from error
    if statistics.samples != row.samples:
        raise RunDamagedError(f"the statistics file {row.file} counts {statistics.samples} samples, not {row.samples}")
    return statistics


def read_part(folder: Path, row: StatisticsRow, fixed: FixedPoint) -> Integers:
    """The words of a part, checked against the digest of its file."""
    part = row.part
    if part is None:
        raise RunDamagedError(f"the statistics file {row.file} is not one of a part")
    return _words(folder, row, part_heading(fixed, part), fixed)


def _words(folder: Path, row: StatisticsRow, heading: bytes, fixed: FixedPoint) -> Integers:
    content = _content(folder, row, heading, fixed)
    return np.frombuffer(content, "<i8", len(content) // 8).astype(np.int64, copy=False)


def _content(folder: Path, row: StatisticsRow, heading: bytes, fixed: FixedPoint) -> memoryview:
    """Return what a file has between its heading and its salt, checked against its digest."""
    content = files.read_content(
        stored_path(folder, "statistics", row.file), f"the statistics file {row.file}", row.digest
    )
    if len(content) != row.bytes:
        raise RunDamagedError(f"the statistics file {row.file} has {len(content)} bytes, not {row.bytes}")
    numbers = len(content) - len(heading) - files.SALT_BYTES
    if not content.startswith(heading) or numbers % (ROW_TYPE.itemsize if row.is_rows else 8):
        raise RunDamagedError(
            f"the statistics file {row.file} is not in [{fixed.describe()}]. If the run's groups tune a network and an "
            "earlier version trained it, use that version: features of tuned networks had another length"
        )
    return memoryview(content)[len(heading) : len(heading) + numbers]
