"""Rows of the experiment `groups` for figures and tables: a task with its groups, against Scratch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sifu.core.spec.run_spec import number_of_groups, separate_rounds
from sifu.core.spec.sections import GroupsSpec
from sifu.theory.participation import Participation
from sifu_paper.plots.courses import Row
from sifu_paper.plots.speed import SpeedUp

USUAL_STRETCH = GroupsSpec().stretch
"""Default stretch of a merge."""


MAIN_DATASETS = ("cifar10", "fashion_mnist")
MAIN_PARTITIONS = ("iid", "dirichlet-0.3")


@dataclass(frozen=True)
class Task:
    """Data set, partition, participation, number of clients, and model of a training."""

    dataset: str
    partition: str
    participation: str
    clients: str
    model: str = ""
    """Name of the network, if it is not the data set's own."""

    def label(self, titles: dict[str, str]) -> str:
        """Return the label of the task in a figure."""
        share = {"all": "all take part"}.get(self.participation, self.participation)
        if share.startswith("poisson("):
            share = f"{100 * float(share[8:-1]):g} % a round"
        partition = self.partition.replace("-", " ", 1).replace("dirichlet", "Dirichlet")
        count = "" if self.clients == "100" else f", {self.clients} clients"
        network = f" ({self.model})" if self.model else ""
        return f"{titles.get(self.dataset, self.dataset)}{network}, {partition}, {share}{count}"


@dataclass(frozen=True)
class Request:
    """Request of one seed: its rounds, whether it reached the accuracy, and Scratch's rounds to the same accuracy."""

    seed: int
    rounds: int
    reached: bool
    scratch: int

    @property
    def ratio(self) -> float:
        """Ratio of Scratch's rounds to its own."""
        return self.scratch / self.rounds if self.rounds else math.inf


@dataclass(frozen=True)
class Case:
    """Groups of one number and one length on one task, with one number of leavers; trainings have `length` rounds."""

    task: Task
    groups: int
    separate: int
    stretch: float
    leavers: int
    length: int
    merge: str
    """Merge of the models: their mean, or another method."""
    requests: tuple[Request, ...]

    @property
    def main(self) -> bool:
        """True for the four tasks with all settings: everyone takes part, 100 clients, the data set's usual network."""
        task = self.task
        usual = task.participation == "all" and task.clients == "100" and not task.model
        return usual and task.dataset in MAIN_DATASETS and task.partition in MAIN_PARTITIONS

    @property
    def speed(self) -> SpeedUp:
        """Speed-up over Scratch."""
        ratios = tuple(request.ratio for request in self.requests if request.reached)
        return SpeedUp(ratios, len(self.requests), len(self.requests) - len(ratios))

    @property
    def rounds(self) -> float | None:
        """Median rounds of the requests that reached the accuracy."""
        rounds = [request.rounds for request in self.requests if request.reached]
        return statistics.median(rounds) if rounds else None

    @property
    def scratch(self) -> float:
        """Median of Scratch's rounds."""
        return statistics.median(request.scratch for request in self.requests)


@dataclass(frozen=True)
class FirstTraining:
    """Difference in test accuracy between the first training with groups and plain training, by seed."""

    task: Task
    groups: int
    separate: int
    stretch: float
    differences: tuple[float, ...]

    @property
    def difference(self) -> float:
        """Median difference."""
        return statistics.median(self.differences)


@dataclass(frozen=True)
class RequestSequence:
    """Sequence of single requests: ratio of Scratch's client-rounds to its own, including rebuilding, by seed."""

    task: Task
    groups: int
    separate: int
    stretch: float
    rebuild: str
    requests: int
    ratios: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median ratio."""
        return statistics.median(self.ratios)


def settings_of(row: Row) -> dict[str, str]:
    """Return the settings in a row's variant."""
    return dict(part.split("=", 1) for part in row["variant"].split())


def task_of(row: Row) -> Task:
    """Return the task of a row."""
    settings = settings_of(row)
    return Task(
        row["dataset"], settings["partition"], settings["participation"], settings["clients"], settings.get("model", "")
    )


