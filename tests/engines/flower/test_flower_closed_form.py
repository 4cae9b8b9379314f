"""Heads in closed form over Flower's messages: the bits of the embedded engine, under masks and in the clear."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flower_federation import HASTY, both_engines, small_spec
from flwr.app import Array, ArrayRecord, ConfigRecord, Message
from test_flower_runs import Federation, new_key

import sifu
import sifu_verifier
from sifu.core.certificate_words import words_of
from sifu.core.closed_form_engine import recorded_fixed_point
from sifu.core.engine import Position
from sifu.core.spec import Spec
from sifu.engines.flower.client import client_app
from sifu.engines.flower.ready import ReadyClient
from sifu.engines.flower.wire import (
    ARRAYS,
    CONFIG,
    FEATURES,
    MASKED,
    PREPARE_STATISTICS,
    ROW_FEATURES,
    SEND_MASKED_STATISTICS,
    STATISTICS,
    WORDS,
)
from sifu.engines.sim import embedded_heads
from sifu.errors import InputError, NoClientResponseError, RoundRejectedError
from sifu.requests.client_list import ask_for_change, fingerprint_of_file
from sifu.run.clients_and_engine import clients_from_spec, engine_from_spec
from sifu.store.reader import RunReader
from sifu.store.statistics_files import read_statistics
from sifu.theory.closed_form import Rows, Statistics, total
from sifu.theory.facts import MASKED_STATISTICS

PLACE = Position(0, 0)


def head_spec(**sections: Any) -> Spec:
    """Return a spec of eight clients with a few digits each and a head on random features."""
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
    """Return the sum over these clients on the embedded engine."""
    engine, _ = engine_from_spec(spec, clients)
    return total(engine.fixed, (sent for _, sent in engine.collect(range(len(clients)), PLACE)))  # type: ignore


def sound(folder: Path) -> None:
    assert sifu.open_run(folder).verify().problems == []
    assert sifu_verifier.verify(folder) == []


@pytest.mark.parametrize("masked", [True, False])
def test_a_run_on_flower_has_the_bits_of_the_embedded_engine(tmp_path: Path, masked: bool) -> None:
    spec = head_spec()
    fed = Federation(tmp_path, spec, masked_statistics=masked)
    fed.serve()
    sifu.train(spec, run=tmp_path / "embedded")
    assert kept_sum(fed.run_folder).digest() == kept_sum(tmp_path / "embedded").digest()
    np.testing.assert_array_equal(head_of(fed.run_folder), head_of(tmp_path / "embedded"))
    assert sorted(path.name for path in (fed.run_folder / "statistics").iterdir()) == ["1.sum.statistics"]
    sound(fed.run_folder)


@pytest.mark.parametrize("settings", [{}, {"masked_statistics": False}])
@pytest.mark.parametrize("keep", ["sum", "clients"])
def test_forgetting_leaves_the_bits_of_a_federation_that_never_had_the_client(
    tmp_path: Path, settings: dict, keep: str
) -> None:
    if keep == "clients" and not settings:
        with pytest.raises(InputError, match="masked-statistics = false"):
            Federation(tmp_path, head_spec(keep={"statistics": "clients"})).serve()
        return
    fed = Federation(tmp_path, head_spec(keep={"statistics": keep}), **settings)
    fed.serve()
    names = [fed.data[2].name, fed.data[5].name]
    run = sifu.open_run(fed.run_folder)
    for number, name in enumerate(names):
        run.request([name], f"r{number}")
    fed.grid.sent.clear()
    assert fed.serve() == ["r0", "r1"]
    assert not set(names) & fed.contacted()
    kinds = [message.metadata.message_type for message in fed.grid.sent]
    sent = {kind: kinds.count(kind) for kind in kinds if kind.startswith("train")}
    if keep == "clients":
        assert sent == {}
    else:
        # Both had asked before the first was executed: the second finds a sum of those who stay already.
        assert sent == ({PREPARE_STATISTICS: 6, SEND_MASKED_STATISTICS: 6} if not settings else {STATISTICS: 6})
    assert [(outcome.level, outcome.clients) for outcome in run.outcomes()] == [
        ("exact", (names[0],)),
        ("exact", (names[1],)),
    ]
    staying = [client for client in fed.data if client.name not in names]
    assert kept_sum(fed.run_folder).digest() == embedded_sum(fed.spec, staying).digest()
    sound(fed.run_folder)


def test_the_server_of_masked_statistics_never_holds_anybodys_own(tmp_path: Path) -> None:
    spec = head_spec()
    fed = Federation(tmp_path, spec)
    fed.serve()
    engine, _ = engine_from_spec(spec, fed.data)
    own = [total(engine.fixed, [sent]).words for _, sent in engine.collect(range(8), PLACE)]  # type: ignore[union-attr]
    masked = [
        message.content[ARRAYS][MASKED].numpy()
        for message in fed.grid.received
        if ARRAYS in message.content and MASKED in message.content[ARRAYS]
    ]
    assert len(masked) == 8
    for words in own:
        for sent in masked:
            # Uniform words agree with a client's own nowhere, or next to it.
            assert np.count_nonzero(sent[:-1].view(np.int64) == words) < 3
    # All of them together, and nothing less, are the sum.
    whole = np.sum(masked, axis=0, dtype=np.uint64).view(np.int64)
    np.testing.assert_array_equal(whole[:-1], np.sum(own, axis=0))
    assert whole[-1] == 8
    fewer = np.sum(masked[:-1], axis=0, dtype=np.uint64).view(np.int64)
    assert np.count_nonzero(fewer[:-1] == np.sum(own[:-1], axis=0)) < 3


def flower_engine(masked: bool = True, **sections: Any) -> tuple[Any, Any, Any]:
    return both_engines(head_spec(**sections), HASTY, masked_statistics=masked)


NODE = {client: 9000 - 7 * client for client in range(8)}


def unless(kind: str, grid: Any) -> Callable[[Message], Message | None]:
    """Return a node that never answers messages of a kind."""
    return lambda message: None if message.metadata.message_type == kind else grid.answer(message)


@pytest.mark.parametrize("lost", [PREPARE_STATISTICS, SEND_MASKED_STATISTICS])
def test_a_masked_sum_is_done_again_without_whoever_goes_missing(lost: str) -> None:
    embedded, flower, grid = flower_engine()
    grid.trouble[NODE[3]] = unless(lost, grid)
    result = flower.collect_sum(range(8), PLACE)
    staying = [0, 1, 2, 4, 5, 6, 7]
    assert result.clients == tuple(staying)
    parts = dict(embedded.collect(range(8), PLACE))
    assert result.statistics == total(flower.fixed, (parts[client] for client in staying))
    assert result.sent == (14 if lost == SEND_MASKED_STATISTICS else 7)
    incidents = flower.take_incidents()
    assert "client-003" in {incident.client for incident in incidents}
    again = [incident.what for incident in incidents if not incident.client]
    assert again == (
        ["7 of 8 masked statistics came: the sum is done again without the others"]
        if lost == SEND_MASKED_STATISTICS
        else []
    )


def test_statistics_are_computed_once_for_a_sum_that_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _, flower, grid = flower_engine()
    computed: list[str] = []
    honest = ReadyClient.statistics

    def counted(self: ReadyClient, instruction: Any) -> Any:
        computed.append(self.name)
        return honest(self, instruction)

    monkeypatch.setattr(ReadyClient, "statistics", counted)
    grid.trouble[NODE[3]] = unless(SEND_MASKED_STATISTICS, grid)
    flower.collect_sum(range(8), PLACE)
    assert len(computed) == 8
    flower.collect_sum([0, 1, 2], Position(0, 1))  # another round: what a client has may be other data by now
    assert len(computed) == 11


def test_too_few_for_a_masked_sum_is_said(tmp_path: Path) -> None:
    _, flower, grid = flower_engine()
    for client in range(2, 8):
        del grid.apps[NODE[client]]
    with pytest.raises(NoClientResponseError, match="needs 3 clients"):
        flower.collect_sum(range(8), PLACE)


def test_a_client_tells_its_masked_statistics_once_for_a_key() -> None:
    _, flower, grid = flower_engine()
    flower.collect_sum(range(8), PLACE)
    sent = [message for message in grid.sent if message.metadata.message_type == SEND_MASKED_STATISTICS]
    assert "already sent" in grid.answer(sent[0]).error.reason
    grid.contexts.clear()
    assert "restarted" in grid.answer(sent[1]).error.reason


def changed(grid: Any, change: Callable[[Message], None], kind: str) -> Callable[[Message], Message]:
    """Return a node whose answers to a kind of message are changed."""

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


@pytest.fixture
def in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients send statistics where rows would be smaller, as those of earlier versions do."""
    monkeypatch.setattr(embedded_heads, "rows_are_smaller", lambda fixed, samples: False)


