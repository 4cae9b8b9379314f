"""The Flower engine against the embedded one, and against nodes that fail, are late, or lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flower_federation import HASTY, both_engines, everyone, small_spec
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_grid import lost

from sifu.core.engine import Position
from sifu.core.layout import ModelPieces
from sifu.core.round_stream import RoundsWanted
from sifu.engines import averaging
from sifu.engines.averaging import average_replies
from sifu.engines.flower.exchange import Patience
from sifu.engines.flower.wire import TRAIN, arrays_of
from sifu.engines.sim.client_updates import average_models
from sifu.errors import NoClientResponseError, RoundRejectedError
from suite_setup import examples

PROBLEMS = {
    "softmax, everyone": {},
    "poisson and batches": {"server": {"participation": "poisson(0.6)"}, "local": {"batch": 5}},
    "fixed, momentum, decay": {
        "server": {"participation": "fixed(3)"},
        "local": {"rate": 0.05, "momentum": 0.5, "weight_decay": 0.01, "batch": 4},
    },
    "network": {"model": {"kind": "mlp", "outputs": 10}, "local": {"rate": 0.1, "batch": 4}},
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_rounds_agree_with_the_embedded_engine(name: str) -> None:
    embedded, flower, _ = both_engines(small_spec(**PROBLEMS[name]))
    model = embedded.initial_model(0)
    np.testing.assert_array_equal(model, flower.initial_model(0))
    assert embedded.layout == flower.layout
    assert [client.name for client in embedded.clients] == [client.name for client in flower.clients]
    for a, b in zip(embedded.clients, flower.clients, strict=True):
        assert a.samples == b.samples
        assert a.expansion == (None if b.expansion is None else pytest.approx(b.expansion, rel=1e-12))
    for number in range(4):
        place = Position(1, number)
        a = embedded.run_round(model, place, everyone(embedded))
        b = flower.run_round(model, place, everyone(flower))
        np.testing.assert_array_equal(a.participants, b.participants)
        np.testing.assert_array_equal(a.samples, b.samples)
        np.testing.assert_allclose(a.model, b.model, rtol=0, atol=1e-12)
        np.testing.assert_allclose(a.drifts, b.drifts, rtol=1e-5, atol=1e-12)
        assert a.mean_shift == pytest.approx(b.mean_shift, rel=1e-9)
        assert a.rounding == pytest.approx(b.rounding, rel=1e-9)
        x, y = embedded.evaluate(a.model, everyone(embedded)), flower.evaluate(a.model, everyone(flower))
        np.testing.assert_array_equal(x.correct, y.correct)
        np.testing.assert_allclose(x.loss_sum, y.loss_sum, rtol=1e-9)
        model = a.model
    assert flower.take_incidents() == []


def test_a_client_in_another_round_gives_another_update() -> None:
    """Negative control: with batches, a client's update depends on the position of the round."""
    spec = small_spec(local={"batch": 4})
    _, flower, _ = both_engines(spec)
    model = flower.initial_model(0)
    a, b = (flower.run_round(model, Position(0, number), np.array([2])).model for number in range(2))
    assert np.abs(a - b).max() > 1e-6


def _wrong_sender(grid: object, node: int) -> None:
    grid.trouble[node] = lost  # type: ignore[attr-defined]


