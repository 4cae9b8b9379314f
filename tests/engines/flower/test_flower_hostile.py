"""Hostile replies over Flower's wire: no reply of a hostile node changes the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flower_federation import both_engines, everyone, small_spec
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from sifu.core.engine import Position
from sifu.engines.flower.wire import arrays_of

VICTIM, NODE = 3, 9000 - 7 * 3
Change = Callable[[Message], Message | None]


def values(change: Callable[[Any], Any]) -> Change:
    def changed(reply: Message) -> Message:
        arrays = {name: Array(change(array)) for name, array in arrays_of(reply.content["arrays"]).items()}
        reply.content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": reply.content["metrics"]})
        return reply

    return changed


def metrics(**reported: Any) -> Change:
    def changed(reply: Message) -> Message:
        reply.content = RecordDict({"arrays": reply.content["arrays"], "metrics": MetricRecord(reported)})
        return reply

    return changed


def content(make: Callable[[RecordDict], RecordDict]) -> Change:
    def changed(reply: Message) -> Message:
        reply.content = make(reply.content)
        return reply

    return changed


def one_entry(value: float) -> Callable[[Any], Any]:
    def change(array: Any) -> Any:
        array = np.array(array)
        array.flat[0] = value
        return array

    return change


def code(reply: Message) -> Message:
    """Put a pickle into the bytes of an array; reading the array must not run it."""
    arrays = reply.content["arrays"]
    name = next(iter(arrays))
    evil = b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02id\x94\x85\x94R\x94."
    bad = Array(dtype=arrays[name].dtype, shape=arrays[name].shape, stype=arrays[name].stype, data=evil)
    reply.content = RecordDict({"arrays": ArrayRecord(dict(arrays) | {name: bad}), "metrics": reply.content["metrics"]})
    return reply


HOSTILE: dict[str, Change] = {
    "NaN": values(one_entry(np.nan)),
    "Inf": values(one_entry(np.inf)),
    "minus Inf": values(one_entry(-np.inf)),
    "all NaN": values(lambda vector: vector * np.nan),
    "huge": values(lambda vector: vector + 1e30),
    "squares overflow": values(lambda vector: vector + 1e200),
    "the largest there are": values(lambda vector: np.full_like(vector, 1.7e308)),
    "shorter": values(lambda vector: vector[:-1]),
    "longer": values(lambda vector: np.concatenate([vector, vector])),
    "scalar": values(lambda vector: np.array(1.0)),
    "empty": values(lambda vector: vector[:0]),
    "float32": values(lambda vector: vector.astype(np.float32)),
    "integers": values(lambda vector: vector.astype(np.int64)),
    "complex": values(lambda vector: vector.astype(complex)),
    "no samples": metrics(**{"num-examples": 0}),
    "negative samples": metrics(**{"num-examples": -10}),
    "absurd samples": metrics(**{"num-examples": 2**62}),
    "half a sample": metrics(**{"num-examples": 9.5}),
    "samples in a list": metrics(**{"num-examples": [10]}),
    "no count": metrics(other=1),
    "nothing at all": content(lambda record: RecordDict({})),
    "no arrays": content(lambda record: RecordDict({"metrics": record["metrics"]})),
    "settings instead": content(
        lambda record: RecordDict({"arrays": ConfigRecord({"a": "b"}), "metrics": record["metrics"]})
    ),
    "other names": content(
        lambda record: RecordDict(
            {"arrays": ArrayRecord({f"x{k}": a for k, a in record["arrays"].items()}), "metrics": record["metrics"]}
        )
    ),
    "code": code,
    "silence": lambda reply: None,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_node_changes_nothing(name: str) -> None:
    """The round equals the embedded engine's round without this client, and the client's absence is reported."""
    embedded, flower, grid = both_engines(small_spec(server={"rejected": "reply"}))
    grid.trouble[NODE] = lambda message: HOSTILE[name](grid.answer(message))
    model = flower.initial_model(0)
    result = flower.run_round(model, Position(0, 0), everyone(flower))
    others = np.delete(everyone(flower), VICTIM)
    assert result.participants.tolist() == others.tolist()
    expected = embedded.run_round(model, Position(0, 0), others)
    np.testing.assert_allclose(result.model, expected.model, atol=1e-12)
    said = [rejection.client for rejection in result.rejections] + [
        incident.client for incident in flower.take_incidents()
    ]
    assert flower.clients[VICTIM].name in said


def test_an_honest_node_is_in_the_round() -> None:
    """Control: an unchanged reply on the same path is accepted."""
    _, flower, grid = both_engines(small_spec(server={"rejected": "reply"}))
    grid.trouble[NODE] = lambda message: values(lambda vector: vector)(grid.answer(message))
    result = flower.run_round(flower.initial_model(0), Position(0, 0), everyone(flower))
    assert VICTIM in result.participants.tolist()
    assert result.rejections == ()
