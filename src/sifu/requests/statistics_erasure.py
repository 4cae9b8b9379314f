"""What a request does to the statistics of a closed-form head: the client's own go, and every sum that holds them.

Where groups tune the network, statistics through a network that held the client hold something of it, too, whichever
client sent them. Of blocks that are side by side, the parts of everyone's statistics that went through the network are
files of their own and go; of a merge nothing can be kept (docs/theory.md, section 15.5). Either way no client's file is
written again: what takes the place of an erased file is a sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from sifu.core.closed_form_engine import recorded_blocks, recorded_fixed_point
from sifu.core.spec.sections import FeaturesSpec
from sifu.record.run_view import RunView
from sifu.store.own_statistics import OwnStatistics, can_be_used
from sifu.store.statistics import StatisticsRow, read_statistics, write_statistics
from sifu.store.writer import RunWriter
from sifu.theory.closed_form.blocks import parts_through, strike


@dataclass(frozen=True)
class SumLeft:
    """The sum that takes the place of an erased one: of whom, through which networks (nodes), made of which file."""

    made_of: StatisticsRow
    clients: tuple[int, ...]
    trunks: tuple[int, ...]


def statistics_to_erase(
    stored: Iterable[StatisticsRow], gone: Collection[int], networks: Collection[int] = ()
) -> tuple[str, ...]:
    """The files that hold something of the clients in `gone`, or went through a network (a node) that is erased."""
    left, erased = set(gone), set(networks)
    return tuple(sorted(row.file for row in stored if left & set(row.clients) or erased & set(row.trunks)))


def sum_left(
    stored: Iterable[StatisticsRow], gone: Collection[int], networks: Collection[int], features: FeaturesSpec
) -> SumLeft | None:
    """What takes the place of the sum if it is erased: the sum without those who left and without struck blocks.

    A sum is made without a client by subtraction, so all parts of the client's own statistics must be there.
    """
    rows = list(stored)
    whole = next((row for row in rows if row.is_sum), None)
    if whole is None:
        return None
    leaving, trunks = set(whole.clients) & set(gone), tuple(node for node in whole.trunks if node not in set(networks))
    clients = tuple(sorted(set(whole.clients) - leaving))
    unchanged, merged = not leaving and trunks == whole.trunks, features.tune == "merge" and trunks != whole.trunks
    if unchanged or merged or not clients:
        return None
    needed = len(parts_through(range(len(whole.trunks)))) if features.tune == "blocks" else 1
    at_hand = Counter(row.clients[0] for row in rows if not row.is_sum and can_be_used(row, whole.trunks))
    return SumLeft(whole, clients, trunks) if all(at_hand[client] == needed for client in leaving) else None


def write_sum_left(
    writer: RunWriter, view: RunView, gone: Collection[int], networks: Collection[int], node: int
) -> list[dict[str, Any]]:
    """Subtract, strike, and write the sum that is left, to be named by the next event."""
    rows = list(writer.statistics().values())
    left = sum_left(rows, gone, networks, view.spec.features)
    if left is None:
        return []
    fixed, groups = recorded_fixed_point(view.spec, writer.layout), writer.group_models()
    blocks = recorded_blocks(view.spec, writer.layout) if view.spec.features.tune == "blocks" else None
    own = OwnStatistics.among(rows, fixed, blocks, {groups[trunk].grp: trunk for trunk in left.made_of.trunks})
    statistics = read_statistics(writer.folder, left.made_of, fixed)
    for client in sorted(set(left.made_of.clients) & set(gone)):
        statistics = statistics - own.read(writer.folder, client, own.parts())
    struck = [groups[trunk].grp for trunk in left.made_of.trunks if trunk not in left.trunks]
    if blocks is not None and struck:
        statistics = strike(statistics, blocks, struck)
    return [
        write_statistics(
            writer.folder,
            node,
            left.clients,
            statistics,
            is_sum=True,
            seed=writer.salt_seed(),
            trunks=left.trunks,
        )
    ]
