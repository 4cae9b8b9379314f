"""Clients' updates on disk: one safetensors file per kept round, one flat tensor per client, named by its number.

A file is never changed. To take a client out, a new file without it is written, an event names the new one
and drops the old one, and only then the old one is deleted: a kill at any instant leaves one of the two.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sifu.errors import RunDamagedError
from sifu.store.files import read_tensors
from sifu.theory.participation import ClientIndices

UPDATES = "updates"
FILE_NAME = re.compile(r"(\d+)\.(\d+)\.(\d+)\.safetensors")


@dataclass(frozen=True)
class NewUpdates:
    """Updates theta_i - theta of one kept round, to be written with an event.

    `node` is the node the round made, with `part` 0; or a heuristic's node, with `part` 1, 2, ... for the rounds it
    replayed. `order` counts the requests carried out when the file is written.
    """

    node: int
    part: int
    order: int
    clients: ClientIndices
    values: NDArray[np.floating]

    @property
    def file(self) -> str:
        """The name of the file; a new one each time it is rewritten."""
        return f"{self.node}.{self.part}.{self.order}.safetensors"

    def content(self) -> bytes:
        """The file, byte for byte the same for the same updates."""
        from safetensors.numpy import save

        rows = zip(self.clients.tolist(), self.values, strict=True)
        return save({str(client): np.ascontiguousarray(row) for client, row in rows})

    def digests(self) -> dict[str, str]:
        """SHA-256 of each client's tensor, little-endian, by the client's number."""
        rows = zip(self.clients.tolist(), self.values, strict=True)
        return {str(client): tensor_digest(row) for client, row in rows}


@dataclass(frozen=True)
class UpdatesRow:
    """A row of `updates`: a file that exists, with the digest of each client's tensor."""

    file: str
    node: int
    part: int
    bytes: int
    digest: str
    clients: dict[int, str]


def tensor_digest(values: NDArray[np.floating]) -> str:
    """SHA-256 over the little-endian bytes of one update."""
    return hashlib.sha256(values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()).hexdigest()


def updates_path(folder: Path, file: str) -> Path:
    """Where a file of updates lies; a database from a stranger may name any."""
    if not FILE_NAME.fullmatch(file):
        raise RunDamagedError(f"{folder} is damaged: it names the file of updates {file[:80]!r}")
    return folder / UPDATES / file


def read_updates(folder: Path, row: UpdatesRow) -> dict[int, NDArray[np.floating]]:
    """The updates of a file by client, each checked against its digest."""
    path, what = updates_path(folder, row.file), f"the updates file {row.file}"
    tensors = read_tensors(path, what, row.digest, lambda named: {int(name): named[name] for name in named})
    if {client: tensor_digest(values) for client, values in tensors.items()} != row.clients:
        raise RunDamagedError(f"{what} does not hold the updates that were recorded")
    return tensors


def only_clients(row: UpdatesRow, held: dict[int, NDArray[np.floating]], stay: Sequence[int], order: int) -> NewUpdates:
    """The same updates in a new file with the clients that `stay` alone."""
    return NewUpdates(row.node, row.part, order, np.array(stay), np.stack([held[client] for client in stay]))