def rows_changed(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Message], None]:
    def edit(reply: Message) -> None:
        arrays = {name: array.numpy().copy() for name, array in reply.content[ARRAYS].items()}
        arrays[ROW_FEATURES] = change(arrays[ROW_FEATURES])
        reply.content[ARRAYS] = ArrayRecord({name: Array(array) for name, array in arrays.items()})

    return edit


def longer(features: np.ndarray) -> np.ndarray:
    features[0] = 1 << 24
    return features


def another_map(reply: Message) -> None:
    reply.content[CONFIG] = ConfigRecord({**reply.content[CONFIG], FEATURES: "0" * 64})


def first_is_negative(words: np.ndarray) -> np.ndarray:
    words[0] = -1
    return words


def one_sample_more(words: np.ndarray) -> np.ndarray:
    words[-2] += 1
    return words


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("impossible statistics", words_changed(first_is_negative)),
        ("wrong samples", words_changed(one_sample_more)),
        ("wrong shape", words_changed(lambda words: words[:-1])),
        ("another feature map", another_map),
    ],
)
@pytest.mark.usefixtures("in_words")
def test_statistics_that_cannot_be_are_refused_and_named(tmp_path: Path, reason: str, change: Any) -> None:
    check_refused(tmp_path, reason, change)


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("impossible statistics", rows_changed(longer)),
        ("wrong shape", rows_changed(lambda features: features[:, :-1])),
        ("wrong shape", rows_changed(lambda features: features[:-1])),
        ("wrong shape", rows_changed(lambda features: np.array(features[0, 0]))),
        ("wrong shape", rows_changed(lambda features: features.astype(np.float64))),
        ("another feature map", another_map),
    ],
)
def test_rows_that_cannot_be_are_refused_and_named(tmp_path: Path, reason: str, change: Any) -> None:
    check_refused(tmp_path, reason, change)