def _setting_of(task: Task, settings: dict[str, str]) -> tuple[Task, int, int, float]:
    """Return a task with its groups: their number, their separate rounds, and the stretch of their merge."""
    return task, int(settings["groups"]), int(settings["apart"]), float(settings.get("stretch", 1))


def cases_of(rows: Sequence[Row], merges: Sequence[str] = ("mean",)) -> list[Case]:
    """Return single requests with groups, in the order of the table, except those whose groups were all hit."""
    scratch = {(task_of(row), row["seed"], row["leavers"]): row["rounds"] for row in rows if row["method"] == "scratch"}
    requests_of: dict[tuple[Task, int, int, float, int, int, str], list[Request]] = {}
    for row in rows:
        settings = settings_of(row)
        if row["method"] != "groups" or row["request"] != 1 or "rebuild" in settings or not row["groups_left"]:
            continue
        task, merge = task_of(row), settings.get("merge", "mean")
        if merge not in merges:
            continue
        key = (*_setting_of(task, settings), row["leavers"], row["length"], merge)
        scratch_rounds = scratch[task, row["seed"], row["leavers"]]
        requests_of.setdefault(key, []).append(Request(row["seed"], row["rounds"], row["reached"], scratch_rounds))
    return [Case(*key, tuple(requests)) for key, requests in requests_of.items()]


def case_by_rule(cases: Sequence[Case], task: Task, leavers: int) -> Case | None:
    """Return groups by the default rule (`sifu.core.spec.run_spec`), with the closest tried number of separate rounds.

    Merges have the default stretch, or are plain means if that was not tried.
    """
    rate = Participation.parse(task.participation).rate
    groups = number_of_groups(int(task.clients), rate)
    own = [case for case in cases if (case.task, case.leavers, case.groups) == (task, leavers, groups)]
    stretch = USUAL_STRETCH if any(case.stretch == USUAL_STRETCH for case in own) else 1.0
    own = [case for case in own if case.stretch == stretch]
    return min(own, key=lambda case: abs(case.separate - separate_rounds(case.length, rate)), default=None)


def cases_by_rule(rows: Sequence[Row], leavers: int = 1) -> list[Case]:
    """Return groups by the default rule, on every task."""
    cases = cases_of(rows)
    tasks = {case.task: None for case in cases}
    return [case for task in tasks if (case := case_by_rule(cases, task, leavers))]


def first_trainings_of(rows: Sequence[Row]) -> list[FirstTraining]:
    """Compare first trainings with groups with plain ones of the same length."""
    plain = {(task_of(row), row["seed"], row["length"]): row["accuracy"] for row in rows if row["method"] == "plain"}
    differences: dict[tuple[Task, int, int, float], list[float]] = {}
    for row in rows:
        if row["method"] == "groups" and row["request"] == 0:
            settings, task = settings_of(row), task_of(row)
            plain_accuracy = plain[task, row["seed"], row["length"]]
            differences.setdefault(_setting_of(task, settings), []).append(row["accuracy"] - plain_accuracy)
    return [FirstTraining(*key, tuple(values)) for key, values in differences.items()]


def sequences_of(rows: Sequence[Row]) -> list[RequestSequence]:
    """Return the complete sequences."""
    rows_of: dict[tuple[Task, int, int, float, str], dict[int, list[Row]]] = {}
    for row in rows:
        settings = settings_of(row)
        if row["method"] == "groups" and "rebuild" in settings:
            key = (*_setting_of(task_of(row), settings), settings["rebuild"])
            rows_of.setdefault(key, {}).setdefault(row["seed"], []).append(row)
    longest = max((len(own) for seeds in rows_of.values() for own in seeds.values()), default=0)
    result = []
    for key, seeds in rows_of.items():
        ratios = []
        for own in seeds.values():
            spent = sum(row["client_rounds"] + row["rebuild_client_rounds"] for row in own)
            if len(own) == longest:
                scratch = sum(row["scratch_client_rounds"] for row in own)
                ratios.append(scratch / spent if spent else math.inf)
        if ratios:
            result.append(RequestSequence(*key, longest, tuple(ratios)))
    return result
