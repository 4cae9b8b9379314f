"""Streams of rounds: an engine may run rounds ahead of the recorder, which consumes them one by one.

An engine that is fast only without interruptions (a GPU with many runs in one program) implements `run_rounds`. It
yields the scalars of every round, an evaluation if the stop rule needs one, and the model only on request. Other
engines run each round when it is consumed. The results are the same, and a consumer may stop at any time.

With many clients, the participants of the next round are drawn on another core during training. A draw reads every
client's score (`sifu.theory.participation`) and depends only on the round's position, so it can start before the
previous round has ended. A draw made ahead is discarded if the next round has another position.
"""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from sifu.core.engine import Engine, Evaluation, LosesRounds, Position, Rejection, RoundResult, run_group_rounds
from sifu.core.layout import Vector
from sifu.core.round import RoundSetup, draw
from sifu.core.spec import StopSpec
from sifu.errors import RoundRejectedError
from sifu.theory.arrays import Floats, Integers
from sifu.theory.participation import ClientIndices, Participation, Places, place_key
from sifu.theory.rounding import norm


def should_stop(stop: StopSpec, rounds: int, accuracy: float | None) -> bool:
    """Return whether training stops after `rounds` rounds, given the accuracy after the last round if it is known."""
    if rounds >= stop.max_rounds:
        return True
    return bool(stop.target > 0 and rounds >= stop.min_rounds and accuracy is not None and accuracy >= stop.target)


def is_evaluated(stop: StopSpec, rounds: int) -> bool:
    """Return whether the model after `rounds` rounds is evaluated."""
    return rounds % stop.evaluate_every == 0 or rounds >= stop.max_rounds


@dataclass(frozen=True)
class RoundsWanted:
    """Results that the consumer of a stream asks for.

    Attributes:
        stop: Stop rule.
        origin: Model from which distances are measured.
        evaluated: Clients to evaluate models on. None means the active clients, and no clients means no evaluation.
    """

    stop: StopSpec
    origin: Floats
    evaluated: ClientIndices | None = None


@dataclass(frozen=True)
class StreamedRound:
    """One round of a stream, with the fields of `RoundResult`; `fetch_model` returns the model after the round.

    `distance` is ||model - origin||. `evaluation` covers `RoundsWanted.evaluated`, or the active clients, in rounds for
    which the stop rule needs it. A `lost` round has no participants although clients were asked; it does not count
    towards `stop.max_rounds`.
    """

    participants: ClientIndices
    samples: Integers
    drifts: Floats
    mean_shift: float
    rounding: float
    distance: float
    fetch_model: Callable[[], Vector]
    evaluation: Evaluation | None = None
    rejections: tuple[Rejection, ...] = ()
    lost: bool = False


class RunsAhead(ABC):
    """Capability of an engine that runs rounds ahead of their consumer."""

    @abstractmethod
    def run_rounds(
        self, model: Vector, position: Position, active: ClientIndices, wanted: RoundsWanted
    ) -> Iterator[StreamedRound]:
        """Yield rounds from `model` until `wanted.stop.max_rounds`."""


class StreamsGroupRounds(ABC):
    """Capability of an engine that runs the rounds of groups ahead."""

    @abstractmethod
    def stream_group_rounds(
        self, models: Sequence[Vector], position: Position, groups: Sequence[ClientIndices], wanted: RoundsWanted
    ) -> Iterator[list[StreamedRound]]:
        """Yield one round of every group at a time, each from its own model."""


def is_lost(engine: Engine, position: Position, active: ClientIndices, participants: ClientIndices) -> bool:
    """Return whether a round was lost; only engines with the capability `LosesRounds` lose rounds."""
    return isinstance(engine, LosesRounds) and engine.loses(position, active, participants)


def stop_without(stop: StopSpec, lost: int) -> StopSpec:
    """Return the stop rule after `lost` lost rounds, which do not count towards `max_rounds`."""
    return replace(stop, max_rounds=stop.max_rounds + lost) if lost else stop


def stream_rounds(
    engine: Engine, model: Vector, position: Position, active: ClientIndices, wanted: RoundsWanted
) -> Iterator[StreamedRound]:
    """Yield rounds of any engine from `model` until `wanted.stop.max_rounds`; refuse a model that is not finite.

    A round has an evaluation if `is_evaluated` requires one and `wanted.evaluated` is not empty.
    """
    if isinstance(engine, RunsAhead):
        return engine.run_rounds(model, position, active, wanted)
    return rounds_one_by_one(engine, model, position, active, wanted, engine.evaluate)