def test_rows_and_words_from_different_nodes_give_the_sum_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    _, flower, _ = flower_engine(masked=False)
    rows = dict(flower.collect(range(8), PLACE))
    monkeypatch.setattr(embedded_heads, "rows_are_smaller", lambda fixed, samples: False)
    words = dict(flower.collect(range(8), PLACE))
    assert all(isinstance(sent, Rows) for sent in rows.values())
    assert all(isinstance(sent, Statistics) for sent in words.values())
    mixed = [(rows if client % 2 else words)[client] for client in range(8)]
    assert total(flower.fixed, mixed).digest() == total(flower.fixed, words.values()).digest()


def check_refused(tmp_path: Path, reason: str, change: Any) -> None:
    fed = Federation(tmp_path, head_spec(), masked_statistics=False)
    fed.grid.trouble[NODE[4]] = changed(fed.grid, change, STATISTICS)
    fed.serve()
    with RunReader(fed.run_folder) as reader:
        assert [(row.client, row.reason, row.left_out) for row in reader.rejections()] == [("client-004", reason, True)]
    others = [client for client in fed.data if client.name != "client-004"]
    assert kept_sum(fed.run_folder).digest() == embedded_sum(fed.spec, others).digest()
    sound(fed.run_folder)


@pytest.mark.usefixtures("in_words")
def test_a_reply_without_whole_numbers_is_no_answer(tmp_path: Path) -> None:
    _, flower, grid = flower_engine(masked=False)
    grid.trouble[NODE[4]] = changed(grid, words_changed(lambda words: words.astype(np.float64)), STATISTICS)
    answers = dict(flower.collect(range(8), PLACE))
    assert [client for client, sent in answers.items() if sent is None] == [4]
    assert any("not whole numbers" in incident.what for incident in flower.take_incidents())


