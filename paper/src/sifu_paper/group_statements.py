"""What we expected of groups that merge, and what the experiment `groups` measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from sifu.plots.style import byte_size
from sifu_paper.group_trials import MERGES
from sifu_paper.plots.group_cases import (
    USUAL_STRETCH,
    Case,
    FirstTraining,
    Task,
    case_by_rule,
    cases_of,
    first_trainings_of,
    sequences_of,
)
from sifu_paper.plots.speed import times
from sifu_paper.reading import title_of
from sifu_paper.table import Row
from sifu_paper.verdict import Statement, Verdict

MAIN = ("cifar10", "fashion_mnist")
MAIN_PARTITIONS = ("iid", "dirichlet-0.3")
MAIN_GROUPS = 10
FIFTH = "poisson(0.2)"
RESIDUAL = "resnet_small"
MERGE_NAMES = {"aligned": "units put in order first", "tree": "two and two, in a tree"}
MISSED = "reason and what was tried: paper/README.md, groups"


def task_name(task: Task) -> str:
    """As the statements name it; how many take part is told apart from it."""
    partition = "" if task.partition == "identity" else f" {task.partition.replace('-', ' ', 1)}"
    network = f", {task.model}" if task.model else ""
    count = "" if task.clients == "100" else f", {task.clients} clients"
    return f"{title_of(task.dataset)}{partition.replace('dirichlet', 'Dirichlet')}{network}{count}"


def _main_tasks(rows: Sequence[Row], participation: str, model: str = "") -> list[Task]:
    tasks = {case.task: None for case in cases_of(rows)}
    return [
        task
        for task in tasks
        if task.dataset in MAIN
        and task.partition in MAIN_PARTITIONS
        and task.participation == participation
        and task.clients == "100"
        and task.model == model
    ]


def by_rule(rows: Sequence[Row], leavers: int = 1, participation: str = "all", model: str = "") -> list[Case]:
    """What the rule for groups gives on each of the main tasks, with the data sets' own networks or with `model`."""
    return [
        case
        for task in _main_tasks(rows, participation, model)
        if (case := case_by_rule(cases_of(rows), task, leavers))
    ]


def by_rule_trainings(rows: Sequence[Row], participation: str = "all", model: str = "") -> list[FirstTraining]:
    """First trainings of the same groups on the main tasks."""
    return trainings_of(by_rule(rows, participation=participation, model=model), rows)


def trainings_of(cases: Sequence[Case], rows: Sequence[Row]) -> list[FirstTraining]:
    """The first trainings of these cases."""
    settings = [(case.task, case.groups, case.apart, case.stretch) for case in cases]
    return [
        first
        for first in first_trainings_of(rows)
        if (first.task, first.groups, first.apart, first.stretch) in settings
    ]


def cases_elsewhere(rows: Sequence[Row]) -> list[Case]:
    """One leaver with groups as the rule makes them, on every task that no other statement is about."""
    main = {task for share in ("all", FIFTH) for task in _main_tasks(rows, share)}
    tasks = {case.task: None for case in cases_of(rows) if case.task not in main and case.task.model != RESIDUAL}
    return [case for task in tasks if (case := case_by_rule(cases_of(rows), task, 1))]


def cases_everywhere(rows: Sequence[Row]) -> list[Case]:
    """One leaver with groups as the rule makes them, on every task."""
    return [*by_rule(rows), *by_rule(rows, participation=FIFTH), *cases_elsewhere(rows)]


def saves_half(case: Case) -> bool:
    """Whether every run got there, in half of Scratch's rounds or fewer in the median."""
    return _holds(case, 2.0)


def full_name(task: Task) -> str:
    """A task as figures and tables name it."""
    return task.label({task.dataset: title_of(task.dataset)})


def first_training_words(trainings: Sequence[FirstTraining]) -> str:
    """How the first training with groups ends, against plain training of the same length."""
    points = [100 * first.difference for first in trainings]
    return f"differs by {min(points):+.1f} to {max(points):+.1f} points of test accuracy from plain training"


def _at_least(
    leavers: int,
    least: Callable[[Task], float],
    participation: str = "all",
    enough: int | None = None,
    model: str = "",
) -> Callable[[Sequence[Row]], Verdict | None]:
    def check(rows: Sequence[Row]) -> Verdict | None:
        cases = by_rule(rows, leavers, participation, model)
        if len(cases) < (enough or 1):
            return None
        held = sum(_holds(case, least(case.task)) for case in cases)
        same = held >= (len(cases) if enough is None else enough)
        seeds = min(len(case.requests) for case in cases)
        measured = "; ".join(
            f"{task_name(case.task)} {case.speed.text()}{', plain mean' if case.stretch == 1.0 else ''}"
            for case in cases
        )
        return Verdict(f"{measured} ({seeds} seeds)", same, "" if same else MISSED)

    return check


def _holds(case: Case, least: float) -> bool:
    speed = case.speed
    return speed.complete and speed.median is not None and speed.median >= least - 1e-9


def _first_training(participation: str = "all", model: str = "") -> Callable[[Sequence[Row]], Verdict | None]:
    def check(rows: Sequence[Row]) -> Verdict | None:
        trainings = by_rule_trainings(rows, participation, model)
        if not trainings:
            return None
        same = all(first.difference >= -0.01 for first in trainings)
        measured = ", ".join(f"{task_name(first.task)} {100 * first.difference:+.1f} points" for first in trainings)
        return Verdict(f"median difference: {measured}", same, "" if same else MISSED)

    return check