def test_whoever_is_lost_late_or_wrong_was_absent_and_that_is_recorded() -> None:
    embedded, flower, grid = both_engines(small_spec(server={"rejected": "reply"}))
    nodes = {flower.clients[k].name: 9000 - 7 * k for k in range(8)}
    names = [client.name for client in flower.clients]
    _wrong_sender(grid, nodes[names[1]])
    grid.trouble[nodes[names[2]]] = lambda message: None
    grid.trouble[nodes[names[4]]] = lambda message: _changed(grid.answer(message), lambda vector: vector * np.nan)
    grid.trouble[nodes[names[5]]] = lambda message: _changed(grid.answer(message), lambda vector: vector[:-1])
    grid.trouble[nodes[names[6]]] = lambda message: _changed(grid.answer(message), lambda vector: vector, samples=10**6)
    del grid.apps[nodes[names[7]]]
    model = flower.initial_model(0)
    result = flower.run_round(model, Position(0, 0), everyone(flower))
    assert result.participants.tolist() == [0, 3]
    expected = embedded.run_round(model, Position(0, 0), np.array([0, 3]))
    np.testing.assert_allclose(result.model, expected.model, atol=1e-12)
    np.testing.assert_allclose(result.drifts, expected.drifts, rtol=1e-6)
    told = {incident.client: incident.what for incident in flower.take_incidents()}
    assert set(told) == {names[k] for k in (1, 2, 7)}
    assert "error 5" in told[names[1]]
    assert "no answer within" in told[names[2]]
    assert "not there" in told[names[7]]
    refused = {rejection.client: (rejection.reason, rejection.left_out) for rejection in result.rejections}
    assert refused == {
        names[4]: ("not finite", True), names[5]: ("wrong shape", True), names[6]: ("wrong samples", True),
    }  # fmt: skip
    assert flower.take_incidents() == []


@pytest.mark.parametrize("rule", ["stop", "round"])
def test_a_refused_reply_stops_the_run_or_drops_the_round_as_the_spec_says(rule: str) -> None:
    _, flower, grid = both_engines(small_spec(server={"rejected": rule}))
    grid.trouble[9000] = lambda message: _changed(grid.answer(message), lambda vector: vector + 1e15)
    model = flower.initial_model(0)
    if rule == "stop":
        with pytest.raises(RoundRejectedError, match="client-000: too large"):
            flower.run_round(model, Position(0, 0), everyone(flower))
        return
    result = flower.run_round(model, Position(0, 0), everyone(flower))
    assert result.participants.size == 0
    np.testing.assert_array_equal(result.model, model)
    assert [rejection.reason for rejection in result.rejections] == ["too large", *["round dropped"] * 7]


def _changed(reply: Message, change: object, samples: int | None = None) -> Message:
    arrays = {name: Array(change(array)) for name, array in arrays_of(reply.content["arrays"]).items()}  # type: ignore
    count = reply.content["metrics"]["num-examples"] if samples is None else samples
    content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": count})})
    reply.content = content
    return reply


def test_a_round_with_too_few_answers_is_dropped_whole() -> None:
    _, flower, grid = both_engines(small_spec(), Patience(timeout=0.05, min_replies=4, pause=0.0, poll=0.01))
    for node in list(grid.apps)[:5]:
        grid.trouble[node] = lost
    model = flower.initial_model(0) + 0.25
    result = flower.run_round(model, Position(0, 0), everyone(flower))
    assert result.participants.size == 0
    np.testing.assert_array_equal(result.model, model)
    assert (result.mean_shift, result.rounding, result.drifts.size) == (0.0, 0.0, 0)
    assert flower.take_incidents()[-1].what == "3 of 8 answered: the round was dropped"
    assert "a minimum of 4 answers a round" in flower.facts.outside


def test_nobody_answering_changes_nothing_and_says_so() -> None:
    _, flower, grid = both_engines(small_spec())
    grid.apps.clear()
    model = flower.initial_model(0)
    result = flower.run_round(model, Position(0, 0), everyone(flower))
    np.testing.assert_array_equal(result.model, model)
    with pytest.raises(NoClientResponseError, match="no client answered"):
        flower.evaluate(model, everyone(flower))


def test_clients_that_are_left_out_are_never_spoken_to() -> None:
    _, flower, grid = both_engines(small_spec())
    flower.leave_out([2, 3])
    grid.sent.clear()
    model = flower.initial_model(0)
    result = flower.run_round(model, Position(0, 0), everyone(flower))
    assert result.participants.tolist() == [0, 1, 4, 5, 6, 7]
    assert flower.evaluate(model, np.array([2, 3])).samples.tolist() == [0, 0]
    assert {message.metadata.dst_node_id for message in grid.sent}.isdisjoint({9000 - 14, 9000 - 21})
    assert all(message.metadata.message_type == TRAIN for message in grid.sent)
    assert HASTY.min_replies == 1