def test_a_masked_client_with_another_map_is_refused_before_it_sends(tmp_path: Path) -> None:
    fed = Federation(tmp_path, head_spec())
    fed.grid.trouble[NODE[4]] = changed(fed.grid, another_map, PREPARE_STATISTICS)
    fed.serve()
    with RunReader(fed.run_folder) as reader:
        assert [(row.client, row.reason) for row in reader.rejections()] == [("client-004", "another feature map")]
    sound(fed.run_folder)


@pytest.mark.usefixtures("in_words")
def test_a_masked_sum_that_no_data_can_have_is_refused_whole(tmp_path: Path) -> None:
    fed = Federation(tmp_path, head_spec())

    def add(words: np.ndarray) -> np.ndarray:
        words[0] += np.uint64(1)  # an odd square of an even sum, or the other way round
        return words

    fed.grid.trouble[NODE[4]] = changed(fed.grid, words_changed(add, MASKED), SEND_MASKED_STATISTICS)
    with pytest.raises(RoundRejectedError, match="the sum of the masked statistics of 8 clients is refused"):
        fed.serve()
    # In the clear the same run finds out who it was.
    fed.grid.trouble[NODE[4]] = changed(fed.grid, words_changed(first_is_negative), STATISTICS)
    fed.settings = type(fed.settings)(**(vars(fed.settings) | {"masked_statistics": False}))
    fed.serve()
    with RunReader(fed.run_folder) as reader:
        assert [row.client for row in reader.rejections()] == ["client-004"]
    sound(fed.run_folder)


def test_masks_cannot_be_put_on_later(tmp_path: Path) -> None:
    fed = Federation(tmp_path, head_spec(), masked_statistics=False)
    fed.serve()
    fed.settings = type(fed.settings)(**(vars(fed.settings) | {"masked_statistics": True}))
    with pytest.raises(InputError, match="same min-replies, masked-updates and masked-statistics"):
        fed.serve()


@pytest.mark.parametrize("masked", [True, False])
def test_whoever_is_away_is_in_the_head_when_it_comes_back(tmp_path: Path, masked: bool) -> None:
    fed = Federation(tmp_path, head_spec(), masked_statistics=masked)
    fed.grid.trouble[NODE[6]] = lambda message: (
        fed.grid.answer(message) if message.metadata.message_type.startswith("query") else None
    )
    fed.serve()
    assert last_solve(fed.run_folder)["absent"] == [6]
    others = [client for client in fed.data if client.name != "client-006"]
    assert kept_sum(fed.run_folder).digest() == embedded_sum(fed.spec, others).digest()
    sound(fed.run_folder)
    del fed.grid.trouble[NODE[6]]
    fed.grid.sent.clear()
    fed.serve()
    assert "absent" not in last_solve(fed.run_folder)
    assert kept_sum(fed.run_folder).digest() == embedded_sum(fed.spec, fed.data).digest()
    metadata = [message.metadata for message in fed.grid.sent if message.metadata.message_type.startswith("train")]
    training = {(sent.message_type, sent.dst_node_id) for sent in metadata}  # some ask to be shown the ledger first
    assert len(training) == (16 if masked else 1)  # under masks everybody sends again, in the clear the newcomer alone
    sound(fed.run_folder)
    fed.grid.sent.clear()
    fed.serve()
    assert not [message for message in fed.grid.sent if message.metadata.message_type.startswith("train")]


def test_a_client_that_never_answers_does_not_keep_the_server_busy(tmp_path: Path) -> None:
    fed = Federation(tmp_path, head_spec())
    fed.grid.trouble[NODE[6]] = unless(PREPARE_STATISTICS, fed.grid)
    fed.serve()
    training = [message for message in fed.grid.sent if message.metadata.message_type == PREPARE_STATISTICS]
    assert len(training) == 16  # once at first, once again because its node is there
    with RunReader(fed.run_folder) as reader:
        assert len([event for event in reader.events() if "solve" in event.content]) == 1


