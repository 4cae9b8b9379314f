"""Replay of a recorded run together with counterfactual runs in which some clients never took part."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np

from sifu.core.closed_form_engine import GroupNetwork, StatisticsEngine, TunedEngine, places_of_head
from sifu.core.engine import Engine, Position, Rejection, RoundResult
from sifu.core.layout import Vector
from sifu.core.round import add_noise, noise_source
from sifu.core.round_stream import RoundsWanted, is_evaluated, should_stop, stream_rounds
from sifu.core.spec import Spec, StopSpec
from sifu.errors import RunDamagedError
from sifu.run.run_view import RunView
from sifu.run.training import Progress, ProgressCallback
from sifu.store.reader import RunReader
from sifu.theory.closed_form import FixedPoint, Rows, Statistics, total
from sifu.theory.closed_form.blocks import head_at
from sifu.theory.history import PathNode
from sifu.theory.merging import merge, move_on
from sifu.theory.participation import ClientIndices


class SolvedAgain(NamedTuple):
    """A head, and the sum of statistics that it was solved from."""

    model: Vector
    statistics: Statistics


class EngineWithout:
    """Wrapper of an `engine` that has only the data of the clients `there` and leaves the others out of each round."""

    def __init__(self, engine: Engine, there: ClientIndices) -> None:
        self._engine, self._there = engine, there
        self.layout, self.facts, self.clients = engine.layout, engine.facts, engine.clients

    def initial_model(self, branch: int) -> Vector:
        """Return a fresh model of the counterfactual run."""
        return self._engine.initial_model(branch)

    def run_round(self, model: Vector, position: Position, active: ClientIndices) -> RoundResult:
        """Run one round among the available `active` clients."""
        result = self._engine.run_round(model, position, self._places(active))
        return replace(result, participants=self._there[result.participants])

    def solved_again(self, reader: RunReader, solve: Mapping[str, Any], clients: ClientIndices) -> SolvedAgain | None:
        """Repeat the solve of a head on networks that groups tune; return None if its networks were erased.

        The members of each group that are present repeat the group's separate rounds. The head is then solved on the
        features of the resulting networks (docs/theory.md, section 15.5).

        Args:
            reader: Reader of the run.
            solve: Record of the solve.
            clients: Clients of the head.
        """
        rows, tuned = reader.group_models(), cast("TunedEngine", self._engine)
        if not set(solve["trunks"]) <= rows.keys():
            return None
        groups = ReplayedGroups(EngineWithout(tuned.tuning, self._there), reader, {})
        models = {row.node.node: groups.replay(row.node).model for row in reader.node_rows() if row.node.node in rows}
        backbones = []
        for node in solve["trunks"]:
            members = self._places(np.array(rows[node].members))
            samples = sum(self.clients[member].samples for member in members.tolist())
            backbones += [GroupNetwork(rows[node].grp, samples, models[node])] if samples else []
        tuned.use_backbones(backbones)
        statistics, spec = self.sum_of(clients), Spec.from_mapping(reader.spec)
        places = places_of_head(spec, reader.layout, [backbone.group for backbone in backbones])
        head = head_at(statistics, places, cast("StatisticsEngine", self._engine).relative_penalty)
        return SolvedAgain(head.weights.ravel(), statistics)

    @property
    def fixed(self) -> FixedPoint:
        """Number format of the statistics of a closed-form head."""
        return cast("StatisticsEngine", self._engine).fixed

    def sum_of(self, clients: ClientIndices) -> Statistics:
        """Return the sum of the statistics of the available `clients`."""

        def parts() -> Iterator[Statistics | Rows]:
            for _, sent in cast("StatisticsEngine", self._engine).collect(
                self._places(clients).tolist(), Position(0, 0)
            ):
                if sent is not None and not isinstance(sent, Rejection):
                    yield sent

        return total(self.fixed, parts())

    def _places(self, clients: ClientIndices) -> ClientIndices:
        return np.flatnonzero(np.isin(self._there, clients))


def retrain_unrecorded(
    engine: Engine,
    active: ClientIndices,
    stop: StopSpec,
    branch: int,
    progress: ProgressCallback | None = None,
    start: Vector | None = None,
) -> tuple[Vector, int, float, bool]:
    """Train among `active` from a fresh model, like the method Scratch, without recording anything.

    Args:
        engine: Engine of the run.
        active: Clients that take part.
        stop: Stop rule.
        branch: Branch that keys the random draws.
        progress: Callback invoked after each round.
        start: Starting model; by default a fresh one.

    Returns:
        The model, the rounds, the accuracy, and whether the target was reached.
    """
    first = engine.initial_model(branch) if start is None else start

    def fetch_model() -> Vector:
        return first

    rounds, accuracy = 0, math.nan
    evaluated = engine.evaluate(first, active).accuracy if is_evaluated(stop, 0) else None
    wanted = RoundsWanted(stop, first.astype(np.float64), accuracy=evaluated)
    stream = stream_rounds(engine, first, Position(branch, 0), active, wanted)
    while True:
        accuracy = accuracy if evaluated is None else evaluated
        if should_stop(stop, rounds, evaluated):
            return fetch_model(), rounds, accuracy, bool(stop.target > 0 and accuracy >= stop.target)
        done = next(stream)
        fetch_model, rounds = done.fetch_model, rounds + 1
        evaluated = done.evaluation.accuracy if done.evaluation is not None else None
        if progress:
            progress(Progress("Scratch", rounds, accuracy, stop.target, stop.max_rounds))


RunsRounds = Engine | EngineWithout
NoisedModel = Callable[[PathNode, Vector], Vector | None]
"""Function that returns the noised model of a node in the actual run; None if it is no longer known."""


@dataclass(frozen=True)
class ReplayedNode:
    """A node's model in the actual run, and its model in each counterfactual run, by the run's key."""

    node: PathNode
    model: Vector
    without: dict[int, Vector]


def recorded_noise(reader: RunReader) -> NoisedModel:
    """Return a function that finds a noised model: read from disk, or recomputed if its noise was seeded.

    Certified noise is drawn once from the operating system and exists only in the model it made. If a later request cut
    off and erased that model, its descendants cannot be replayed.
    """
    on_disk = reader.models()
    spec = Spec.from_mapping(reader.spec)

    def noised(node: PathNode, source: Vector) -> Vector | None:
        if math.isinf(node.noise_std):  # a purge erased its source
            return None
        if node.node in on_disk:
            return reader.load_model(node.node)
        if spec.privacy.noise == "seeded":
            return add_noise(source, node.noise_std, noise_source("seeded", spec.seed, node.order))
        return None

    return noised


def replay_counterfactuals(
    engine: RunsRounds,
    reader: RunReader,
    counterfactuals: Mapping[int, Collection[int]],
    noised: NoisedModel,
    only: Collection[int] | None = None,
) -> Iterator[ReplayedNode]:
    """Yield every recorded node in order, including nodes cut by a rollback, with its model in each counterfactual run.

    If a local rate was recomputed, only the nodes since then are replayed, because the engine has the current rate.
    Groups that train separately are replayed with their members in each counterfactual run and merged with that run's
    samples. Models made by a heuristic, models after noise that is no longer known, and all their descendants are
    skipped. A noise edge adds the same noise in every run, so a counterfactual model phi becomes
    phi + (noised - theta).

    Args:
        engine: Engine with the data.
        reader: Reader of the run.
        counterfactuals: Clients that each counterfactual run lacks, by key.
        noised: Returns the recorded noised models.
        only: Nodes to replay, including all their ancestors; by default all nodes.
    """
    took_part = reader.participation()
    begins = max(reader.local_rates, default=0)
    nodes = [row.node for row in reader.node_rows(begins) if only is None or row.node.node in only]
    waiting = Counter(node.parent for node in nodes)
    alive: dict[int | None, ReplayedNode] = {}
    groups = ReplayedGroups(engine, reader, counterfactuals)
    for node in nodes:
        if node.kind == "group":
            waiting[node.parent] -= 1
            yield groups.replay(node)
            continue
        before = alive.get(node.parent)
        waiting[node.parent] -= 1
        if node.parent is not None and waiting[node.parent] == 0:
            alive.pop(node.parent, None)
        there = took_part.between(node.node, node.node).clients
        replayed = (
            groups.merge(node)
            if node.kind == "merge"
            else _replay_node(engine, node, before, there, counterfactuals, noised)
        )
        if replayed is None:
            continue
        if waiting[node.node]:
            alive[node.node] = replayed
        yield replayed


class ReplayedGroups:
    """Replayed models of groups in every counterfactual run, and their merges."""

    def __init__(self, engine: RunsRounds, reader: RunReader, counterfactuals: Mapping[int, Collection[int]]) -> None:
        self._engine, self._counterfactuals, self._dtype = engine, counterfactuals, reader.layout.dtype
        self._rows, self._merges = reader.group_models(), reader.merges()
        self._samples = [client.samples for client in reader.clients()]
        self._stretch, self._fresh = float(reader.spec["groups"]["stretch"]), engine.initial_model(0)
        self._replayed: dict[int, ReplayedNode] = {}

    def replay(self, node: PathNode) -> ReplayedNode:
        """Replay the separate rounds from a group's earlier model, or from the fresh one, to this node."""
        row, before = self._rows[node.node], self._replayed.get(node.parent or 0)
        begun = 0 if before is None else self._rows[before.node.node].rounds
        fresh = self._fresh

        def rounds(model: Vector, gone: Collection[int]) -> Vector:
            members = np.setdiff1d(np.array(row.members, dtype=np.int64), np.array(sorted(gone), dtype=np.int64))
            for place in range(begun, row.rounds if members.size else begun):
                model = self._engine.run_round(model, Position(node.branch, place), members).model
            return model

        model = rounds(fresh if before is None else before.model, ())
        without = {
            key: rounds(fresh if before is None else before.without[key], gone)
            if not set(gone).isdisjoint(row.members)
            else model
            for key, gone in self._counterfactuals.items()
        }
        self._replayed[node.node] = ReplayedNode(node, model, without)
        return self._replayed[node.node]

    def merge(self, node: PathNode) -> ReplayedNode | None:
        """Return the merge of the groups' models in each counterfactual run, weighted by that run's samples."""
        sources = [row.source_node for row in self._merges if row.node == node.node]
        parts = [(self._replayed[source], self._rows[source].members) for source in sources]

        def mean(key: int | None, gone: Collection[int]) -> Vector | None:
            samples = [sum(self._samples[client] for client in set(members) - set(gone)) for _, members in parts]
            there = [
                (part.model if key is None else part.without[key], count)
                for (part, _), count in zip(parts, samples, strict=True)
                if count
            ]
            if not there:
                return None
            models = [model.astype(np.float64) for model, _ in there]
            merged = merge(models, [count for _, count in there])
            return move_on(merged, self._fresh.astype(np.float64), self._stretch).astype(self._dtype)

        model = mean(None, ())
        if model is None:
            return None
        hit = {
            key for key, gone in self._counterfactuals.items() if any(set(gone) & set(members) for _, members in parts)
        }
        without = {}
        for key, gone in self._counterfactuals.items():
            other = mean(key, gone) if key in hit else model
            without[key] = self._fresh if other is None else other
        return ReplayedNode(node, model, without)


