"""Clients' updates on disk: one safetensors file per kept round, one flat tensor per client, named by its number.

The ledger keeps a digest of every update for ever. It is salted, and the salt lies in the file alone: once the update
is erased, the digest cannot confirm a guess of it.

A file is never changed. To take a client out, a new file without it is written, an event names the new one
and drops the old one, and only then the old one is deleted: a kill at any instant leaves one of the two.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sifu.errors import RunDamagedError
from sifu.store.files import SALT_BYTES, new_salt, read_tensors
from sifu.theory.participation import ClientIndices

UPDATES = "updates"
FILE_NAME = re.compile(r"(\d+)\.(\d+)\.(\d+)\.safetensors")
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
    return hashlib.sha256(salt.tobytes() + content).hexdigest()


def updates_path(folder: Path, file: str) -> Path:
    """Where a file of updates lies; a database from a stranger may name any."""
    if not FILE_NAME.fullmatch(file):
        raise RunDamagedError(f"{folder} is damaged: it names the file of updates {file[:80]!r}")
    return folder / UPDATES / file


def read_updates(folder: Path, row: UpdatesRow) -> StoredUpdates:
    """The updates of a file by client, each checked against its digest."""
    path, what = updates_path(folder, row.file), f"the updates file {row.file}"
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
