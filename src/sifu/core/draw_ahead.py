"""Participants of the next round, drawn on another core while this one is trained.

A draw looks at the score of every client (`sifu.theory.draws`), and is keyed by the round's place alone: it can be made
before the round that comes before it has ended. Rounds mostly follow each other; a draw that turns out not to be wanted
is dropped, and made anew for the place that is.
"""

from __future__ import annotations

import functools
import os
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from sifu.core.engine import Position
from sifu.core.round import RoundSetup, draw
from sifu.theory.draws import Places, place_key
from sifu.theory.participation import ClientIndices, Participation

MANY = 20_000
"""Fewer clients than this are drawn as soon as another thread is woken."""


class DrawsAhead:
    """Draws as `sifu.core.round.draw` does; among many clients, the next round's ahead of time."""

    def __init__(self, participation: Participation, key: int) -> None:
        self._participation, self._key = participation, key
        self._waiting: tuple[int, Places, Position, Future[ClientIndices]] | None = None

    def draw(self, setup: RoundSetup) -> ClientIndices:
        """The participants of a round, sorted."""
        places, position = setup.active, setup.position
        few = not isinstance(places, Places) or places.index.size < MANY
        if few or self._participation.kind == "all" or _cores() < 2:
            return draw(self._participation, self._key, setup)
        assert isinstance(places, Places)
        waiting, self._waiting, process = self._waiting, None, os.getpid()
        # Nobody goes on with what a process had begun before this one was forked off it.
        wanted = waiting is not None and waiting[0] == process and waiting[1] is places and waiting[2] == position
        drawn = waiting[3].result() if waiting is not None and wanted else self._draw(places, position)
        following = Position(position.branch, position.round + 1)
        self._waiting = process, places, following, _helper(process).submit(self._draw, places, following)
        return drawn if setup.absent is None else np.setdiff1d(drawn, setup.absent)

    def _draw(self, places: Places, position: Position) -> ClientIndices:
        return self._participation.draw(places, place_key(self._key, position.branch, position.round))


def _cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.lru_cache(maxsize=1)
def _helper(process: int) -> ThreadPoolExecutor:
    """The thread that draws ahead, for all federations; a process that was forked off another starts its own."""
    return ThreadPoolExecutor(1, thread_name_prefix="draws")
