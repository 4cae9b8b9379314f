"""Closed-form heads on Flower's messages for tests: specs, sums, engines and changed replies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flower_federation import HASTY, both_engines, small_spec
from flwr.app import Array, ArrayRecord, ConfigRecord, Message

import sifu
import sifu_verifier
from sifu.core.closed_form_engine import recorded_fixed_point
from sifu.core.engine import Position
from sifu.core.spec import Spec
from sifu.engines.flower.wire import ARRAYS, CONFIG, FEATURES, WORDS
from sifu.run.clients_and_engine import engine_from_spec
from sifu.store.reader import RunReader
from sifu.store.statistics_files import read_statistics
from sifu.theory.closed_form import Statistics, total

PLACE = Position(0, 0)


def head_spec(**sections: Any) -> Spec:
    """Return a spec with eight clients of a few digits each and a closed-form head on random features."""
    usual: dict[str, Any] = {
        "model": {"kind": "ridge", "outputs": 10},
        "features": {"kind": "random_fourier", "count": 16, "bandwidth": 3.0},
        "server": {"rejected": "reply"},
        "data": {"preprocessing": "fixed"},
    }
    return small_spec(**(usual | sections))


def kept_sum(folder: Path) -> Statistics:
    with RunReader(folder) as reader:
        row = next(row for row in reader.statistics().values() if row.is_sum)
        return read_statistics(folder, row, recorded_fixed_point(Spec.from_mapping(reader.spec), reader.layout))


def head_of(folder: Path) -> np.ndarray:
    with RunReader(folder) as reader:
        return reader.load_model(reader.tip)


def last_solve(folder: Path) -> dict[str, Any]:
    with RunReader(folder) as reader:
        return [event.content["solve"] for event in reader.events() if "solve" in event.content][-1]


def embedded_sum(spec: Spec, clients: list[Any]) -> Statistics:
    """Return the sum of the statistics of these clients on the embedded engine."""
    engine, _ = engine_from_spec(spec, clients)
    return total(engine.fixed, (sent for _, sent in engine.collect(range(len(clients)), PLACE)))  # type: ignore


def sound(folder: Path) -> None:
    assert sifu.open_run(folder).verify().problems == []
    assert sifu_verifier.verify(folder) == []


def flower_engine(masked: bool = True, **sections: Any) -> tuple[Any, Any, Any]:
    return both_engines(head_spec(**sections), HASTY, masked_statistics=masked)


NODE = {client: 9000 - 7 * client for client in range(8)}


def unless(kind: str, grid: Any) -> Callable[[Message], Message | None]:
    """Return answers of a node that never answers messages of one kind."""
    return lambda message: None if message.metadata.message_type == kind else grid.answer(message)


def changed(grid: Any, change: Callable[[Message], None], kind: str) -> Callable[[Message], Message]:
    """Return answers of a node that changes its answers to one kind of message."""

    def answer(message: Message) -> Message:
        reply = grid.answer(message)
        if message.metadata.message_type == kind:
            change(reply)
        return reply

    return answer


def words_changed(change: Callable[[np.ndarray], np.ndarray], name: str = WORDS) -> Callable[[Message], None]:
    def edit(reply: Message) -> None:
        words = reply.content[ARRAYS][name].numpy().copy()
        reply.content[ARRAYS] = ArrayRecord({name: Array(change(words))})

    return edit


def another_map(reply: Message) -> None:
    reply.content[CONFIG] = ConfigRecord({**reply.content[CONFIG], FEATURES: "0" * 64})


def first_is_negative(words: np.ndarray) -> np.ndarray:
    words[0] = -1
    return words