@settings(max_examples=examples(80), deadline=None, derandomize=True)
@given(
    st.integers(1, 9),
    st.sampled_from([1, 3, 700, 20_000]),
    st.floats(1e-160, 1e140),
    st.booleans(),
    st.integers(0, 99),
)
def test_one_walk_over_the_replies_gives_what_two_passes_give(
    count: int, size: int, spread: float, single: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    dtype = np.float32 if single else np.float64
    start = random.normal(size=size)
    with np.errstate(over="ignore"):
        rows = [(start + spread * random.normal(size=size)).astype(dtype) for _ in range(count)]
    samples = random.integers(1, 1000, size=count)
    averaged = average_replies(rows, start, samples)
    expected = average_models(
        lambda: ((slice(k, k + 1), torch.from_numpy(row)[None, :]) for k, row in enumerate(rows)),
        start,
        samples,
        8,
    )
    assert averaged.not_finite == expected.not_finite
    if averaged.not_finite:
        return
    np.testing.assert_allclose(averaged.step, expected.step, rtol=1e-12, atol=1e-14 * max(1.0, spread))
    rounding = 1e-14 * max(1.0, spread) * np.sqrt(size)
    np.testing.assert_allclose(averaged.drifts, expected.drifts, rtol=1e-9, atol=rounding)
    assert averaged.mean_shift == pytest.approx(expected.mean_shift, rel=1e-9, abs=rounding)
    exact = np.average(np.stack(rows).astype(np.longdouble), axis=0, weights=samples.astype(np.longdouble))
    scale = np.longdouble(max(1e-300, float(np.abs(np.stack(rows) - exact).max())))
    for row, drift in zip(rows, averaged.drifts, strict=True):
        assert drift >= float(np.sqrt((((row - exact) / scale) ** 2).sum()) * scale) * (1 - 1e-15)


def test_blocks_pieces_and_threads_change_no_bit_and_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(3)
    start = random.normal(size=5_000).astype(np.float32)
    rows = [start + random.normal(size=5_000).astype(np.float32) for _ in range(4)]
    cut = [ModelPieces((row[:1], row[1:1_700], row[1_700:])) for row in rows]
    samples = np.array([3, 1, 7, 2])
    whole = average_replies(rows, start, samples)
    monkeypatch.setattr(averaging, "BLOCK_WORDS", 4 * 600)
    in_blocks = average_replies(cut, start, samples)
    monkeypatch.setattr(averaging, "MOST_THREADS", 1)
    alone = average_replies(cut, start, samples)
    np.testing.assert_array_equal(in_blocks.step, alone.step)
    np.testing.assert_array_equal(in_blocks.drifts, alone.drifts)
    assert in_blocks.mean_shift == alone.mean_shift
    np.testing.assert_allclose(in_blocks.step, whole.step, rtol=0, atol=1e-15)
    np.testing.assert_allclose(in_blocks.drifts, whole.drifts, rtol=1e-12)
    exact = np.average(np.stack(rows).astype(np.longdouble), axis=0, weights=samples.astype(np.longdouble))
    for row, drift in zip(rows, in_blocks.drifts, strict=True):
        assert drift >= float(np.sqrt(((row - exact) ** 2).sum()))
    rows[2][4_321] = np.nan
    assert average_replies(cut, start, samples).not_finite == (2,)


@pytest.mark.parametrize("masked", [False, True])
def test_rounds_that_draw_too_few_are_no_silence_but_rounds_without_answer_are(masked: bool) -> None:
    spec = small_spec(server={"participation": "poisson(0.01)"}, stop={"max_rounds": 30, "evaluate_every": 1000})
    _, flower, grid = both_engines(spec, masked=masked)
    model = flower.initial_model(0)
    wanted = RoundsWanted(spec.stop, model.astype(np.float64))
    rounds = list(flower.run_rounds(model, Position(0, 0), everyone(flower), wanted))
    assert len(rounds) == 30
    assert sum(done.participants.size == 0 for done in rounds) > 20
    _, flower, grid = both_engines(small_spec(stop={"max_rounds": 30, "evaluate_every": 1000}), masked=masked)
    grid.apps.clear()
    with pytest.raises(NoClientResponseError, match="5 rounds in a row"):
        list(flower.run_rounds(model, Position(0, 0), everyone(flower), wanted))
