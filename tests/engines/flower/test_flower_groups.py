"""Groups on Flower: a round of all groups shares its messages, and each group gets the same bits as alone."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flower_federation import HASTY, both_engines, small_spec
from served_runs import Federation

import sifu
from sifu.core.engine import Position, run_group_rounds
from sifu.core.replies import Wait
from sifu.engines.flower.wire import MASKED_TRAIN, PREPARE, TRAIN
from sifu.errors import InputError

GROUPS = [np.array([0, 3, 6]), np.array([1, 4, 7]), np.array([2, 5])]


def models_of(engine: object, count: int) -> list[np.ndarray]:
    return [engine.initial_model(0) + 0.01 * number for number in range(count)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("sections", [{}, {"server": {"participation": "poisson(0.6)"}, "local": {"batch": 5}}])
@pytest.mark.parametrize("masked", [False, True])
def test_groups_together_do_what_each_would_do_alone(sections: dict, masked: bool) -> None:
    spec = small_spec(data={"clients": 9}, **sections)
    groups = [*GROUPS[:2], np.array([2, 5, 8])]
    embedded, flower, grid = both_engines(spec, masked=masked)
    models = models_of(flower, 3)
    for number in range(3):
        place = Position(0, number)
        alone = [flower.run_round(model, place, group) for model, group in zip(models, groups, strict=True)]
        grid.sent.clear()
        together = run_group_rounds(flower, models, place, groups)  # type: ignore[arg-type]
        kinds = [message.metadata.message_type for message in grid.sent]
        # One batch of messages for all groups: a kind never recurs after another kind.
        assert (
            sorted(set(kinds), key=kinds.index) == ([PREPARE, MASKED_TRAIN] if masked else [TRAIN])[: len(set(kinds))]
        )
        expected = run_group_rounds(embedded, models, place, groups)  # type: ignore[arg-type]
        for joint, single, simulated in zip(together, alone, expected, strict=True):
            np.testing.assert_array_equal(joint.model, single.model)
            np.testing.assert_array_equal(joint.participants, single.participants)
            if not masked:
                np.testing.assert_array_equal(joint.drifts, single.drifts)
            if not masked or simulated.participants.size >= 3:  # a masked round of two is dropped
                np.testing.assert_allclose(joint.model, simulated.model, rtol=0, atol=1e-12)
        models = [result.model for result in together]


@pytest.mark.parametrize("masked", [False, True])
def test_one_exchange_serves_all_groups(masked: bool) -> None:
    _, flower, grid = both_engines(small_spec(data={"clients": 9}), masked=masked)
    pushes: list[int] = []
    push = grid.push_messages
    grid.push_messages = lambda messages: (pushes.append(len(messages)), push(messages))[1]  # type: ignore[method-assign]
    groups = [*GROUPS[:2], np.array([2, 5, 8])]
    run_group_rounds(flower, models_of(flower, 3), Position(0, 0), groups)  # type: ignore[arg-type]
    assert pushes == ([9, 9] if masked else [9])


def test_a_group_nobody_answers_of_stays_where_it_is_and_the_others_go_on() -> None:
    _, flower, grid = both_engines(small_spec())
    for client in (2, 5):
        del grid.apps[9000 - 7 * client]
    models = models_of(flower, 3)
    results = run_group_rounds(flower, models, Position(0, 0), GROUPS)  # type: ignore[arg-type]
    assert [result.participants.tolist() for result in results] == [[0, 3, 6], [1, 4, 7], []]
    np.testing.assert_array_equal(results[2].model, models[2])
    assert {incident.client for incident in flower.take_incidents() if incident.client} == {"client-002", "client-005"}


@pytest.mark.parametrize("masked", [False, True])
def test_a_group_closes_by_itself_so_that_nobody_of_another_decides_whose_answers_count(masked: bool) -> None:
    patience = replace(HASTY, wait=Wait.parse("60%"))  # two of three
    groups = [*GROUPS[:2], np.array([2, 5, 8])]
    for silent, reason in (([1], "late"), ([1, 4], "no answer within")):
        _, flower, grid = both_engines(small_spec(data={"clients": 9}), patience, masked=masked)
        for client in silent:
            grid.trouble[9000 - 7 * client] = lambda message: None
        results = run_group_rounds(flower, models_of(flower, 3), Position(0, 0), groups)  # type: ignore[arg-type]
        noted = [incident.what for incident in flower.take_incidents() if incident.client]
        assert len(noted) == len(silent)
        # In the second case seven of nine have answered, but too few of this group, so it keeps waiting.
        assert all(what.startswith(reason) for what in noted)
        assert [result.participants.tolist() for result in results[::2]] == [[0, 3, 6], [2, 5, 8]]


def test_a_masked_group_that_loses_somebody_is_dropped_alone() -> None:
    _, flower, grid = both_engines(small_spec(data={"clients": 9}), masked=True)
    node = 9000 - 7 * 4
    grid.trouble[node] = lambda message: None if message.metadata.message_type == MASKED_TRAIN else grid.answer(message)
    models, groups = models_of(flower, 3), [*GROUPS[:2], np.array([2, 5, 8])]
    results = run_group_rounds(flower, models, Position(0, 0), groups)  # type: ignore[arg-type]
    assert [result.participants.tolist() for result in results] == [[0, 3, 6], [], [2, 5, 8]]
    np.testing.assert_array_equal(results[1].model, models[1])


def test_a_run_with_groups_records_the_events_of_the_embedded_engine(tmp_path: Path, same_groups: None) -> None:
    spec = small_spec(
        groups={"count": 3, "rounds": 3},
        stop={"max_rounds": 6, "target": 0.0, "evaluate_every": 3},
        data={"preprocessing": "fixed"},
    )
    fed = Federation(tmp_path, spec)
    fed.serve()
    separate_rounds = [message for message in fed.grid.sent if message.metadata.message_type == TRAIN]
    assert len(separate_rounds) == 6 * 8  # every client trains once per round, in separate rounds and in joint ones
    embedded = sifu.train(spec, run=tmp_path / "embedded")
    name = fed.data[2].name
    sifu.open_run(fed.run_folder).request([name], "one", method="groups")
    assert fed.serve() == ["one"]
    embedded.forget([name], "one", method="groups")
    on_flower = sifu.open_run(fed.run_folder)
    assert on_flower.verify().problems == []
    assert [outcome.level for outcome in on_flower.outcomes()] == ["exact"]

    def kinds(run: sifu.Run) -> list[str]:
        with run.reader() as reader:
            skipped = ("clients admitted", "incidents")
            listed = [event.kind for event in reader.events() if event.kind not in skipped]
            return [kind for kind, _ in itertools.groupby(listed)]  # slow rounds are recorded in several events

    assert kinds(on_flower) == kinds(embedded)
    with on_flower.reader() as first, embedded.reader() as second:
        assert list(first.merges()) == list(second.merges())
        np.testing.assert_allclose(first.load_model(first.tip), second.load_model(second.tip), rtol=0, atol=1e-11)


@pytest.mark.parametrize(("count", "enough"), [(4, False), (2, True)])
def test_masked_groups_of_fewer_than_three_are_refused_before_training(
    tmp_path: Path, count: int, enough: bool
) -> None:
    """A masked round of two is dropped, so such a group would learn nothing and yet count in the merge."""
    spec = small_spec(groups={"count": count, "rounds": 1}, stop={"max_rounds": 2, "target": 0.0})
    fed = Federation(tmp_path, spec, masked_updates=True)
    if enough:
        fed.serve()
        assert sifu.open_run(fed.run_folder).verify().problems == []
        return
    with pytest.raises(InputError, match="a masked round needs 3: make a new run with fewer groups"):
        fed.serve()
    assert not [message for message in fed.grid.sent if message.metadata.message_type in (PREPARE, MASKED_TRAIN)]