def test_a_forged_absence_is_noticed(tmp_path: Path) -> None:
    from forged_runs import rebuild_chain

    fed = Federation(tmp_path, head_spec())
    fed.serve()

    def edit(kind: str, content: dict[str, Any]) -> None:
        if "solve" in content:
            content["solve"]["absent"] = [2]

    rebuild_chain(fed.run_folder, edit)
    assert any("solved from the wrong clients" in line for line in sifu.open_run(fed.run_folder).verify().problems)
    assert sifu_verifier.verify(fed.run_folder) != []


@pytest.mark.parametrize("masked", [True, False])
def test_joining_and_leaving_give_the_bits_of_those_who_are_there(tmp_path: Path, masked: bool) -> None:
    fed = Federation(tmp_path, head_spec(), masked_statistics=masked)
    fed.serve()
    lost = fed.data[1]
    path, pem = new_key(tmp_path, "again")
    # Two records less: forget, and join again under another name and key.
    left = ReadyClient("hospital-again", lost.x[2:], lost.y[2:])
    fed.grid.add(123, client_app(lambda context: left), pem)
    sifu.open_run(fed.run_folder).request([lost.name], "gone")
    ask_for_change(fed.run_folder, {"do": "add", "name": "hospital-again", "key": fingerprint_of_file(path)})
    assert fed.serve() == ["gone"]
    staying = [client for client in fed.data if client is not lost]
    assert kept_sum(fed.run_folder).digest() == embedded_sum(fed.spec, [*staying, left]).digest()
    sound(fed.run_folder)


def test_the_certificate_says_that_masked_statistics_were_not_checked_one_by_one(tmp_path: Path) -> None:
    texts = {}
    for masked in (True, False):
        fed = Federation(tmp_path / str(masked), head_spec(), masked_statistics=masked)
        fed.serve()
        sifu.open_run(fed.run_folder).request([fed.data[0].name], "one")
        fed.serve()
        body = sifu.open_run(fed.run_folder).certificate("one").body
        assert body["level"] == "exact"
        (texts[masked],) = [premise.statement for premise in words_of(body).premises if premise.name == "statistics"]
        with RunReader(fed.run_folder) as reader:
            assert (MASKED_STATISTICS in reader.facts["outside"]) == masked
    assert "could not be checked" in texts[True]
    assert texts[False].startswith("Statistics that no data can have were refused")


def test_a_client_that_masks_only_sends_nothing_in_the_clear() -> None:
    _, flower, grid = flower_engine(masked=False)
    data = ReadyClient("client-000", np.zeros((2, 64)), np.array([0, 1]))
    grid.apps[NODE[0]] = client_app(lambda context: data, masked_only=True)
    answers = dict(flower.collect(range(8), PLACE))
    assert answers[0] is None
    assert any("masked statistics only" in incident.what for incident in flower.take_incidents())


def test_more_samples_than_sums_have_room_for_are_refused_first() -> None:
    with pytest.raises(InputError, match="exact for at most"):
        flower_engine(
            ridge={"feature_bits": 22},
            features={"kind": "none", "norm": 22.0},
            data={"samples_per_client": 150, "preprocessing": "fixed"},
        )


def test_with_fewer_than_three_left_a_run_goes_on_in_the_clear(tmp_path: Path) -> None:
    fed = Federation(tmp_path, head_spec(data={"clients": 3, "preprocessing": "fixed"}))
    fed.serve()
    sifu.open_run(fed.run_folder).request([fed.data[0].name], "one")
    with pytest.raises(NoClientResponseError, match="masked-statistics = false"):
        fed.serve()
    sound(fed.run_folder)
    fed.settings = type(fed.settings)(**(vars(fed.settings) | {"masked_statistics": False}))
    assert fed.serve() == ["one"]
    assert kept_sum(fed.run_folder).digest() == embedded_sum(fed.spec, fed.data[1:]).digest()
    sound(fed.run_folder)


