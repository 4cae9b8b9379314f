"""Masked rounds: the same model and the same Psi, and a server that receives no single update."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flower_federation import HASTY, both_engines, everyone, small_spec
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_grid import MemoryGrid, lost
from served_runs import SPEC, Federation, psi_of

import sifu
from sifu.core.engine import Position
from sifu.engines.flower import masking
from sifu.engines.flower.client import add_profile, client_app
from sifu.engines.flower.exchange import ClaimedRoster
from sifu.engines.flower.flower_engine import FlowerFederation
from sifu.engines.flower.wire import DRIFT_QUERY, MASKED_TRAIN, PREPARE, TRAIN
from sifu.engines.masked_updates import FixedPoint
from sifu.engines.masks import mask, new_secret, public_part
from sifu.engines.own_models import own_blueprint
from sifu.engines.plans import WireProfile
from sifu.engines.remote import Blueprint
from sifu.errors import InputError
from sifu.theory.facts import CLAIMED
from sifu.theory.tracking import client_increments
from suite_setup import examples

PROBLEMS = {
    "softmax, everyone": {},
    "poisson, batches": {
        "server": {"participation": "poisson(0.7)"},
        "local": {"batch": 5},
    },
    "network in float32": {
        "model": {"kind": "mlp", "outputs": 10, "dtype": "float32"},
        "local": {"rate": 0.1, "batch": 4},
    },
}


# -- arithmetic --------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(st.integers(3, 7), st.integers(1, 40), st.floats(1e-6, 1e6), st.integers(0, 2**32 - 1))
def test_masks_cancel_in_the_whole_sum_and_the_mean_is_as_exact_as_said(
    count: int, size: int, spread: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    start = random.normal(size=size) * spread
    updates = random.normal(size=(count, size)) * spread
    samples = random.integers(1, 10**5, size=count)
    fixed = FixedPoint.of(start, int(samples.sum()))
    secrets = [new_secret() for _ in range(count)]
    keys = {number: public_part(secret) for number, secret in enumerate(secrets)}
    words = [fixed.words(update, int(n)) for update, n in zip(updates, samples, strict=True)]
    sent = [mask(unmasked, secrets[k], k, keys, b"0.0") for k, unmasked in enumerate(words)]
    total = np.sum(sent, axis=0, dtype=np.uint64)
    np.testing.assert_array_equal(total, np.sum(words, axis=0, dtype=np.uint64))
    mean = fixed.mean(total, int(samples.sum()), count)
    exact = samples @ updates / samples.sum()
    slack = 1e-14 * spread * np.sqrt(size) * 10
    assert np.linalg.norm(mean - exact) <= fixed.error(size, int(samples.sum()), count) + slack
    for some in itertools.combinations(range(count), count - 1):
        assert fixed.mean(np.sum([sent[k] for k in some], axis=0, dtype=np.uint64), 1, count - 1) is None


def test_updates_beyond_the_range_are_refused_and_never_clipped() -> None:
    fixed = FixedPoint.of(np.array([0.5]), 100)
    assert fixed.words(np.array([1024.0]), 3) is not None
    for value in (1024.1, np.inf, np.nan):
        assert fixed.words(np.array([value]), 3) is None
    # The largest update that fits does not wrap around, with as many clients as samples.
    total = np.sum([fixed.words(np.array([-1024.0]), 1) for _ in range(100)], axis=0, dtype=np.uint64)
    assert fixed.mean(total, 100, 100) == [-1024.0]
    with pytest.raises(InputError, match="no range fits"):
        FixedPoint.of(np.array([np.nan]), 1)


def test_a_mask_wants_enough_participants_and_its_own_key() -> None:
    secrets = [new_secret() for _ in range(3)]
    keys = {k: public_part(secret) for k, secret in enumerate(secrets)}
    words = np.zeros(4, dtype=np.uint64)
    mask(words, secrets[0], 0, keys, b"")
    for own, given_keys in ((0, {0: keys[0], 1: keys[1]}), (0, keys | {2: keys[1]})):
        with pytest.raises(InputError, match="3 participants"):
            mask(words, secrets[0], own, given_keys, b"")
    with pytest.raises(InputError, match="do not include this client's key"):
        mask(words, secrets[1], 0, keys, b"")
    with pytest.raises(InputError, match="key of participant 2 is invalid"):
        mask(words, secrets[0], 0, keys | {2: bytes(32)}, b"")
    a, b = (mask(words, secrets[0], 0, keys, place) for place in (b"0.1", b"0.2"))
    assert (a != b).all()


# -- rounds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROBLEMS)
def test_delta_of_the_client_is_delta_of_the_server(name: str) -> None:
    spec = small_spec(**PROBLEMS[name])
    _, plain, _ = both_engines(spec)
    _, masked, _ = both_engines(spec, masked=True)
    model = plain.initial_model(0)
    for number in range(3):
        place = Position(1, number)
        a, b = (federation.run_round(model, place, everyone(federation)) for federation in (plain, masked))
        np.testing.assert_array_equal(a.participants, b.participants)
        np.testing.assert_allclose(a.model, b.model, rtol=0, atol=1e-12 if model.dtype == np.float64 else 1e-6)
        deltas = [
            client_increments(result.samples, result.drifts, int(result.samples.sum()), result.mean_shift)
            for result in (a, b)
        ]
        np.testing.assert_allclose(deltas[0], deltas[1], rtol=0, atol=1e-6)
        np.testing.assert_allclose(deltas[0], deltas[1], rtol=1e-9)
        assert b.mean_shift == pytest.approx(a.mean_shift, rel=1e-9)
        assert b.mean_shift >= a.mean_shift * (1 - 1e-12)
        model = a.model
    assert masked.take_incidents() == []


def received_arrays(grid: MemoryGrid) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every array that the server received, with the kind of message it answered."""
    for reply in grid.received:
        for record in reply.content.values() if reply.has_content() else ():
            for array in record.values() if isinstance(record, ArrayRecord) else ():
                yield reply.metadata.message_type, array.numpy()