def _other_merges(rows: Sequence[Row]) -> Verdict | None:
    """Requests by other merges beside the same requests by the mean that is moved on alike."""
    parts, same = [], False
    for way in MERGES[1:]:
        rounds = [pair for case in cases_of(rows, (way,)) for pair in _beside_the_mean(rows, case)]
        if not rounds:
            continue
        fewer, more = sum(own < mean for own, mean in rounds), sum(own > mean for own, mean in rounds)
        same = same or fewer > more
        parts.append(f"{MERGE_NAMES[way]}: fewer rounds in {fewer}, more in {more} of {len(rounds)} requests")
    return Verdict("; ".join(parts), same, "" if same else "the mean stays") if parts else None


def _beside_the_mean(rows: Sequence[Row], case: Case) -> list[tuple[float, float]]:
    """Rounds of each of a case's requests, and those of the mean; infinite where the target was not reached."""

    def rounds_of(some: Case) -> dict[int, float]:
        return {request.seed: request.rounds if request.reached else math.inf for request in some.requests}

    alike = replace(case, merge="mean", requests=())
    beside = next((rounds_of(other) for other in cases_of(rows) if replace(other, requests=()) == alike), {})
    return [(own, beside[seed]) for seed, own in rounds_of(case).items() if seed in beside]


def _elsewhere(rows: Sequence[Row]) -> Verdict | None:
    """One leaver on every task that is not one of the main ones."""
    cases = cases_elsewhere(rows)
    if not cases:
        return None
    paying = sum(saves_half(case) for case in cases)
    measured = "; ".join(f"{full_name(case.task)}: {case.speed.text()}" for case in cases)
    return Verdict(f"{measured} ({paying} of {len(cases)} by half)", paying == len(cases), "")


def _sequences(rows: Sequence[Row]) -> Verdict | None:
    sequences = [
        sequence for sequence in sequences_of(rows) if (sequence.rebuild, sequence.stretch) == ("now", USUAL_STRETCH)
    ]
    if not sequences:
        return None
    measured = ", ".join(
        f"{task_name(sequence.task)} {times(sequence.ratio)}x ({len(sequence.ratios)} seeds)" for sequence in sequences
    )
    same = all(sequence.ratio >= 2.0 for sequence in sequences)
    return Verdict(f"Scratch's client-rounds over theirs, median over seeds: {measured}", same, "" if same else MISSED)


def _storage(rows: Sequence[Row]) -> Verdict | None:
    kept = {
        row["dataset"]: row["bytes_kept"]
        for row in rows
        if row["method"] == "groups" and row["request"] == 0 and f"groups={MAIN_GROUPS} " in row["variant"]
    }
    if not kept:
        return None
    return Verdict(", ".join(f"{title_of(name)} {byte_size(size)}" for name, size in kept.items()), None)


def _more_on_easy(task: Task) -> float:
    return 8.0 if (task.dataset, task.partition) == ("fashion_mnist", "iid") else 4.0


GROUP_STATEMENTS = (
    Statement(
        "ten groups, everyone takes part: one leaver is at least 4 times cheaper than Scratch, 8 times on "
        "FashionMNIST iid",
        "groups", _at_least(1, _more_on_easy), ours=True,
    ),
    Statement(
        "ten groups, everyone takes part: five leavers at once are at least 3 times cheaper than Scratch",
        "groups", _at_least(5, lambda task: 3.0), ours=True,
    ),
    Statement(
        "a fifth takes part: one leaver is at least 3 times cheaper than Scratch on three of four tasks",
        "groups", _at_least(1, lambda task: 3.0, FIFTH, enough=3), ours=True,
    ),
    Statement(
        "the first training with ten groups ends at most one point of test accuracy below plain FedAvg of the same "
        "client-rounds",
        "groups", _first_training(), ours=True,
    ),
    Statement(
        "a fifth takes part: so does the first training with five groups",
        "groups", _first_training(FIFTH), ours=True,
    ),
    Statement(
        "a small residual network, everyone takes part: one leaver is at least 4 times cheaper than Scratch",
        "groups", _at_least(1, lambda task: 4.0, model=RESIDUAL), ours=True,
    ),
    Statement(
        "a small residual network: five leavers at once are at least 3 times cheaper",
        "groups", _at_least(5, lambda task: 3.0, model=RESIDUAL), ours=True,
    ),
    Statement(
        "a small residual network: the first training ends at most one point below plain FedAvg",
        "groups", _first_training(model=RESIDUAL), ours=True,
    ),
    Statement(
        "other merges take fewer rounds than the mean that is moved on",
        "groups", _other_merges, ours=True,
    ),
    Statement(
        "elsewhere, by the rule for groups, one leaver saves half of Scratch's rounds",
        "groups", _elsewhere, ours=True,
    ),
    Statement(
        "ten requests in a row with rebuilding cost at most half of Scratch's client-rounds, rebuilding counted",
        "groups", _sequences, ours=True,
    ),
    Statement("ten groups keep ten models", "groups", _storage, ours=True),
)  # fmt: skip
