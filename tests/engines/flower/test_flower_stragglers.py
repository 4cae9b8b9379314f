"""Slow clients, and rounds in which every training fails: no round waits in vain, and no failure is silent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flower_federation import HASTY, both_engines, everyone, small_spec
from flwr.app import Error, Message
from memory_grid import MemoryGrid
from served_runs import Federation

import sifu
from sifu.core.certificate_words import words_of
from sifu.core.engine import Position
from sifu.core.replies import Wait
from sifu.engines.flower.exchange import Patience
from sifu.engines.flower.wire import TRAIN
from sifu.errors import InputError, NoClientResponseError
from sifu.theory.facts import CLOSED_EARLY

PATIENT = Patience(timeout=600.0, pause=0.0, poll=0.01)
"""Patience that does not end a test that waits for a slow client."""


class Slow:
    """Node that holds a message until it is `released`."""

    def __init__(self, grid: MemoryGrid, node: int) -> None:
        self._grid, self._messages = grid, []
        grid.trouble[node] = self._take

    def _take(self, message: Message) -> None:
        self._messages.append(message)

    def release(self) -> None:
        """Answer all held messages."""
        for message in self._messages:
            self._grid._replies[message.metadata.message_id] = self._grid.answer(message)
        self._messages = []


def test_a_round_closes_when_enough_have_answered_and_the_late_answer_is_refused() -> None:
    embedded, flower, grid = both_engines(small_spec(), replace(PATIENT, wait=Wait.parse("80%")))
    slow = Slow(grid, 9000)  # client 0
    model, others = flower.initial_model(0), np.arange(1, 8)
    first = flower.run_round(model, Position(0, 0), everyone(flower))
    assert first.participants.tolist() == others.tolist()
    [incident] = flower.take_incidents()
    assert incident.client == "client-000"
    assert incident.what.startswith("late: the answers of 7 others were enough after")

    grid.sent.clear()
    second = flower.run_round(first.model, Position(0, 1), everyone(flower))
    assert second.participants.tolist() == others.tolist()
    assert 9000 not in {message.metadata.dst_node_id for message in grid.sent}
    assert [incident.what for incident in flower.take_incidents()] == [
        "late: still busy with an earlier round, not asked"
    ]

    slow.release()
    del grid.trouble[9000]
    third = flower.run_round(second.model, Position(0, 2), everyone(flower))
    assert third.participants.tolist() == list(range(8))
    [incident] = flower.take_incidents()
    assert incident.what.startswith("late: its answer to an earlier round came")
    expected = model
    for number, present in enumerate((others, others, np.arange(8))):
        expected = embedded.run_round(expected, Position(0, number), present).model  # type: ignore[attr-defined]
    np.testing.assert_allclose(third.model, expected, rtol=0, atol=1e-12)


def test_a_time_closes_a_round_for_the_slow_alone() -> None:
    _, flower, grid = both_engines(small_spec(), replace(PATIENT, wait=Wait.parse("0.05s")))
    Slow(grid, 9000)
    result = flower.run_round(flower.initial_model(0), Position(0, 0), everyone(flower))
    assert result.participants.tolist() == list(range(1, 8))
    assert [incident.what for incident in flower.take_incidents()] == ["no answer within 0.05 s"]
    assert CLOSED_EARLY not in flower.facts.outside


def test_an_evaluation_does_not_wait_for_who_is_busy_with_a_round() -> None:
    _, flower, grid = both_engines(small_spec(), replace(PATIENT, wait=Wait.parse("7")))
    Slow(grid, 9000)
    model = flower.run_round(flower.initial_model(0), Position(0, 0), everyone(flower)).model
    evaluation = flower.evaluate(model, everyone(flower))
    assert evaluation.samples.tolist() == [0, *[12] * 7]


def test_a_round_waits_for_a_node_where_there_is_none() -> None:
    _, flower, grid = both_engines(small_spec(), replace(PATIENT, pause=0.01, absence=60.0))
    apps, looks = dict(grid.apps), []

    def nodes() -> list[int]:
        looks.append(len(grid.apps))
        if len(looks) == 3:
            grid.apps.update(apps)
        return list(grid.apps)

    grid.apps.clear()
    grid.get_node_ids = nodes  # type: ignore[method-assign]
    result = flower.run_round(flower.initial_model(0), Position(0, 0), everyone(flower))
    assert result.participants.size == 8
    assert looks[:2] == [0, 0]
    assert flower.take_incidents() == []


@pytest.mark.parametrize(("wait", "level"), [("all", "proven"), ("30s", "proven"), ("80%", "conditional")])
def test_closing_early_couples_clients_and_is_an_assumption(tmp_path: Path, wait: str, level: str) -> None:
    spec = small_spec(data={"preprocessing": "fixed"}, privacy={"sigma": 0.2}, server={"wait": wait})
    fed = Federation(tmp_path, spec)
    fed.serve()
    run = sifu.open_run(fed.run_folder)
    plan = run.plan(["client-003"], method="sifu")
    assert plan.level == level
    run.request(["client-003"], request="leaves", method="sifu")
    fed.serve(level="none")
    premises = words_of(run.certificate("leaves").body).premises
    schedule = [premise.statement for premise in premises if premise.name == "schedule"]
    assert bool(schedule) == (level == "conditional")
    assert all("before the slowest clients have answered" in statement for statement in schedule)
    assert run.verify().problems == []


@pytest.mark.parametrize("wait", ["", "0", "-1", "120%", "0s", "many", "3.5", "9" * 5000])
def test_what_cannot_be_waited_for_is_refused(wait: str) -> None:
    with pytest.raises(InputError, match=r"server.wait must be all, a share such as 80%"):
        small_spec(server={"wait": wait})


def test_waiting_is_for_flower(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"server\.wait = '80%' is only for Flower"):
        sifu.train(small_spec(server={"wait": "80%"}), run=tmp_path / "run")


class FailingTraining:
    """Nodes whose training fails, while everything else works, until `mended`."""

    def __init__(self, grid: MemoryGrid) -> None:
        self._grid, self.rounds, self.mended = grid, 0, False
        for node in grid.apps:
            grid.trouble[node] = self._answer

    def _answer(self, message: Message) -> Message:
        if message.metadata.message_type == TRAIN and not self.mended:
            return Message(Error(2, "CUDA out of memory"), reply_to=message)
        return self._grid.answer(message)


def test_rounds_in_which_every_training_fails_stop_the_run_with_the_clients_own_error(tmp_path: Path) -> None:
    fed = Federation(tmp_path, small_spec(stop={"max_rounds": 8, "target": 0.0}))
    failing = FailingTraining(fed.grid)
    with pytest.raises(NoClientResponseError, match=r"5 rounds in a row were lost.*client-000: error 2: CUDA out"):
        fed.serve()
    run = sifu.open_run(fed.run_folder)
    status = run.status()
    assert status.phase == "training"
    assert any("CUDA out of memory" in incident["what"] for incident in status.incidents)

    failing.mended = True
    fed.serve()
    with run.reader() as reader:
        rounds = [node for node in reader.nodes() if node.kind == "round"]
    counted = [node for node in rounds if node.regularity.total_samples > 0]
    assert len(counted) == 8  # the five lost rounds do not count towards max_rounds
    assert len(rounds) == 13
    assert run.status().phase == "ready"
    assert run.verify().problems == []
    fed.serve()  # nor do they when the run is opened again
    with run.reader() as reader:
        assert len([node for node in reader.nodes() if node.kind == "round"]) == 13


def test_status_counts_how_often_a_client_was_late(tmp_path: Path) -> None:
    fed = Federation(tmp_path, small_spec(server={"wait": "7"}, stop={"max_rounds": 6, "target": 0.0}))

    def becomes_slow() -> None:
        Slow(fed.grid, fed.nodes["client-002"])

    fed.serve({("training", 2): becomes_slow}, patience=replace(HASTY, timeout=600.0))
    assert sifu.open_run(fed.run_folder).status().late == {"client-002": 4}
