"""What we expected of groups that merge, and what the experiment `groups` measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sifu.core.spec.group_rule import number_of_groups, rounds_apart
from sifu.experiments.group_trials import USUAL_STRETCH
from sifu.experiments.reading import title_of
from sifu.experiments.statements import Statement, Verdict
from sifu.experiments.table import Row
from sifu.plots.group_cases import Case, Task, cases_of, first_trainings_of, sequences_of
from sifu.plots.style import byte_size
from sifu.theory.participation import Participation

MAIN = ("cifar10", "fashion_mnist")
MAIN_PARTITIONS = ("iid", "dirichlet-0.3")
MAIN_GROUPS = 10
FIFTH = "poisson(0.2)"
MISSED = "reason and what was tried: docs/experiments.md, groups"


def _name(task: Task) -> str:
    return f"{title_of(task.dataset)} {task.partition.replace('-', ' ', 1).replace('dirichlet', 'Dirichlet')}"


def _main_tasks(rows: Sequence[Row], participation: str) -> list[Task]:
    tasks = {case.task: None for case in cases_of(rows)}
    return [
        task
        for task in tasks
        if task.dataset in MAIN
        and task.partition in MAIN_PARTITIONS
        and task.participation == participation
        and task.clients == "100"
    ]


def _by_rule(rows: Sequence[Row], task: Task, leavers: int) -> Case | None:
    """Groups as the rule makes them, merged with the usual stretch; of the rounds apart that were tried the nearest."""
    rate = Participation.parse(task.participation).rate
    groups = number_of_groups(int(task.clients), rate)
    cases = [
        case
        for case in cases_of(rows)
        if (case.task, case.leavers, case.groups, case.stretch) == (task, leavers, groups, USUAL_STRETCH)
    ]
    return min(cases, key=lambda case: abs(case.apart - rounds_apart(case.length, rate)), default=None)


def _sentence(case: Case) -> str:
    missed = len(case.requests) - case.reached
    text = f"{_name(case.task)} {case.rounds:g} of {case.scratch:g} ({case.share:.2f})"
    return text + (f", {missed} of {len(case.requests)} seeds never" if missed else "")


def _at_most(participation: str, leavers: int, limit: Callable[[Task], float], enough: int | None = None):  # type: ignore[no-untyped-def]
    def check(rows: Sequence[Row]) -> Verdict | None:
        cases = [case for task in _main_tasks(rows, participation) if (case := _by_rule(rows, task, leavers))]
        if not cases:
            return None
        held = sum(case.share <= limit(case.task) for case in cases)
        same = held >= (len(cases) if enough is None else enough)
        measured = "; ".join(map(_sentence, cases))
        seeds = min(len(case.requests) for case in cases)
        return Verdict(f"median rounds of Scratch's, {seeds} seeds: {measured}", same, "" if same else MISSED)

    return check


def _first_training(rows: Sequence[Row]) -> Verdict | None:
    cases = [case for task in _main_tasks(rows, "all") if (case := _by_rule(rows, task, 1))]
    settings = [(case.task, case.groups, case.apart, case.stretch) for case in cases]
    trainings = [
        first
        for first in first_trainings_of(rows)
        if (first.task, first.groups, first.apart, first.stretch) in settings
    ]
    if not trainings:
        return None
    same = all(first.difference >= -0.01 for first in trainings)
    measured = ", ".join(f"{_name(first.task)} {100 * first.difference:+.1f} points" for first in trainings)
    return Verdict(f"median difference: {measured}", same, "" if same else MISSED)


def _sequences(rows: Sequence[Row]) -> Verdict | None:
    sequences = [
        sequence for sequence in sequences_of(rows) if (sequence.rebuild, sequence.stretch) == ("now", USUAL_STRETCH)
    ]
    if not sequences:
        return None
    measured = ", ".join(
        f"{_name(sequence.task)} {sequence.share:.2f} ({len(sequence.shares)} seeds)" for sequence in sequences
    )
    same = all(sequence.share <= 0.5 for sequence in sequences)
    return Verdict(f"client-rounds over Scratch's, median over seeds: {measured}", same, "" if same else MISSED)


def _storage(rows: Sequence[Row]) -> Verdict | None:
    kept = {
        row["dataset"]: row["bytes_kept"]
        for row in rows
        if row["method"] == "groups" and row["request"] == 0 and f"groups={MAIN_GROUPS} " in row["variant"]
    }
    if not kept:
        return None
    return Verdict(", ".join(f"{title_of(name)} {byte_size(size)}" for name, size in kept.items()), None)


def _eighth_on_easy(task: Task) -> float:
    return 0.125 if (task.dataset, task.partition) == ("fashion_mnist", "iid") else 0.25


GROUP_STATEMENTS = (
    Statement(
        "ten groups, everyone takes part: one leaver costs at most a quarter of Scratch's rounds, an eighth on "
        "FashionMNIST iid",
        "groups", _at_most("all", 1, _eighth_on_easy), ours=True,
    ),
    Statement(
        "ten groups, everyone takes part: five leavers at once cost at most a third of Scratch's rounds",
        "groups", _at_most("all", 5, lambda task: 1 / 3), ours=True,
    ),
    Statement(
        "a fifth takes part: one leaver costs at most a third of Scratch's rounds on three of four tasks",
        "groups", _at_most(FIFTH, 1, lambda task: 1 / 3, enough=3), ours=True,
    ),
    Statement(
        "the first training with ten groups ends at most one point of test accuracy below plain FedAvg of the same "
        "client-rounds",
        "groups", _first_training, ours=True,
    ),
    Statement(
        "ten requests in a row with rebuilding cost at most half of Scratch's client-rounds, rebuilding counted",
        "groups", _sequences, ours=True,
    ),
    Statement("ten groups keep ten models", "groups", _storage, ours=True),
)  # fmt: skip
