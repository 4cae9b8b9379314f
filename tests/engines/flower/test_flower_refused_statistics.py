"""Statistics and rows that no data can have are refused, and the client is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import flower_heads as heads
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message
from served_runs import Federation

from sifu.engines.flower.wire import ARRAYS, ROW_FEATURES, STATISTICS
from sifu.engines.sim import embedded_heads
from sifu.errors import InputError
from sifu.store.reader import RunReader
from sifu.theory.closed_form import Rows, Statistics, total


def rows_changed(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Message], None]:
    def edit(reply: Message) -> None:
        arrays = {name: array.numpy().copy() for name, array in reply.content[ARRAYS].items()}
        arrays[ROW_FEATURES] = change(arrays[ROW_FEATURES])
        reply.content[ARRAYS] = ArrayRecord({name: Array(array) for name, array in arrays.items()})

    return edit


def longer(features: np.ndarray) -> np.ndarray:
    features[0] = 1 << 24
    return features


def one_sample_more(words: np.ndarray) -> np.ndarray:
    words[-2] += 1
    return words


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("impossible statistics", heads.words_changed(heads.first_is_negative)),
        ("wrong samples", heads.words_changed(one_sample_more)),
        ("wrong shape", heads.words_changed(lambda words: words[:-1])),
        ("another feature map", heads.another_map),
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
        ("another feature map", heads.another_map),
    ],
)
def test_rows_that_cannot_be_are_refused_and_named(tmp_path: Path, reason: str, change: Any) -> None:
    check_refused(tmp_path, reason, change)


def test_rows_and_words_from_different_nodes_give_the_sum_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    _, flower, _ = heads.flower_engine(masked=False)
    rows = dict(flower.collect(range(8), heads.PLACE))
    monkeypatch.setattr(embedded_heads, "rows_are_smaller", lambda fixed, samples: False)
    words = dict(flower.collect(range(8), heads.PLACE))
    assert all(isinstance(sent, Rows) for sent in rows.values())
    assert all(isinstance(sent, Statistics) for sent in words.values())
    mixed = [(rows if client % 2 else words)[client] for client in range(8)]
    assert total(flower.fixed, mixed).digest() == total(flower.fixed, words.values()).digest()


def check_refused(tmp_path: Path, reason: str, change: Any) -> None:
    fed = Federation(tmp_path, heads.head_spec(), masked_statistics=False)
    fed.grid.trouble[heads.NODE[4]] = heads.changed(fed.grid, change, STATISTICS)
    fed.serve()
    with RunReader(fed.run_folder) as reader:
        assert [(row.client, row.reason, row.left_out) for row in reader.rejections()] == [("client-004", reason, True)]
    others = [client for client in fed.data if client.name != "client-004"]
    assert heads.kept_sum(fed.run_folder).digest() == heads.embedded_sum(fed.spec, others).digest()
    heads.sound(fed.run_folder)


@pytest.mark.usefixtures("in_words")
def test_a_reply_without_whole_numbers_is_no_answer(tmp_path: Path) -> None:
    _, flower, grid = heads.flower_engine(masked=False)
    grid.trouble[heads.NODE[4]] = heads.changed(
        grid, heads.words_changed(lambda words: words.astype(np.float64)), STATISTICS
    )
    answers = dict(flower.collect(range(8), heads.PLACE))
    assert [client for client, sent in answers.items() if sent is None] == [4]
    assert any("not whole numbers" in incident.what for incident in flower.take_incidents())


def test_more_samples_than_sums_have_room_for_are_refused_first() -> None:
    with pytest.raises(InputError, match="exact for at most"):
        heads.flower_engine(
            features={"kind": "none", "norm": 1400.0},
            data={"samples_per_client": 150, "preprocessing": "fixed"},
        )
