"""The clients' own statistics that a run keeps, in one file each, or in one for each part where networks are tuned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sifu.errors import InputError, RunDamagedError
from sifu.store.statistics import StatisticsRow, read_part, read_statistics, write_parts, write_statistics
from sifu.theory.closed_form import FixedPoint, Statistics
from sifu.theory.closed_form.blocks import Blocks, Part, cut, joined, parts_through, words_of_part
from sifu.theory.closed_form.sums import words_at

WHOLE: tuple[Part, ...] = ((-1,),)
"""The only part of statistics that are not cut."""


@dataclass(frozen=True)
class OwnStatistics:
    """Clients' own statistics of features through these networks (nodes by group, in the order of the groups).

    `rows` are files by client and part. `blocks` is None where statistics are not cut.
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
                rows.setdefault(row.clients[0], {})[WHOLE[0] if row.part is None else row.part] = row
        return OwnStatistics(fixed, blocks, networks, rows)

    def parts(self, groups: Iterable[int] | None = None) -> tuple[Part, ...]:
        """What a client's statistics consist of, through the networks of all groups or of some."""
        return WHOLE if self.blocks is None else parts_through(self.networks if groups is None else groups)

    def lacking(self, client: int, parts: Iterable[Part]) -> tuple[Part, ...]:
        """Those of `parts` that are not kept."""
        own = self.rows.get(client, {})
        return tuple(part for part in parts if part not in own)

    @property
    def complete(self) -> set[int]:
        """The clients of whom nothing is lacking."""
        parts = self.parts()
        return {client for client in self.rows if not self.lacking(client, parts)}

    def words(self, parts: Iterable[Part]) -> int:
        """How many words these parts have."""
        if self.blocks is None:
            return words_at(self.fixed)
        return sum(words_of_part(self.fixed, self.blocks, part) for part in parts)

    def read(self, folder: Path, client: int, parts: Iterable[Part]) -> Statistics:
        """These parts of a client's statistics, everything else zero; each file is checked against its digest."""
        own = self.rows[client]
        if self.blocks is None:
            return read_statistics(folder, own[WHOLE[0]], self.fixed)
        words = {part: read_part(folder, own[part], self.fixed) for part in parts}
        try:
            statistics = joined(self.fixed, self.blocks, words)
        except InputError as error:
            raise RunDamagedError(f"statistics of client {client} cannot be read: {error}") from error
        if () in words and statistics.samples != own[()].samples:
            counted = f"counts {statistics.samples} samples, not {own[()].samples}"
            raise RunDamagedError(f"the statistics file {own[()].file} {counted}")
        return statistics

    def only(self, statistics: Statistics, parts: Iterable[Part]) -> Statistics:
        """These parts of what a client sent, everything else zero."""
        if self.blocks is None:
            return statistics
        return joined(self.fixed, self.blocks, {part: cut(statistics, self.blocks, part) for part in parts})

    def write(
        self, folder: Path, node: int, client: int, statistics: Statistics, parts: Sequence[Part], seed: int | None
    ) -> list[dict[str, Any]]:
        """Write these parts of a client's statistics before the event that names them; returns the files' rows."""
        if self.blocks is None:
            trunks = tuple(self.networks.values())
            return [write_statistics(folder, node, [client], statistics, is_sum=False, seed=seed, trunks=trunks)]
        return write_parts(folder, node, client, statistics, self.blocks, parts, seed=seed, networks=self.networks)


def can_be_used(row: StatisticsRow, networks: Iterable[int]) -> bool:
    """Whether a file is of use where features go through these networks: a part through some, others through all."""
    nodes = tuple(networks)
    return row.trunks == nodes if row.part is None else set(row.trunks) <= set(nodes)
