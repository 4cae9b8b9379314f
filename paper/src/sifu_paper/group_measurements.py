"""Measurements of one trial of the experiment `groups`: rounds until the test accuracy is within one point of Scratch.

Scratch's final accuracy is the mean of its last five evaluations on the test set. The rounds of
a method, and of Scratch too, are counted until an evaluation is first at most one point below it. Everything runs on
the engine, without a run on disk; rounds, groups and merges are the same as in a run.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sifu.core.engine import Engine, Position
from sifu.core.layout import Vector
from sifu.core.round import keyed_generator
from sifu.core.round_stream import RoundsWanted, stream_group_rounds
from sifu.core.spec import StopSpec
from sifu.theory.merging import members_by_group, merge, move_on
from sifu.theory.participation import ClientIndices
from sifu_paper.aligned_models import align
from sifu_paper.group_trials import TEST_CLIENT, GroupTrial, grouping_key
from sifu_paper.table import Row
from sifu_paper.work import variant_text

LAST_LOOKS = 5
"""The final accuracy of a training is the mean of this many last evaluations."""
WITHIN = 0.01
"""One point of test accuracy."""
STAGE = 20
"""Number of recovery rounds that the engine gets at once."""
TREE_ROUNDS = 2
"""Rounds that the members of two merged groups train before the next merge."""
MEASURED_AFTER = (1, 5, 10)
"""Requests of a sequence after which Scratch is measured; the others are interpolated."""

NO_CLIENTS = np.zeros(0, dtype=np.int64)

Looks = list[tuple[int, float]]
"""Pairs of rounds so far and test accuracy."""


@dataclass(frozen=True)
class Training:
    """Evaluated training: its test accuracies, the client-rounds up to each, and its last model."""

    looks: Looks
    client_rounds: Mapping[int, int]
    model: Vector

    @property
    def end(self) -> float:
        """Final test accuracy."""
        return statistics.fmean(accuracy for _, accuracy in self.looks[-LAST_LOOKS:])

    def reaches(self, target: float) -> int | None:
        """Return the first evaluated round that reaches `target`."""
        return next((rounds for rounds, accuracy in self.looks if accuracy >= target), None)


@dataclass(frozen=True)
class Yardstick:
    """Cost of one request by Scratch: the accuracy to reach, and its rounds and client-rounds until then."""

    target: float
    rounds: float
    client_rounds: float


@dataclass(frozen=True)
class Start:
    """Merge at which common rounds start, and the cost of making it."""

    model: Vector
    rounds: int = 0
    client_rounds: int = 0


class GroupMeasurement:
    """Measurements of one trial on one engine; rows are passed to `add` as soon as they are known."""

    def __init__(self, trial: GroupTrial, engine: Engine, experiment: str, add: Callable[[Row], None]) -> None:
        self.trial, self.engine, self.experiment, self.add = trial, engine, experiment, add
        names = [client.name for client in engine.clients]
        training = [number for number, name in enumerate(names) if not name.startswith(TEST_CLIENT)]
        self._names = names
        self._samples = [client.samples for client in engine.clients]
        self._everyone = np.array(training, dtype=np.int64)
        self._test = np.arange(len(training), len(names), dtype=np.int64)
        self._order = keyed_generator(trial.seed, "requests", 0).permutation(len(training))
        self._fresh = engine.initial_model(0)
        self._bytes = self._fresh.nbytes
        self._started = time.monotonic()

    def run(self) -> None:
        """Run all measurements of the trial."""
        trial = self.trial
        sizes = sorted({*trial.leavers, *(k for k in MEASURED_AFTER if k <= trial.requests)})
        yardsticks = self._train_without_groups(sizes)
        for count in trial.groups:
            models = self._separate(count)
            for rounds in trial.rounds:
                self._with_groups(count, rounds, models[rounds], yardsticks)
            if trial.requests and count == trial.groups[0]:
                for rebuild in trial.rebuild:
                    self._sequence(count, trial.rounds[0], models[trial.rounds[0]], rebuild, yardsticks)

    # -- without groups ------------------------------------------------------------------------------------------

    def _train_without_groups(self, sizes: Sequence[int]) -> dict[int, Yardstick]:
        """Train everyone without groups, and Scratch for each number of leavers."""
        stay = [self._without(self._leavers(size)) for size in sizes]
        starts = [self._fresh, *(self.engine.initial_model(1 + place) for place in range(len(sizes)))]
        plain, *anew = self._trained(starts, Position(0, 0), [self._everyone, *stay], self.trial.length)
        self._row("plain", 0, 0, {}, accuracy=plain.end, rounds=self.trial.length, client_rounds=_last(plain))
        yardsticks = {}
        for size, scratch in zip(sizes, anew, strict=True):
            target = scratch.end - WITHIN
            reached = scratch.reaches(target) or self.trial.length
            yardsticks[size] = Yardstick(target, reached, scratch.client_rounds[reached])
            self._row(
                "scratch", 0, size, {}, accuracy=scratch.end, target=target, rounds=reached, reached=True,
                client_rounds=scratch.client_rounds[reached],
            )  # fmt: skip
        return yardsticks

    # -- with groups ---------------------------------------------------------------------------------------------

    def _separate(self, count: int) -> dict[int, list[Vector]]:
        """Return the groups' models after each of the trial's numbers of separate rounds."""
        members = self._members(count, self._everyone)
        last = max(self.trial.rounds)
        wanted = RoundsWanted(StopSpec(0.0, 0, last, 2**40), self._fresh.astype(np.float64), evaluated=NO_CLIENTS)
        kept: dict[int, list[Vector]] = {}
        rounds = stream_group_rounds(self.engine, [self._fresh] * count, Position(0, 0), members, wanted)
        for number, together in enumerate(rounds, start=1):
            if number in self.trial.rounds:
                kept[number] = [done.fetch_model() for done in together]
        return kept

    def _with_groups(self, count: int, rounds: int, models: list[Vector], yardsticks: Mapping[int, Yardstick]) -> None:
        """Measure the first training and single requests after some separate rounds, with every stretch."""
        trial, members = self.trial, self._members(count, self._everyone)
        stretches = _stretches(trial, rounds)
        own = self._own_training_accuracy(models, members)
        everyone = [self._merged(models, members, range(count), stretch) for stretch in stretches]
        common = self._trained(everyone, Position(0, rounds), [self._everyone] * len(everyone), trial.length)
        apart_client_rounds = self._expected_client_rounds(rounds, self._everyone)
        for stretch, start, first in zip(stretches, everyone, common, strict=True):
            self._row(
                "groups", 0, 0, _setting(count, rounds, stretch), accuracy=first.end,
                accuracy_merged=self._test_accuracy(start), accuracy_apart=own, rounds=trial.length,
                client_rounds=apart_client_rounds + _last(first), groups_left=count, bytes_kept=count * self._bytes,
            )  # fmt: skip
        whole = {
            size: [group for group in range(count) if not np.isin(members[group], self._leavers(size)).any()]
            for size in trial.leavers
        }
        for stretch, way in _ways(trial, rounds):
            setting = _setting(count, rounds, stretch, way)
            starts = {
                size: self._start(models, members, left, stretch, way, rounds) for size, left in whole.items() if left
            }
            stays = [self._without(self._leavers(size)) for size in starts]
            recovered = self._recovered(
                [start.model for start in starts.values()], stays, [yardsticks[size].target for size in starts]
            )
            results = dict(zip(starts, recovered, strict=True))
            for size, left in whole.items():
                if not left:
                    self._row("groups", 1, size, setting, groups_left=0, reached=False)
                    continue
                reached, client_rounds = results[size]
                before = starts[size]
                self._row(
                    "groups", 1, size, setting, rounds=trial.length if reached is None else before.rounds + reached,
                    reached=reached is not None, client_rounds=before.client_rounds + client_rounds,
                    target=yardsticks[size].target, accuracy_merged=self._test_accuracy(before.model),
                    accuracy_apart=own, groups_left=len(left), bytes_kept=count * self._bytes,
                )  # fmt: skip

    def _start(
        self, models: Sequence[Vector], members: Sequence[ClientIndices], left: Sequence[int], stretch: float, way: str,
        rounds: int,
    ) -> Start:  # fmt: skip
        """Return the start of common rounds: the merge, made by one of the methods, of the groups without leavers."""
        if way == "tree":
            return self._tree([models[group] for group in left], [members[group] for group in left], stretch, rounds)
        if way == "aligned":
            models = [align(model, models[left[0]], self.engine.layout) for model in models]
        return Start(self._merged(models, members, left, stretch))

    def _tree(self, models: list[Vector], members: list[ClientIndices], stretch: float, rounds: int) -> Start:
        """Merge neighbours pairwise and train each pair for a few rounds, until one model is left.

        Every level is scaled by the same factor, so that all levels together are scaled by `stretch`.
        """
        levels = max(1, math.ceil(math.log2(len(models))))
        spent, client_rounds = 0, 0
        while len(models) > 1:
            pairs = [slice(first, first + 2) for first in range(0, len(models), 2)]
            models = [
                self._merged(models[pair], members[pair], range(len(models[pair])), stretch ** (1.0 / levels))
                if len(models[pair]) > 1
                else models[pair][0]
                for pair in pairs
            ]
            members = [np.sort(np.concatenate(members[pair])) for pair in pairs]
            if len(models) > 1:
                first = rounds + spent
                wanted = RoundsWanted(
                    StopSpec(0.0, 0, first + TREE_ROUNDS, 2**40), models[0].astype(np.float64), evaluated=NO_CLIENTS
                )
                stream = stream_group_rounds(self.engine, models, Position(1, first), members, wanted)
                for together in stream:
                    client_rounds += sum(int(done.participants.size) for done in together)
                    last = together
                models = [done.fetch_model() for done in last]
                spent += TREE_ROUNDS
        return Start(models[0], spent, client_rounds)

    def _sequence(
        self, count: int, rounds: int, built: Sequence[Vector], rebuild: str, yardsticks: Mapping[int, Yardstick]
    ) -> None:
        """Forget single leavers one after the other; hit groups are rebuilt at once, or never."""
        members, stretch = self._members(count, self._everyone), self.trial.stretches[0]
        models = dict(enumerate(built))
        setting = _setting(count, rounds, stretch) | {"rebuild": rebuild}
        for request in range(1, self.trial.requests + 1):
            gone = self._leavers(request)
            stay, yardstick = self._without(gone), _between(yardsticks, request)
            hit = next(group for group in range(count) if gone[-1] in members[group])
            models.pop(hit, None)
            members = [np.setdiff1d(group, gone) for group in members]
            if models:
                start = self._merged(
                    list(models.values()), [members[group] for group in models], range(len(models)), stretch
                )
                ((reached, client_rounds),) = self._recovered([start], [stay], [yardstick.target], branch=request + 1)
            else:
                start, reached, client_rounds = self._fresh, round(yardstick.rounds), round(yardstick.client_rounds)
            rebuilt = 0
            left = len(models)
            if rebuild == "now" and members[hit].size:
                models[hit], rebuilt = self._built_again(members[hit], rounds, -request)
                models = dict(sorted(models.items()))
            self._row(
                "groups", request, 1, setting, rounds=self.trial.length if reached is None else reached,
                reached=reached is not None, client_rounds=client_rounds, rebuild_client_rounds=rebuilt,
                target=yardstick.target, groups_left=left,
                scratch_client_rounds=yardstick.client_rounds, scratch_rounds=yardstick.rounds,
                accuracy_merged=self._test_accuracy(start), bytes_kept=count * self._bytes,
            )  # fmt: skip

    def _built_again(self, members: ClientIndices, rounds: int, branch: int) -> tuple[Vector, int]:
        wanted = RoundsWanted(StopSpec(0.0, 0, rounds, 2**40), self._fresh.astype(np.float64), evaluated=NO_CLIENTS)
        model, client_rounds = self._fresh, 0
        stream = stream_group_rounds(self.engine, [self._fresh], Position(branch, 0), [members], wanted)
        for number, (done,) in enumerate(stream, start=1):
            client_rounds += int(done.participants.size)
            if number == rounds:
                model = done.fetch_model()
        return model, client_rounds

    # -- rounds --------------------------------------------------------------------------------------------------

    def _trained(
        self, starts: Sequence[Vector], position: Position, groups: Sequence[ClientIndices], last: int
    ) -> list[Training]:
        """Train side by side from `position` to round `last`, with evaluations."""
        wanted = RoundsWanted(
            StopSpec(0.0, 0, last, self.trial.every), starts[0].astype(np.float64), evaluated=self._test
        )
        looks: list[Looks] = [[] for _ in starts]
        counts: list[dict[int, int]] = [{} for _ in starts]
        totals = [0] * len(starts)
        models: list[Vector] = list(starts)
        rounds = stream_group_rounds(self.engine, starts, position, groups, wanted)
        for number, together in enumerate(rounds, start=position.round + 1):
            for place, done in enumerate(together):
                totals[place] += int(done.participants.size)
                if done.evaluation is not None:
                    looks[place].append((number, done.evaluation.accuracy))
                    counts[place][number] = totals[place]
                if number == last:
                    models[place] = done.fetch_model()
        return [Training(*course) for course in zip(looks, counts, models, strict=True)]

    def _recovered(
        self, starts: Sequence[Vector], stays: Sequence[ClientIndices], targets: Sequence[float], branch: int = 1
    ) -> list[tuple[int | None, int]]:
        """Return the common rounds from each start until its target is reached (None: never), and the client-rounds."""
        results: list[tuple[int | None, int]] = [(None, 0)] * len(starts)
        models = dict(enumerate(starts))
        for place, start in enumerate(starts):
            if self._test_accuracy(start) >= targets[place]:
                results[place] = (0, 0)
                del models[place]
        for first in range(0, self.trial.length, STAGE):
            if not models:
                break
            last = min(first + STAGE, self.trial.length)
            places = list(models)
            wanted = RoundsWanted(
                StopSpec(0.0, 0, last, self.trial.every), starts[0].astype(np.float64), evaluated=self._test
            )
            rounds = stream_group_rounds(
                self.engine, [models[place] for place in places], Position(branch, first),
                [stays[place] for place in places], wanted,
            )  # fmt: skip
            for number, together in enumerate(rounds, start=first + 1):
                for place, done in zip(places, together, strict=True):
                    if place not in models:
                        continue
                    results[place] = (None, results[place][1] + int(done.participants.size))
                    if done.evaluation is not None and done.evaluation.accuracy >= targets[place]:
                        results[place] = (number, results[place][1])
                        del models[place]
                    elif number == last:
                        models[place] = done.fetch_model()
        return results

    # -- clients and groups --------------------------------------------------------------------------------------------

    def _leavers(self, count: int) -> ClientIndices:
        return np.asarray(self._everyone[self._order[:count]])

    def _without(self, gone: ClientIndices) -> ClientIndices:
        return np.setdiff1d(self._everyone, gone)

    def _members(self, count: int, clients: ClientIndices) -> list[ClientIndices]:
        groups = members_by_group(grouping_key(self.trial.seed), self._names, clients.tolist(), count)
        return [np.array(group, dtype=np.int64) for group in groups]

    def _merged(
        self, models: Sequence[Vector], members: Sequence[ClientIndices], groups: Sequence[int], stretch: float
    ) -> Vector:
        weights = [sum(self._samples[client] for client in members[group]) for group in groups]
        mean = merge([models[group].astype(np.float64) for group in groups], weights)
        return move_on(mean, self._fresh.astype(np.float64), stretch).astype(self._fresh.dtype)

    def _test_accuracy(self, model: Vector) -> float:
        return self.engine.evaluate(model, self._test).accuracy

    def _own_training_accuracy(self, models: Sequence[Vector], members: Sequence[ClientIndices]) -> float:
        """Return the mean accuracy of a few groups' models on their own members' data."""
        some = [(model, own) for model, own in zip(models, members, strict=True) if own.size][:3]
        return statistics.fmean(self.engine.evaluate(model, own).accuracy for model, own in some)

    def _expected_client_rounds(self, rounds: int, clients: ClientIndices) -> float:
        participation = self.engine.facts.participation
        share = participation.rate * clients.size if participation.kind == "poisson" else clients.size
        return rounds * float(share)

    def _row(self, method: str, request: int, leavers: int, setting: Mapping[str, Any], **measured: Any) -> None:
        place = _place(self.trial, self.experiment, method, request, leavers, setting)
        seconds = round(time.monotonic() - self._started, 3)
        self.add({**place, "leavers": leavers, "length": self.trial.length, **measured, "seconds": seconds})


def _place(
    trial: GroupTrial, experiment: str, method: str, request: int, leavers: int, setting: Mapping[str, Any]
) -> Row:
    return {
        "experiment": experiment,
        "dataset": trial.dataset,
        "seed": trial.seed,
        "preset": "",
        "method": method,
        "variant": f"{trial.task} {variant_text({**setting, 'leavers': leavers})}",
        "request": request,
    }


def _stretches(trial: GroupTrial, rounds: int) -> tuple[float, ...]:
    """Return the stretches to try after a number of separate rounds."""
    return trial.stretches if rounds == trial.rounds[0] else trial.stretches[:1]


def _ways(trial: GroupTrial, rounds: int) -> list[tuple[float, str]]:
    """Return the merges to try after some separate rounds: all stretches with the mean, and other merges with the
    first.
    """
    others = trial.merges[1:] if rounds == trial.rounds[0] else ()
    return [(stretch, "mean") for stretch in _stretches(trial, rounds)] + [(trial.stretches[0], way) for way in others]


def _setting(count: int, rounds: int, stretch: float, way: str = "mean") -> dict[str, Any]:
    """Return the varied settings under the table's names; a stretch of 1 and a merge by the mean are omitted."""
    setting: dict[str, Any] = {"groups": count, "apart": rounds}
    return setting | ({} if stretch == 1.0 else {"stretch": stretch}) | ({} if way == "mean" else {"merge": way})


def last_place(trial: GroupTrial, experiment: str) -> Row:
    """Return the columns that identify the last row of a trial; a table with that row has the whole trial."""
    if trial.requests and len(trial.groups) == 1:
        setting = _setting(trial.groups[0], trial.rounds[0], trial.stretches[0]) | {"rebuild": trial.rebuild[-1]}
        return _place(trial, experiment, "groups", trial.requests, 1, setting)
    rounds = trial.rounds[-1]
    setting = _setting(trial.groups[-1], rounds, *_ways(trial, rounds)[-1])
    return _place(trial, experiment, "groups", 1, trial.leavers[-1], setting)


def _last(training: Training) -> int:
    return max(training.client_rounds.values(), default=0)


def _between(yardsticks: Mapping[int, Yardstick], request: int) -> Yardstick:
    """Return the cost of Scratch after a number of requests, interpolated between measured ones."""
    measured = sorted(yardsticks)
    values = [
        np.interp(request, measured, [getattr(yardsticks[size], name) for size in measured])
        for name in ("target", "rounds", "client_rounds")
    ]
    return Yardstick(*map(float, values))
