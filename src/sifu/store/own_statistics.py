"""Statistics or rows of single clients, stored in files, from which a closed-form head can be solved again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sifu.errors import InputError, RunDamagedError
from sifu.store.packed_numbers import Numbers
from sifu.store.row_files import WHOLE, bytes_of_parts, part_of_rows, rows_of_parts
from sifu.store.statistics_files import StatisticsRow, part_name, read_numbers, read_statistics, write_files
from sifu.theory.arrays import Integers
from sifu.theory.closed_form import FixedPoint, Rows, Statistics, total
from sifu.theory.closed_form.blocks import Blocks, Part, cut, joined, parts_of_rows, parts_through, words_of_part


@dataclass(frozen=True)
class OwnStatistics:
    """Files with the statistics or rows of single clients, for the features that `networks` compute.

    Attributes:
        fixed: Fixed-point format of the numbers.
        blocks: Division of the statistics into parts, or None if the statistics are not divided.
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
        """Return the clients' own statistics among `stored` files that can be used with these networks."""
        rows: dict[int, dict[Part, StatisticsRow]] = {}
        for row in stored:
            if not row.is_sum and can_be_used(row, networks.values()):
                rows.setdefault(row.clients[0], {})[WHOLE if row.part is None else row.part] = row
        return OwnStatistics(fixed, blocks, networks, rows)

    def parts(self, groups: Iterable[int] | None = None) -> tuple[Part, ...]:
        """Return the parts of a client's statistics for `groups`, by default for all groups."""
        return (WHOLE,) if self.blocks is None else parts_through(self.networks if groups is None else groups)

    def _in_form(self, parts: Iterable[Part], *, of_rows: bool) -> tuple[Part, ...]:
        """Return the parts of rows, or of statistics, that are needed to compute `parts`."""
        return parts_of_rows(parts) if of_rows and self.blocks is not None else tuple(parts)

    def _keeps_rows(self, client: int) -> bool:
        return any(row.is_rows for row in self.rows.get(client, {}).values())

    def lacking(self, client: int, parts: Iterable[Part]) -> tuple[Part, ...]:
        """Return the parts that a client must send to complete `parts`, in the form that is stored for it."""
        own = self.rows.get(client, {})
        return tuple(part for part in self._in_form(parts, of_rows=self._keeps_rows(client)) if part not in own)

    @property
    def complete(self) -> set[int]:
        """Clients whose files hold all parts."""
        parts = self.parts()
        return {client for client in self.rows if not self.lacking(client, parts)}

    def parts_to_write(self, client: int, sent: Statistics | Rows, lacking: Sequence[Part]) -> Sequence[Part]:
        """Return the parts of a client's message to write, in the form in which the client sent them."""
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
        """Return these parts of a client's statistics, read from checked files; all other entries are zero.

        For a client stored as rows, the result holds all features of the groups in `parts`. If `parts` names a pair of
        groups but not each of them alone, the caller must remove the surplus from the sum with `only`.

        Raises:
            RunDamagedError: If a file is missing, changed, or inconsistent.
        """
        own = self.rows[client]
        try:
            if self._keeps_rows(client):
                files_of = {part: own[part] for part in self._in_form(parts, of_rows=True)}
                contents = {part: read_numbers(folder, row, self.fixed, of_rows=True) for part, row in files_of.items()}
                return rows_of_parts(self.fixed, self.blocks, next(iter(files_of.values())).samples, contents)
            if self.blocks is None:
                return read_statistics(folder, own[WHOLE], self.fixed)
            words = {part: self._words(folder, own[part]) for part in parts}
            statistics = joined(self.fixed, self.blocks, words)
        except InputError as error:
            raise RunDamagedError(f"statistics of client {client} cannot be read: {error}") from error
        if () in words and statistics.samples != own[()].samples:
            counted = f"counts {statistics.samples} samples, not {own[()].samples}"
            raise RunDamagedError(f"the statistics file {own[()].file} {counted}")
        return statistics

    def _words(self, folder: Path, row: StatisticsRow) -> Integers:
        if row.part is None:
            raise RunDamagedError(f"the statistics file {row.file} is not one of a part")
        return read_numbers(folder, row, self.fixed).astype(np.int64, copy=False)

    def only(self, statistics: Statistics, parts: Iterable[Part]) -> Statistics:
        """Return a copy of `statistics` with only the entries in `parts`; without blocks, return the original."""
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
        """Return `parts` of a client's statistics: `lacking` parts as the client sent them, other parts as stored."""
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
            else read_numbers(folder, kept[part], self.fixed, of_rows=True)
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
        """Write these parts of the statistics or rows that a client sent, and return a row for each file.

        See `write_files` for `node` and `seed`.
        """
        contents: dict[str, tuple[Numbers, Iterable[int]]] = {}
        for part in parts:
            name = str(client) if part == WHOLE else f"{client}.{part_name(part)}"
            backbones = self.networks.values() if part == WHOLE else [self.networks[group] for group in part]
            if isinstance(statistics, Rows):
                contents[f"{name}.rows"] = part_of_rows(statistics, self.blocks, part), backbones
            elif self.blocks is None:
                contents[name] = statistics.words, backbones
            else:
                contents[name] = cut(statistics, self.blocks, part), backbones
        return write_files(folder, node, [client], statistics, contents, seed)


def can_be_used(row: StatisticsRow, networks: Iterable[int]) -> bool:
    """Return whether the statistics in a file can be used together with these networks.

    A file with one part may depend on these networks only. A file with all parts must depend on exactly these networks,
    in this order.
    """
    nodes = tuple(networks)
    return row.trunks == nodes if row.part is None else set(row.trunks) <= set(nodes)
