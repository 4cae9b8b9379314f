"""Masked sums of statistics are repeated without missing clients and do not reveal a single client's statistics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flower_heads as heads
import numpy as np
import pytest
from served_runs import Federation

import sifu
from sifu.core.certificate_words import words_of
from sifu.core.engine import Position
from sifu.engines.flower.client import client_app
from sifu.engines.flower.wire import ARRAYS, MASKED, PREPARE_STATISTICS, SEND_MASKED_STATISTICS, STATISTICS
from sifu.engines.ready import ReadyClient
from sifu.errors import InputError, NoClientResponseError, RoundRejectedError
from sifu.run.clients_and_engine import engine_from_spec
from sifu.store.reader import RunReader
from sifu.theory.closed_form import total
from sifu.theory.facts import MASKED_STATISTICS


def test_the_server_of_masked_statistics_never_holds_anybodys_own(tmp_path: Path) -> None:
    spec = heads.head_spec()
    fed = Federation(tmp_path, spec)
    fed.serve()
    engine, _ = engine_from_spec(spec, fed.data)
    own = [total(engine.fixed, [sent]).words for _, sent in engine.collect(range(8), heads.PLACE)]  # type: ignore[union-attr]
    masked = [
        message.content[ARRAYS][MASKED].numpy()
        for message in fed.grid.received
        if ARRAYS in message.content and MASKED in message.content[ARRAYS]
    ]
    assert len(masked) == 8
    for words in own:
        for sent in masked:
            # Masked words are uniform, so at most two agree with a client's words by chance.
            assert np.count_nonzero(sent[:-1].view(np.int64) == words) < 3
    # Only all masked statistics together give the sum.
    whole = np.sum(masked, axis=0, dtype=np.uint64).view(np.int64)
    np.testing.assert_array_equal(whole[:-1], np.sum(own, axis=0))
    assert whole[-1] == 8
    fewer = np.sum(masked[:-1], axis=0, dtype=np.uint64).view(np.int64)
    assert np.count_nonzero(fewer[:-1] == np.sum(own[:-1], axis=0)) < 3


@pytest.mark.parametrize("lost", [PREPARE_STATISTICS, SEND_MASKED_STATISTICS])
def test_a_masked_sum_is_done_again_without_whoever_goes_missing(lost: str) -> None:
    embedded, flower, grid = heads.flower_engine()
    grid.trouble[heads.NODE[3]] = heads.unless(lost, grid)
    result = flower.collect_sum(range(8), heads.PLACE)
    staying = [0, 1, 2, 4, 5, 6, 7]
    assert result.clients == tuple(staying)
    parts = dict(embedded.collect(range(8), heads.PLACE))
    assert result.statistics == total(flower.fixed, (parts[client] for client in staying))
    assert result.sent == (14 if lost == SEND_MASKED_STATISTICS else 7)
    incidents = flower.take_incidents()
    assert "client-003" in {incident.client for incident in incidents}
    again = [incident.what for incident in incidents if not incident.client]
    assert again == (
        ["7 of 8 masked statistics arrived: the sum is repeated without the others"]
        if lost == SEND_MASKED_STATISTICS
        else []
    )


def test_statistics_are_computed_once_for_a_sum_that_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _, flower, grid = heads.flower_engine()
    computed: list[str] = []
    honest = ReadyClient.statistics

    def counted(self: ReadyClient, instruction: Any) -> Any:
        computed.append(self.name)
        return honest(self, instruction)

    monkeypatch.setattr(ReadyClient, "statistics", counted)
    grid.trouble[heads.NODE[3]] = heads.unless(SEND_MASKED_STATISTICS, grid)
    flower.collect_sum(range(8), heads.PLACE)
    assert len(computed) == 8
    flower.collect_sum([0, 1, 2], Position(0, 1))  # recomputed in another round, since a client's data may have changed
    assert len(computed) == 11


def test_too_few_for_a_masked_sum_is_said(tmp_path: Path) -> None:
    _, flower, grid = heads.flower_engine()
    for client in range(2, 8):
        del grid.apps[heads.NODE[client]]
    with pytest.raises(NoClientResponseError, match="needs 3 clients"):
        flower.collect_sum(range(8), heads.PLACE)


def test_a_client_tells_its_masked_statistics_once_for_a_key() -> None:
    _, flower, grid = heads.flower_engine()
    flower.collect_sum(range(8), heads.PLACE)
    sent = [message for message in grid.sent if message.metadata.message_type == SEND_MASKED_STATISTICS]
    assert "already sent" in grid.answer(sent[0]).error.reason
    grid.contexts.clear()
    assert "restarted" in grid.answer(sent[1]).error.reason


def test_a_masked_client_with_another_map_is_refused_before_it_sends(tmp_path: Path) -> None:
    fed = Federation(tmp_path, heads.head_spec())
    fed.grid.trouble[heads.NODE[4]] = heads.changed(fed.grid, heads.another_map, PREPARE_STATISTICS)
    fed.serve()
    with RunReader(fed.run_folder) as reader:
        assert [(row.client, row.reason) for row in reader.rejections()] == [("client-004", "another feature map")]
    heads.sound(fed.run_folder)


@pytest.mark.usefixtures("in_words")
def test_a_masked_sum_that_no_data_can_have_is_refused_whole(tmp_path: Path) -> None:
    fed = Federation(tmp_path, heads.head_spec())

    def add(words: np.ndarray) -> np.ndarray:
        words[0] += np.uint64(1)  # sum of squares and sum of a feature now differ in parity
        return words

    fed.grid.trouble[heads.NODE[4]] = heads.changed(fed.grid, heads.words_changed(add, MASKED), SEND_MASKED_STATISTICS)
    with pytest.raises(RoundRejectedError, match="the sum of the masked statistics of 8 clients is refused"):
        fed.serve()
    # Without masks the same run identifies the client.
    fed.grid.trouble[heads.NODE[4]] = heads.changed(fed.grid, heads.words_changed(heads.first_is_negative), STATISTICS)
    fed.settings = type(fed.settings)(**(vars(fed.settings) | {"masked_statistics": False}))
    fed.serve()
    with RunReader(fed.run_folder) as reader:
        assert [row.client for row in reader.rejections()] == ["client-004"]
    heads.sound(fed.run_folder)


def test_masks_cannot_be_put_on_later(tmp_path: Path) -> None:
    fed = Federation(tmp_path, heads.head_spec(), masked_statistics=False)
    fed.serve()
    fed.settings = type(fed.settings)(**(vars(fed.settings) | {"masked_statistics": True}))
    with pytest.raises(InputError, match="same min-replies, masked-updates and masked-statistics"):
        fed.serve()


def test_the_certificate_says_that_masked_statistics_were_not_checked_one_by_one(tmp_path: Path) -> None:
    texts = {}
    for masked in (True, False):
        fed = Federation(tmp_path / str(masked), heads.head_spec(), masked_statistics=masked)
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
    _, flower, grid = heads.flower_engine(masked=False)
    data = ReadyClient("client-000", np.zeros((2, 64)), np.array([0, 1]))
    grid.apps[heads.NODE[0]] = client_app(lambda context: data, masked_only=True)
    answers = dict(flower.collect(range(8), heads.PLACE))
    assert answers[0] is None
    assert any("masked statistics only" in incident.what for incident in flower.take_incidents())


def test_with_fewer_than_three_left_a_run_goes_on_in_the_clear(tmp_path: Path) -> None:
    fed = Federation(tmp_path, heads.head_spec(data={"clients": 3, "preprocessing": "fixed"}))
    fed.serve()
    sifu.open_run(fed.run_folder).request([fed.data[0].name], "one")
    with pytest.raises(NoClientResponseError, match="masked-statistics = false"):
        fed.serve()
    heads.sound(fed.run_folder)
    fed.settings = type(fed.settings)(**(vars(fed.settings) | {"masked_statistics": False}))
    assert fed.serve() == ["one"]
    assert heads.kept_sum(fed.run_folder).digest() == heads.embedded_sum(fed.spec, fed.data[1:]).digest()
    heads.sound(fed.run_folder)
