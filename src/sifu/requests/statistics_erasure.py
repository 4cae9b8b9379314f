"""What a request does to the statistics of a closed-form head: the client's own go, and every sum that holds them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from sifu.core.closed_form import recorded_fixed_point
from sifu.record.run_view import RunView
from sifu.store.statistics import StatisticsRow, read_statistics, write_statistics
from sifu.store.writer import RunWriter


def statistics_to_erase(stored: Iterable[StatisticsRow], gone: Collection[int]) -> tuple[str, ...]:
    """The files that hold something of the clients in `gone`."""
    return tuple(sorted(row.file for row in stored if set(row.clients) & set(gone)))


def sum_that_stays(stored: Iterable[StatisticsRow], gone: Collection[int]) -> tuple[int, ...] | None:
    """The clients of the sum that takes the old one's place; None where the old one stays, or nothing can.

    A sum is made without a client by subtraction, so the client's own statistics must be at hand.
    """
    rows = list(stored)
    whole = next((row for row in rows if row.is_sum), None)
    own = {row.clients[0] for row in rows if not row.is_sum}
    leaving = set(whole.clients) & set(gone) if whole else set()
    if whole is None or not leaving or not leaving <= own:
        return None
    return tuple(sorted(set(whole.clients) - leaving)) or None


def write_sum_without(writer: RunWriter, view: RunView, gone: Collection[int], node: int) -> list[dict[str, Any]]:
    """Subtract the statistics of `gone` from the kept sum and write what is left, to be named by the next event."""
    rows = list(writer.statistics().values())
    stays = sum_that_stays(rows, gone)
    if stays is None:
        return []
    fixed = recorded_fixed_point(view.spec, writer.layout)
    whole = next(row for row in rows if row.is_sum)
    left = read_statistics(writer.folder, whole, fixed)
    for row in rows:
        if not row.is_sum and row.clients[0] in set(whole.clients) & set(gone):
            left = left - read_statistics(writer.folder, row, fixed)
    return [write_statistics(writer.folder, node, stays, left, is_sum=True, seed=writer.salt_seed())]
