"""Clients' statistics on disk: one file for each client whose own are kept, and one for the sum a head is solved from.

A file is the canonical form of `sifu.theory.closed_form.sums` and a salt. The ledger keeps the digest of a file
for good; the salt lies in the file alone, so once the file is erased its digest does not tell whether a guess of a
client's data is right. A file is never changed: a sum without a client is a new file with a salt of its own, an event
names it and drops the old one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sifu.errors import InputError, RunDamagedError
from sifu.store import files
from sifu.theory.closed_form import FixedPoint, Statistics

STATISTICS = "statistics"
STATISTICS_NAME = re.compile(r"(\d+)\.(\d+|sum)\.statistics")


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


def statistics_path(folder: Path, file: str) -> Path:
    """Where a file of statistics lies; a database from a stranger may name any."""
    if not STATISTICS_NAME.fullmatch(file):
        raise RunDamagedError(f"{folder} is damaged: it names the file of statistics {file[:80]!r}")
    return folder / STATISTICS / file


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
    file = f"{node}.{'sum' if is_sum else clients[0]}.statistics"
    content = statistics.canonical() + files.new_salt(seed, f"statistics:{file}")
    files.write_atomically(statistics_path(folder, file), content)
    return {
        "file": file,
        "node": node,
        "clients": [int(client) for client in clients],
        "samples": statistics.samples,
        "bytes": len(content),
        "digest": hashlib.sha256(content).hexdigest(),
        "trunks": list(trunks),
    }


def read_statistics(folder: Path, row: StatisticsRow, fixed: FixedPoint) -> Statistics:
    """The statistics of a file, checked against its digest."""
    content = files.read_content(statistics_path(folder, row.file), f"the statistics file {row.file}", row.digest)
    if len(content) != row.bytes:
        raise RunDamagedError(f"the statistics file {row.file} has {len(content)} bytes, not {row.bytes}")
    heading = Statistics.heading(fixed)
    if not content.startswith(heading) or (len(content) - len(heading)) % 8:
        raise RunDamagedError(f"the statistics file {row.file} is not in [{fixed.describe()}]")
    words = np.frombuffer(content[len(heading) : -files.SALT_BYTES], dtype="<i8").astype(np.int64)
    try:
        statistics = Statistics.from_words(fixed, words)
    except InputError as error:
        raise RunDamagedError(f"the statistics file {row.file} cannot be read: {error}") from error
    if statistics.samples != row.samples:
        raise RunDamagedError(f"the statistics file {row.file} counts {statistics.samples} samples, not {row.samples}")
    return statistics
