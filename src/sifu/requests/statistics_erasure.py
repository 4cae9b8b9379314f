"""What a request does to the statistics of a closed-form head: the client's own go, and every sum that holds them.

Where groups tune the network, statistics through a network that held the client hold something of it, too, whichever
client sent them. Of blocks that are side by side the network's own is struck out of everyone's statistics; of a merge
nothing can be kept (docs/theory.md, section 15.5).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from sifu.core.closed_form_engine import recorded_blocks, recorded_fixed_point
from sifu.core.spec.sections import FeaturesSpec
from sifu.record.run_view import RunView
from sifu.store.statistics import StatisticsRow, read_statistics, write_statistics
from sifu.store.writer import RunWriter
from sifu.theory.closed_form.blocks import strike


@dataclass(frozen=True)
class StatisticsLeft:
    """Statistics that take the place of erased ones: of whom, through which networks, and made of which file."""

    made_of: StatisticsRow
    clients: tuple[int, ...]
    trunks: tuple[int, ...]


def statistics_to_erase(
    stored: Iterable[StatisticsRow], gone: Collection[int], networks: Collection[int] = ()
) -> tuple[str, ...]:
    """The files that hold something of the clients in `gone`, or went through a network (a node) that is erased."""
    left, erased = set(gone), set(networks)
    return tuple(sorted(row.file for row in stored if left & set(row.clients) or erased & set(row.trunks)))


def statistics_left(
    stored: Iterable[StatisticsRow], gone: Collection[int], networks: Collection[int], features: FeaturesSpec
) -> list[StatisticsLeft]:
    """What takes the place of the files that are erased: the sum without those who left, and struck blocks.

    A sum is made without a client by subtraction, so the client's own statistics must be at hand.
    """
    rows, erased = list(stored), set(networks)
    if features.tune == "merge" and any(erased & set(row.trunks) for row in rows):
        return []
    left = []
    own = {row.clients[0] for row in rows if not row.is_sum}
    for row in rows:
        leaving, trunks = set(row.clients) & set(gone), tuple(node for node in row.trunks if node not in erased)
        if not leaving and trunks == row.trunks:
            continue
        clients = tuple(sorted(set(row.clients) - leaving))
        if clients and (leaving <= own if row.is_sum else not leaving):
            left.append(StatisticsLeft(row, clients, trunks))
    return left


def write_statistics_left(
    writer: RunWriter, view: RunView, gone: Collection[int], networks: Collection[int], node: int
) -> list[dict[str, Any]]:
    """Strike, subtract, and write what is left, to be named by the next event."""
    rows = list(writer.statistics().values())
    if not rows:  # of a model that is trained
        return []
    fixed, written = recorded_fixed_point(view.spec, writer.layout), []
    groups = writer.group_models()
    for left in statistics_left(rows, gone, networks, view.spec.features):
        statistics = read_statistics(writer.folder, left.made_of, fixed)
        if left.made_of.is_sum:
            for row in rows:
                if not row.is_sum and row.clients[0] in set(left.made_of.clients) & set(gone):
                    statistics = statistics - read_statistics(writer.folder, row, fixed)
        struck = [groups[trunk].grp for trunk in left.made_of.trunks if trunk not in left.trunks]
        if struck:
            statistics = strike(statistics, recorded_blocks(view.spec, writer.layout), struck)
        written.append(
            write_statistics(
                writer.folder,
                node,
                left.clients,
                statistics,
                is_sum=left.made_of.is_sum,
                seed=writer.salt_seed(),
                trunks=left.trunks,
            )
        )
    return written
