"""Rehearsals on Flower's messages agree with the embedded engine, and missing answers do not hold up a run."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flower_federation import small_spec
from flwr.app import Message, MetricRecord, RecordDict
from served_runs import Federation

import sifu
from sifu.engines.flower.wire import EVALUATE_SEVERAL, TRAIN
from sifu.run.rehearsal import RECOVERED, REHEARSED

AUTO = small_spec(
    data={"clients": 12, "samples_per_client": 12, "preprocessing": "fixed"}, stop={"max_rounds": 14, "target": 0.8}
)


@pytest.mark.parametrize("method", ["sifu", "noise_here"])
def test_an_automatic_sigma_is_planned_as_on_the_embedded_engine(tmp_path: Path, method: str) -> None:
    flower = Federation(tmp_path, AUTO)
    flower.serve()
    embedded = sifu.train(AUTO, run=tmp_path / "embedded")
    name = flower.data[3].name
    plan, expected = (
        run.plan([name], method=method, epsilon=30.0) for run in (sifu.open_run(flower.run_folder), embedded)
    )
    assert plan.noise_std > 0.0
    assert plan.noise_std == pytest.approx(expected.noise_std, rel=1e-9)
    assert (plan.source_node, plan.predicted_rounds, plan.predicted_interval, plan.scratch_rounds, plan.level) == (
        expected.source_node, expected.predicted_rounds, expected.predicted_interval, expected.scratch_rounds,
        expected.level,
    )  # fmt: skip
    assert [(option.depth, option.predicted_rounds, option.predicted_interval) for option in plan.options] == [
        (option.depth, option.predicted_rounds, option.predicted_interval) for option in expected.options
    ]


def test_the_rehearsal_is_one_message_to_each_client_and_says_what_the_embedded_one_says(tmp_path: Path) -> None:
    flower = Federation(tmp_path, AUTO)
    flower.serve()
    several = [message for message in flower.grid.sent if message.metadata.message_type == EVALUATE_SEVERAL]
    assert sorted(message.metadata.dst_node_id for message in several) == sorted(flower.nodes.values())
    on_flower, expected = rehearsed(flower.run_folder), rehearsed(sifu.train(AUTO, run=tmp_path / "embedded").folder)
    assert len(on_flower) == len(expected) == 3
    np.testing.assert_allclose(on_flower, expected, rtol=1e-12)


LONGER = replace(AUTO, stop=replace(AUTO.stop, max_rounds=24, target=0.0))


@pytest.mark.parametrize("masked", [False, True])
def test_rounds_are_rehearsed_as_on_the_embedded_engine(tmp_path: Path, masked: bool) -> None:
    flower = Federation(tmp_path, LONGER, masked_updates=masked)
    flower.serve()
    on_flower, expected = recovered(flower.run_folder), recovered(sifu.train(LONGER, run=tmp_path / "embedded").folder)
    assert list(on_flower) == list(expected)
    assert len(on_flower) == 4
    # Masked updates are rounded to integers.
    np.testing.assert_allclose(list(on_flower.values()), list(expected.values()), rtol=1e-5 if masked else 1e-12)
    assert sifu.open_run(flower.run_folder).verify().problems == []


@pytest.mark.parametrize("answer", ["once", "always", "wrong"])
def test_who_does_not_rehearse_rounds_holds_up_nobody(tmp_path: Path, answer: str) -> None:
    flower = Federation(tmp_path, LONGER)
    victim, late_messages = list(flower.nodes.values())[2], []

    def trouble(message: Message) -> Message | None:
        reply = flower.grid.answer(message)
        if message.metadata.message_type != TRAIN or int(message.content["config"]["round"]) < 24:  # type: ignore[call-overload, arg-type]
            return reply
        late_messages.append(message)
        if answer == "wrong":
            return Message(RecordDict({"metrics": MetricRecord({"num-examples": 3})}), reply_to=message)
        return None if answer == "always" or len(late_messages) == 2 else reply

    flower.grid.trouble[victim] = trouble
    flower.serve()
    assert late_messages
    run = sifu.open_run(flower.run_folder)
    assert run.status().phase == "ready"
    # A client missing from one of the three models makes them incomparable; missing from all three, it does no harm.
    assert len(recovered(flower.run_folder)) == (0 if answer == "once" else 4)
    assert run.plan([flower.data[3].name]).noise_std >= 0.0


def recovered(folder: Path) -> dict[tuple[str, bool], tuple[float, float, float]]:
    """Return samples, accuracy and loss after rehearsed rounds, by the number of rounds and whether noise was added."""
    reader = sifu.open_run(folder).reader()
    rows = [evaluation for evaluation in reader.evaluations() if evaluation.subset.startswith(RECOVERED)]
    reader.close()
    places = [row.subset.removeprefix(RECOVERED).split(":") for row in rows]
    return {
        (rounds, float(sigma) > 0.0): (row.samples, row.accuracy, row.loss)
        for (rounds, sigma), row in zip(places, rows, strict=True)
    }


def rehearsed(folder: Path) -> list[tuple[float, float, float, float]]:
    """Return sigma, samples, accuracy and loss of each rehearsed noise."""
    reader = sifu.open_run(folder).reader()
    rows = [evaluation for evaluation in reader.evaluations() if evaluation.subset.startswith(REHEARSED)]
    reader.close()
    return [(float(row.subset.removeprefix(REHEARSED)), row.samples, row.accuracy, row.loss) for row in rows]


@pytest.mark.parametrize("answer", ["silence", "nonsense", "too few", "not a number"])
def test_who_does_not_rehearse_holds_up_nobody(tmp_path: Path, answer: str) -> None:
    flower = Federation(tmp_path, AUTO)
    victim, everybody = list(flower.nodes.values())[2], list(flower.nodes.values())

    def trouble(message: Message) -> Message | None:
        reply = flower.grid.answer(message)
        if message.metadata.message_type != EVALUATE_SEVERAL:
            return reply
        if answer == "silence":
            return None
        records = {
            "nonsense": MetricRecord({"num-examples": 3, "loss": 0.1}),
            "too few": MetricRecord({"num-examples": [12] * 5, "correct": [1] * 5, "loss-sum": [0.0] * 5}),
            "not a number": MetricRecord({"num-examples": [math.nan] * 6, "correct": [1] * 6, "loss-sum": [0.0] * 6}),
        }
        return Message(RecordDict({"metrics": records[answer]}), reply_to=message)

    flower.grid.trouble[victim] = trouble
    flower.serve()
    assert [row[1] for row in rehearsed(flower.run_folder)] == [11 * 12] * 3
    reader = sifu.open_run(flower.run_folder).reader()
    told = [json.loads(event.payload)["incidents"] for event in reader.events() if event.kind == "incidents"]
    reader.close()
    assert [incident["client"] for many in told for incident in many] == [flower.data[2].name]
    # Even if no client rehearses, training ends and a request can be planned.
    other = Federation(tmp_path / "other", AUTO)
    other.grid.trouble = dict.fromkeys(everybody, trouble)
    flower.grid.apps = other.grid.apps
    flower.grid.contexts.clear()  # nodes keep the ledger head of the first run there, and would refuse another run
    other.serve()
    assert rehearsed(other.run_folder) == []
    assert sifu.open_run(other.run_folder).plan([other.data[3].name]).noise_std >= 0.0