@pytest.mark.parametrize("task", ["regression", "multi_label"])
def test_other_tasks(tmp_path: Path, task: str) -> None:
    ridge = {"task": task, "regularisation": 1e-6} | ({"shift": 0.0} if task == "regression" else {})
    spec = small_spec(model={"kind": "ridge", "outputs": 2}, ridge=ridge, data={"preprocessing": "fixed"})
    fed = Federation(tmp_path, spec)
    generator = np.random.default_rng(0)
    for node in list(fed.grid.apps):
        x = generator.normal(size=(20, 3))
        y = x @ np.array([[1.0, -1.0], [0.5, 0.0], [0.0, 2.0]])
        own = ReadyClient("a", x, (y > 0).astype(np.int64) if task == "multi_label" else y)
        fed.grid.apps[node] = client_app(lambda context, own=own: own)
    fed.serve()
    if task == "regression":
        weights = head_of(fed.run_folder).reshape(4, 2)
        np.testing.assert_allclose(weights[:3], [[1.0, -1.0], [0.5, 0.0], [0.0, 2.0]], atol=1e-3)
    sound(fed.run_folder)


def test_a_softmax_head_on_features_is_the_embedded_one(tmp_path: Path) -> None:
    """Clients compute their features themselves; Psi and the level are those of the embedded engine."""
    spec = small_spec(
        features={"kind": "random_fourier", "count": 16, "bandwidth": 3.0},
        data={"preprocessing": "fixed"},
        privacy={"sigma": 0.12},
    )
    embedded = sifu.train(spec, run=tmp_path / "embedded")
    fed = Federation(tmp_path, spec)
    samples = clients_from_spec(replace(spec, features=Spec().features))
    for node, client in zip(list(fed.grid.apps), samples, strict=True):
        own = ReadyClient(client.name, client.x, client.y, cache=tmp_path / client.name)
        fed.grid.apps[node] = client_app(lambda context, own=own: own)
    fed.serve()
    assert [len(list((tmp_path / client.name).iterdir())) for client in samples] == [1] * 8
    with sifu.open_run(fed.run_folder).reader() as first, embedded.reader() as second:
        np.testing.assert_allclose(first.load_model(first.tip), second.load_model(second.tip), rtol=0, atol=1e-11)
        assert first.facts["features"] == second.facts["features"] != ""
    name = fed.data[3].name
    plan, expected = sifu.open_run(fed.run_folder).plan([name]), embedded.plan([name])
    assert (plan.source_node, plan.level) == (expected.source_node, expected.level)
    assert json.dumps([premise.status for premise in plan.premises if premise.name == "features"]) == '["met"]'
    sound(fed.run_folder)


def arrays_sent(fed: Federation) -> list[bytes]:
    """Return the bytes of every array that was sent to a node."""
    records = [record for message in fed.grid.sent for record in message.content.values()]
    return [array.data for record in records if isinstance(record, ArrayRecord) for array in record.values()]


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_with_noise_on_releases_no_node_is_sent_the_solved_head(tmp_path: Path, noise: float) -> None:
    """Without noise the nodes evaluate the solved head, which is the positive control."""
    sections = {"release": {"noise": noise}, "ridge": {"regularisation": 0.05}, "keep": {"statistics": "clients"}}
    fed = Federation(tmp_path, head_spec(**sections), masked_statistics=False)
    fed.serve()
    heads = [head_of(fed.run_folder)]
    sifu.open_run(fed.run_folder).request([fed.data[2].name], "r0")
    assert fed.serve() == ["r0"]
    heads.append(head_of(fed.run_folder))
    solved = [np.ascontiguousarray(head[:8]).tobytes() for head in heads]
    assert any(part in sent for sent in arrays_sent(fed) for part in solved) == (noise == 0.0)
    sound(fed.run_folder)
    run = sifu.open_run(fed.run_folder)
    assert ("before_after" in run.certificate("r0").body) == (noise > 0.0)
    # The server keeps these clients' samples as rows, so it knows the distances of their records, too.
    assert (run.plan([fed.data[3].name], records=[0]).before_after is not None) == (noise > 0.0)
