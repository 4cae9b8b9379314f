"""Rounds at which accuracy is measured: every few rounds, or by the rule in the code of the paper's authors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import sifu
from run_tools import small_spec
from sifu.core.round_stream import is_evaluated
from sifu.core.spec import Spec, StopSpec
from sifu.errors import InputError
from sifu.run.training import Progress
from sifu.store.reader import RunReader

AUTHORS = StopSpec(target=0.9, max_rounds=60, evaluation="authors")


@pytest.mark.parametrize(
    ("accuracy", "every"),
    [
        (None, 20),
        (0.84, 20),
        (0.85, 10),
        (0.874, 10),
        (0.875, 5),
        (0.889, 5),
        (0.89, 2),
        (0.894, 2),
        (0.895, 1),
        (0.99, 1),
    ],
)
def test_how_often_is_the_authors_rule(accuracy: float | None, every: int) -> None:
    assert [rounds for rounds in range(1, 60) if is_evaluated(AUTHORS, rounds, accuracy)] == list(
        range(every, 60, every)
    )
    assert is_evaluated(AUTHORS, 60, accuracy)  # the last round is always evaluated


def test_without_a_target_it_is_every_twenty_rounds() -> None:
    rule = replace(AUTHORS, target=0.0)
    assert [rounds for rounds in range(60) if is_evaluated(rule, rounds, 0.99)] == [0, 20, 40]


def test_the_fixed_rule_does_not_look_at_accuracy() -> None:
    rule = StopSpec(target=0.9, max_rounds=60, evaluate_every=7)
    for accuracy in (None, 0.1, 0.899):
        looked = [rounds for rounds in range(61) if is_evaluated(rule, rounds, accuracy)]
        assert looked == [0, 7, 14, 21, 28, 35, 42, 49, 56, 60]


def evaluated_rounds(folder: Path) -> tuple[list[int], list[float]]:
    with RunReader(folder) as reader:
        places = reader.nodes_by_number()
        rows = [row for row in reader.evaluations() if row.subset == "active" and places[row.node].branch == 0]
        return [places[row.node].position for row in rows], [row.accuracy for row in rows]


def test_a_run_follows_the_rule_and_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    spec = small_spec(stop={"target": 0.95, "max_rounds": 60, "evaluation": "authors"})
    sifu.train(spec, run=tmp_path / "whole")
    rounds, accuracies = evaluated_rounds(tmp_path / "whole")
    expected, latest, at = [0], accuracies[0], 0
    while at < rounds[-1]:
        at = next(later for later in range(at + 1, 61) if is_evaluated(Spec.from_mapping(spec).stop, later, latest))
        expected.append(at)
        latest = accuracies[len(expected) - 1]
    assert rounds == expected
    assert accuracies[-1] >= 0.95
    assert rounds[:5] == [0, 20, 25, 26, 28]

    def interrupt(progress: Progress) -> None:
        if progress.rounds == 27:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sifu.train(spec, run=tmp_path / "halves", progress=interrupt)
    sifu.train(spec, run=tmp_path / "halves")
    assert evaluated_rounds(tmp_path / "halves") == (rounds, accuracies)


def test_other_words_are_refused() -> None:
    with pytest.raises(InputError, match=r"stop\.evaluation must be one of fixed, authors"):
        Spec.from_mapping({"stop": {"evaluation": "often"}})