def stream_group_rounds(
    engine: Engine,
    models: Sequence[Vector],
    position: Position,
    groups: Sequence[ClientIndices],
    wanted: RoundsWanted,
) -> Iterator[list[StreamedRound]]:
    """Yield one round of every group at a time, for groups that train separately at the same positions.

    No client is in two groups and draws are keyed by client, so the groups' rounds at one position together form a
    round of the federation. If the engine cannot run ahead, each round runs when it is consumed.
    """
    if isinstance(engine, StreamsGroupRounds):
        yield from engine.stream_group_rounds(models, position, groups, wanted)
        return
    for start in range(position.round, wanted.stop.max_rounds):
        results = run_group_rounds(engine, models, Position(position.branch, start), groups)
        models = [result.model for result in results]
        for result in results:
            _refuse_not_finite(result, start)
        yield [_streamed(result, wanted, None) for result in results]


def _refuse_not_finite(result: RoundResult, start: int) -> None:
    if not np.all(np.isfinite(result.model)):
        raise RoundRejectedError(
            f"round {start + 1} made a model with NaN or Inf and was rejected: "
            "lower local.rate; the last good state stays"
        )


def _streamed(
    result: RoundResult, wanted: RoundsWanted, evaluation: Evaluation | None, lost: bool = False
) -> StreamedRound:
    return StreamedRound(
        result.participants,
        result.samples,
        result.drifts,
        result.mean_shift,
        result.rounding,
        norm(result.model.astype(np.float64) - wanted.origin),
        lambda: result.model,
        evaluation,
        result.rejections,
        lost,
    )


def rounds_one_by_one(
    engine: Engine,
    model: Vector,
    position: Position,
    active: ClientIndices,
    wanted: RoundsWanted,
    evaluate: Callable[[Vector, ClientIndices], Evaluation | None],
) -> Iterator[StreamedRound]:
    """Yield rounds of an engine, each of which runs when it is consumed."""
    active = np.array(active)
    active.flags.writeable = False  # an engine may rely on the same clients in all rounds
    looked_at = active if wanted.evaluated is None else wanted.evaluated
    stop, start = wanted.stop, position.round
    while start < stop.max_rounds:
        result = engine.run_round(model, Position(position.branch, start), active)
        model = result.model
        _refuse_not_finite(result, start)
        lost = is_lost(engine, Position(position.branch, start), active, result.participants)
        if lost:
            stop = stop_without(stop, 1)
        start += 1
        looks = looked_at.size > 0 and is_evaluated(stop, start)
        evaluation = evaluate(model, looked_at) if looks else None
        yield _streamed(result, wanted, evaluation, lost)


MANY = 20_000
"""Number of clients from which drawing ahead on another thread saves time."""


class DrawsAhead:
    """Source of the same draws as `sifu.core.round.draw`; with many clients, draws are made one round ahead."""

    def __init__(self, participation: Participation, key: int) -> None:
        self._participation, self._key = participation, key
        self._waiting: tuple[int, Places, Position, Future[ClientIndices]] | None = None

    def draw(self, setup: RoundSetup) -> ClientIndices:
        """Return the sorted participants of a round."""
        places, position = setup.active, setup.position
        few = not isinstance(places, Places) or places.index.size < MANY
        if few or self._participation.kind == "all" or _cores() < 2:
            return draw(self._participation, self._key, setup)
        assert isinstance(places, Places)
        waiting, self._waiting, process = self._waiting, None, os.getpid()
        # A forked process must not wait for a draw that its parent started.
        wanted = waiting is not None and waiting[0] == process and waiting[1] is places and waiting[2] == position
        drawn = waiting[3].result() if waiting is not None and wanted else self._draw(places, position)
        following = Position(position.branch, position.round + 1)
        self._waiting = process, places, following, _helper(process).submit(self._draw, places, following)
        return drawn

    def _draw(self, places: Places, position: Position) -> ClientIndices:
        return self._participation.draw(places, place_key(self._key, position.branch, position.round))


def _cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.lru_cache(maxsize=1)
def _helper(process: int) -> ThreadPoolExecutor:
    """Return the single-threaded executor that draws ahead for all federations; each process has its own."""
    return ThreadPoolExecutor(1, thread_name_prefix="draws")