def _replay_node(
    engine: RunsRounds,
    node: PathNode,
    before: ReplayedNode | None,
    there: ClientIndices,
    counterfactuals: Mapping[int, Collection[int]],
    noised: NoisedModel,
) -> ReplayedNode | None:
    if node.kind == "initial":
        first = engine.initial_model(node.branch)
        return ReplayedNode(node, first, dict.fromkeys(counterfactuals, first))
    if before is None or node.kind == "heuristic":
        return None
    if node.kind == "noise":
        if node.noise_std == 0.0:
            return ReplayedNode(node, before.model, before.without)
        model = noised(node, before.model)
        if model is None:
            return None
        start, without = before.model.astype(np.float64), {}
        for key in counterfactuals:
            theirs = before.without[key]
            moved = model.astype(np.float64) + (theirs.astype(np.float64) - start)
            without[key] = model if theirs is before.model else moved.astype(model.dtype)
        return ReplayedNode(node, model, without)

    position = Position(node.branch, node.position - 1)

    def round_from(model: Vector, gone: Collection[int]) -> Vector:
        """Run a round of the recorded participants except `gone`; raise an error if the engine selects others."""
        left = there[~np.isin(there, list(gone))]
        result = engine.run_round(model, position, left)
        if not np.array_equal(result.participants, left):
            raise RunDamagedError(
                f"node {node.node} cannot be replayed: {result.participants.tolist()} are drawn, "
                f"{left.tolist()} are recorded"
            )
        return result.model

    model = round_from(before.model, ())
    without = {}
    for key, gone in counterfactuals.items():
        theirs = before.without[key]
        # Until its clients first take part, a counterfactual run equals the actual one bit for bit.
        same = theirs is before.model and not np.isin(there, list(gone)).any()
        without[key] = model if same else round_from(theirs, gone)
    return ReplayedNode(node, model, without)


def recorded_psi(reader: RunReader) -> dict[tuple[int, int], float]:
    """Return Psi by (subject, node) for all subjects that noise promised to hide, at all nodes, even cut ones."""
    nodes = [row.node for row in reader.node_rows() if row.node.kind != "group"]
    result = {}
    for leaf in sorted({node.node for node in nodes} - {node.parent for node in nodes if node.parent is not None}):
        view = RunView(reader, tip=leaf)
        for subject in view.earlier_subjects():
            psi = view.curve(subject).at(np.arange(len(view.path)))
            result.update(
                {(subject.subject, node.node): float(p) for node, p in zip(view.path.nodes, psi, strict=True)}
            )
    return result