def readable_subsets(grid: MemoryGrid, fixed: FixedPoint, samples: int) -> list[int]:
    """Return sizes of the sets of received vectors whose sum is a sum of updates; only the full set may be one."""
    words = [array for kind, array in received_arrays(grid) if kind == MASKED_TRAIN]
    sizes = []
    for size in range(1, len(words) + 1):
        for some in itertools.combinations(words, size):
            if fixed.mean(np.sum(some, axis=0, dtype=np.uint64), samples, size) is not None:
                sizes.append(size)
    return sizes


def test_the_server_holds_no_single_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server process receives only masked words and numbers."""
    _, masked, grid = both_engines(small_spec(), masked=True)
    _, plain, _ = both_engines(small_spec())
    model = masked.initial_model(0)
    grid.received.clear()
    masked.run_round(model, Position(0, 0), everyone(masked))
    kinds = [message.metadata.message_type for message in grid.received]
    assert {kind: kinds.count(kind) for kind in kinds} == {PREPARE: 8, MASKED_TRAIN: 8, DRIFT_QUERY: 8}
    arrays = list(received_arrays(grid))
    assert all(kind == MASKED_TRAIN and array.dtype == np.uint64 for kind, array in arrays)
    for reply in grid.received:  # besides: a key, counts, one number
        for record in reply.content.values():
            if isinstance(record, ConfigRecord):
                assert set(record) == {"key"}
            if isinstance(record, MetricRecord):
                assert set(record) <= {"num-examples", "fits", "drift", "branch", "round"}
    samples = sum(client.samples for client in masked.clients)
    fixed = FixedPoint.of(model, samples)
    assert readable_subsets(grid, fixed, samples) == [8]
    # The words of one client reveal nothing about its update: all 64 bits are fair coins (5 standard deviations).
    updates = [plain.run_round(model, Position(0, 0), np.array([k])).model - model for k in everyone(plain)]
    for words, update in zip((array for _, array in arrays), updates, strict=True):
        bits = np.unpackbits(words.view(np.uint8))
        assert abs(bits.mean() - 0.5) < 5 * 0.5 / np.sqrt(bits.size)
        signs = np.sign(words[:-1].view(np.int64)) * np.sign(update)
        assert abs(signs.mean()) < 5 / np.sqrt(signs.size)

    # Negative control: without masks the same search finds every single update.
    monkeypatch.setattr(masking, "mask", lambda words, *rest: words)
    grid.received.clear()
    masked.run_round(model, Position(0, 1), everyone(masked))
    assert readable_subsets(grid, fixed, samples).count(1) == 8


def _when(grid: MemoryGrid, node: int, kind: str, act: object) -> None:
    """Apply `act` to messages of one kind to one node."""

    def trouble(message: Message) -> Message | None:
        return act(message) if message.metadata.message_type == kind else grid.answer(message)  # type: ignore[operator]

    grid.trouble[node] = trouble


def node_of(client: int) -> int:
    """Return the node of a client in `grid_of`."""
    return 9000 - 7 * client


def test_who_is_not_ready_was_absent_and_who_fails_later_drops_the_round() -> None:
    embedded, masked, grid = both_engines(small_spec(), masked=True)
    model = masked.initial_model(0)
    _when(grid, node_of(2), PREPARE, lost)
    result = masked.run_round(model, Position(0, 0), everyone(masked))
    assert result.participants.tolist() == [0, 1, 3, 4, 5, 6, 7]
    expected = embedded.run_round(model, Position(0, 0), result.participants)
    np.testing.assert_allclose(result.model, expected.model, atol=1e-12)
    np.testing.assert_allclose(result.drifts, expected.drifts, rtol=1e-9)
    assert [incident.client for incident in masked.take_incidents()] == [masked.clients[2].name]
    _when(grid, node_of(2), MASKED_TRAIN, lambda message: None)
    result = masked.run_round(model, Position(0, 1), everyone(masked))
    assert result.participants.size == 0
    np.testing.assert_array_equal(result.model, model)
    assert masked.take_incidents()[-1].what == "7 of 8 masked updates arrived: the round was dropped"
    for client in range(3, 8):
        _when(grid, node_of(client), PREPARE, lost)
    _when(grid, node_of(2), PREPARE, lost)
    assert masked.run_round(model, Position(0, 2), everyone(masked)).participants.size == 0
    assert "3 are needed" in masked.take_incidents()[-1].what


def test_an_update_out_of_range_or_a_mask_that_does_not_cancel_refuses_the_round() -> None:
    _, masked, grid = both_engines(small_spec(), masked=True)
    model = masked.initial_model(0)

    def enlarged(message: Message) -> Message:
        reply = grid.answer(message)
        reply.content["metrics"]["fits"] = 0  # the reply of a client whose update has diverged
        return reply

    _when(grid, node_of(5), PREPARE, enlarged)
    result = masked.run_round(model, Position(0, 0), everyone(masked))
    assert result.participants.size == 0
    told = masked.take_incidents()
    assert (told[0].client, told[0].what) == (masked.clients[5].name, "its update has entries beyond 2^10, or NaN")
    assert told[-1].what == "8 of 8 were ready, one update does not fit the range: the round was dropped"

    def garbled(message: Message) -> Message:
        reply = grid.answer(message)
        words = reply.content["arrays"]["masked"].numpy() + np.uint64(12345)
        reply.content["arrays"] = ArrayRecord({"masked": Array(words)})
        return reply

    _when(grid, node_of(5), MASKED_TRAIN, garbled)
    result = masked.run_round(model, Position(0, 1), everyone(masked))
    assert result.participants.size == 0
    np.testing.assert_array_equal(result.model, model)
    assert "do not cancel" in masked.take_incidents()[-1].what


def test_a_client_that_diverges_says_so_itself() -> None:
    wild = _usual({"w": np.array([5000.0, 0.0])})
    message = _message({"w": np.zeros(2)}, PREPARE, **{"reach-bits": 10, "scale-bits": 40})
    reply = wild(message, Context(1, 1, {}, RecordDict(), {}))
    assert reply.content["metrics"]["fits"] == 0
    tame = _usual({"w": np.array([500.0, 0.0])})
    assert tame(message, Context(1, 1, {}, RecordDict(), {})).content["metrics"]["fits"] == 1


def _message(arrays: dict[str, np.ndarray], kind: str, **config: object) -> Message:
    MemoryGrid()
    record = ConfigRecord({"branch": 0, "round": 0, "client": 0, "steps": 1, "plan": "", **config})  # type: ignore
    model = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    return Message(RecordDict({"config": record, "arrays": model}), 1, kind)


def _usual(answer: dict[str, np.ndarray]) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        assert message.metadata.message_type == TRAIN
        arrays = ArrayRecord({name: Array(array) for name, array in answer.items()})
        return Message(RecordDict({"a": arrays, "m": MetricRecord({"num-examples": 10})}), reply_to=message)

    return add_profile(app, "site", 10)


def test_an_app_that_existed_before_is_masked_too() -> None:
    grid, targets = MemoryGrid(), [np.array([k, 1.0 - k]) for k in range(4)]
    for number, target in enumerate(targets):
        # The names are not in alphabetical order, and one array is two-dimensional.
        grid.add(number, _usual({"z": target[:1], "a": target[1:].reshape(1, 1)}))
    profiles = [WireProfile(f"site-{k}", 10, 1) for k in range(4)]
    design, _ = own_blueprint(
        lambda branch: {"z": np.zeros(1), "a": np.zeros((1, 1))}, small_spec(local={"rate": 0.1, "steps": 1}), profiles,
        identity=CLAIMED, preprocessing="",
    )  # fmt: skip
    assert isinstance(design, Blueprint)
    roster = ClaimedRoster(grid, {k: f"site-{k}" for k in range(4)})
    engine = FlowerFederation(grid, roster, design, HASTY, masked=True)
    result = engine.run_round(np.zeros(2), Position(0, 0), np.arange(4))
    assert engine.take_incidents() == []
    np.testing.assert_allclose(result.model, np.mean(targets, axis=0), atol=1e-12)
    np.testing.assert_allclose(result.drifts, [np.linalg.norm(t - np.mean(targets, axis=0)) for t in targets])


def test_a_client_tells_one_distance_a_round_masks_once_and_sends_nothing_in_the_clear() -> None:
    grid = MemoryGrid()
    app = _usual({"w": np.array([1.0, 2.0])})
    context = Context(1, 1, {}, RecordDict(), {})
    bits = {"reach-bits": 10, "scale-bits": 40}
    own = app(_message({"w": np.zeros(2)}, PREPARE, **bits), context).content["config"]["key"]
    keys = [own, public_part(new_secret()), public_part(new_secret())]
    ask = _message({}, MASKED_TRAIN, clients=[0, 1, 2], keys=keys, **bits)
    app(ask, context)
    with pytest.raises(InputError, match="already sent"):
        app(ask, context)
    first = app(_message({"w": np.zeros(2)}, DRIFT_QUERY), context).content["metrics"]["drift"]
    assert first == pytest.approx(5**0.5)
    # the same question again is allowed, because the answer may have been lost
    app(_message({"w": np.zeros(2)}, DRIFT_QUERY), context)
    with pytest.raises(InputError, match="another mean"):
        app(_message({"w": np.ones(2)}, DRIFT_QUERY), context)
    with pytest.raises(InputError, match="restarted"):
        app(_message({"w": np.zeros(2)}, DRIFT_QUERY, round=1), context)
    cautious = client_app(lambda context: None, masked_only=True)  # type: ignore[arg-type,return-value]
    with pytest.raises(InputError, match="masked updates only"):
        cautious(_message({"w": np.zeros(2)}, TRAIN), context)
    assert grid.sent == []


# -- whole runs ----------------------------------------------------------------------------------------------


def test_a_lost_report_makes_psi_unbounded_for_that_client_alone(tmp_path: Path) -> None:
    for name in ("whole", "lost"):
        (tmp_path / name).mkdir()
    whole = Federation(tmp_path / "whole", SPEC, masked_updates=True)
    whole.serve()
    fed = Federation(tmp_path / "lost", SPEC, masked_updates=True)
    victim = fed.nodes[fed.data[4].name]

    def restarted(message: Message) -> Message:
        if message.content["config"]["round"] == 6:
            fed.grid.contexts.pop(victim, None)  # the node was killed after it sent its masked update
        return fed.grid.answer(message)

    _when(fed.grid, victim, DRIFT_QUERY, restarted)
    fed.serve()
    psi = psi_of(fed.run_folder)
    assert np.isinf(psi[4])
    np.testing.assert_array_equal(np.delete(psi, 4), np.delete(psi_of(whole.run_folder), 4))
    run = sifu.open_run(fed.run_folder)
    reader = run.reader()
    part = reader.participation()
    told = [json.loads(event.payload)["incidents"] for event in reader.events() if event.kind == "incidents"]
    reader.close()
    assert int((part.clients == 4).sum()) == 14
    assert [(incident["round"], incident["client"]) for many in told for incident in many] == [(6, fed.data[4].name)]
    assert "unbounded" in told[0][0]["what"]
    plan = run.plan([fed.data[4].name], sigma=5.0)
    assert plan.source_node <= 6
    assert run.plan([fed.data[3].name], sigma=5.0).source_node == 14
    run.request([fed.data[4].name], "one", sigma=5.0)
    assert fed.serve() == ["one"]
    assert run.verify().problems == []
    assert np.isfinite(psi_of(fed.run_folder)).all()


@pytest.mark.parametrize("lie", [0.0, 1e9, -1.0, float("nan")])
def test_a_lie_about_the_drift_moves_nobody_elses_psi(tmp_path: Path, lie: float) -> None:
    for name in ("honest", "lying"):
        (tmp_path / name).mkdir()
    short = replace(SPEC, stop=replace(SPEC.stop, max_rounds=4))
    honest = Federation(tmp_path / "honest", short, masked_updates=True)
    honest.serve()
    fed = Federation(tmp_path / "lying", short, masked_updates=True)

    def lying(message: Message) -> Message:
        reply = fed.grid.answer(message)
        reply.content["metrics"]["drift"] = lie
        return reply

    _when(fed.grid, fed.nodes[fed.data[2].name], DRIFT_QUERY, lying)
    fed.serve()
    a, b = psi_of(honest.run_folder), psi_of(fed.run_folder)
    np.testing.assert_array_equal(np.delete(a, 2), np.delete(b, 2))
    assert b[2] > 0.0  # a participant never has Psi zero, whatever it reports
    if not lie >= 0.0:
        assert np.isinf(b[2])
    assert sifu.open_run(fed.run_folder).verify().problems == []
