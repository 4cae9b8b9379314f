"""Clients' statistics on disk: one file for each client whose own are kept, and one for the sum a head is solved from.

A file is the canonical form of `sifu.theory.closed_form.sums` and a salt. The ledger keeps the digest of a file
for good; the salt lies in the file alone, so once the file is erased its digest does not tell whether a guess of a
client's data is right. A file is never changed: a sum without a client is a new file with a salt of its own, an event
names it and drops the old one.

Where groups tune a network and each has a block of the features, a client's own statistics lie in a file for each part
(`sifu.theory.closed_form.blocks`): striking a block deletes the files that went through its network, and rewrites none.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sifu.errors import InputError, RunDamagedError
from sifu.store import files
from sifu.theory.arrays import Integers
from sifu.theory.closed_form import FixedPoint, Statistics
from sifu.theory.closed_form.blocks import Blocks, Part, cut

STATISTICS = "statistics"
STATISTICS_NAME = re.compile(r"(\d+)\.(sum|\d+)(?:(?<!sum)\.(?:public|\d+(?:-\d+)?))?\.statistics")
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
    def part(self) -> Part | None:
        """Which part of a client's statistics the file has; None where it has all of them.

        >>> [StatisticsRow(f"7.3{part}.statistics", 7, (3,), 5, 99, "").part for part in ("", ".public", ".0-2")]
        [None, (), (0, 2)]
        """
        names = self.file.split(".")
        if len(names) < 4:
            return None
        return () if names[2] == PUBLIC else tuple(int(group) for group in names[2].split("-"))


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
    return _row(file, node, clients, statistics.samples, content, trunks)


def write_parts(
    folder: Path,
    node: int,
    client: int,
    statistics: Statistics,
    blocks: Blocks,
    parts: Sequence[Part],
    *,
    seed: int | None,
    networks: Mapping[int, int],
) -> list[dict[str, Any]]:
    """Write parts of a client's statistics before the event that names them; `networks` are nodes by group."""
    rows, contents = [], {}
    for part in parts:
        file = f"{node}.{client}.{part_name(part)}.statistics"
        words = cut(statistics, blocks, part).astype("<i8", copy=False).tobytes()
        content = part_heading(statistics.fixed, part) + words + files.new_salt(seed, f"statistics:{file}")
        contents[statistics_path(folder, file)] = content
        rows.append(_row(file, node, [client], statistics.samples, content, [networks[group] for group in part]))
    files.write_all_atomically(contents)
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


def _row(
    file: str, node: int, clients: Sequence[int], samples: int, content: bytes, trunks: Sequence[int]
) -> dict[str, Any]:
    return {
        "file": file,
        "node": node,
        "clients": [int(client) for client in clients],
        "samples": samples,
        "bytes": len(content),
        "digest": hashlib.sha256(content).hexdigest(),
        "trunks": list(trunks),
    }


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
    content = files.read_content(statistics_path(folder, row.file), f"the statistics file {row.file}", row.digest)
    if len(content) != row.bytes:
        raise RunDamagedError(f"the statistics file {row.file} has {len(content)} bytes, not {row.bytes}")
    if not content.startswith(heading) or (len(content) - len(heading)) % 8:
        raise RunDamagedError(f"the statistics file {row.file} is not in [{fixed.describe()}]")
    return np.frombuffer(content[len(heading) : -files.SALT_BYTES], dtype="<i8").astype(np.int64)
