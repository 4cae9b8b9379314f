"""Replay of a recorded run, together with counterfactual runs in which some clients never took part."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from sifu.core.closed_form_engine import StatisticsEngine
from sifu.core.engine import Engine, Position, RoundResult
from sifu.core.layout import Vector
from sifu.errors import RunDamagedError
from sifu.run.run_view import RunView
from sifu.store.reader import RunReader
from sifu.theory.closed_form import FixedPoint, Rows, Statistics, total
from sifu.theory.history import PathNode
from sifu.theory.merging import merge, move_on
from sifu.theory.participation import ClientIndices


class EngineWithout:
    """Wrapper of an `engine` that has only the data of the clients `there` and leaves the others out of each round."""

    def __init__(self, engine: Engine, there: ClientIndices, kind: str = "") -> None:
        self._engine, self._there, self._kind = engine, there, kind
        self.layout, self.facts, self.clients = engine.layout, engine.facts, engine.clients

    def must_repeat_bits_of(self, reader: RunReader) -> bool:
        """Return whether results must have the recorded bits; an engine of another kind may give others."""
        return bool(self._kind == reader.facts["engine"])

    def initial_model(self, branch: int) -> Vector:
        """Return a fresh model of the counterfactual run."""
        return self._engine.initial_model(branch)

    def run_round(self, model: Vector, position: Position, active: ClientIndices) -> RoundResult:
        """Run one round among the available `active` clients."""
        result = self._engine.run_round(model, position, self._places(active))
        return replace(result, participants=self._there[result.participants])

    @property
    def fixed(self) -> FixedPoint:
        """Number format of the statistics of a closed-form head."""
        return cast("StatisticsEngine", self._engine).fixed

    def sum_of(self, clients: ClientIndices) -> Statistics:
        """Return the sum of the statistics of the available `clients`."""
        replies = cast("StatisticsEngine", self._engine).collect(self._places(clients).tolist(), Position(0, 0))
        return total(self.fixed, (sent for _, sent in replies if isinstance(sent, Statistics | Rows)))

    def _places(self, clients: ClientIndices) -> ClientIndices:
        return np.flatnonzero(np.isin(self._there, clients))


RunsRounds = Engine | EngineWithout
NoisedModel = Callable[[PathNode, Vector], Vector | None]
"""Function that returns the noised model of a node in the actual run, or None if it is no longer known."""


ACTUAL = None
"""Key of the actual run among the runs that are replayed."""
Runs = Mapping[int | None, Collection[int]]
"""Clients that each replayed run lacks, by its key; the actual run comes first and lacks none."""


@dataclass(frozen=True)
class ReplayedNode:
    """Node of the actual run, with its model in each replayed run by that run's key (see `Runs`)."""

    node: PathNode
    models: dict[int | None, Vector]

    @property
    def model(self) -> Vector:
        """The node's model in the actual run."""
        return self.models[ACTUAL]

    @property
    def without(self) -> dict[int, Vector]:
        """The node's model in each counterfactual run, by the run's key."""
        return {key: model for key, model in self.models.items() if key is not None}


def recorded_noise(reader: RunReader) -> NoisedModel:
    """Return a function that reads a noised model from disk.

    Certified noise is drawn once from the operating system and exists only in the model it made. If a later request cut
    off and erased that model, its descendants cannot be replayed.
    """
    on_disk = reader.models()

    def noised(node: PathNode, source: Vector) -> Vector | None:
        if math.isinf(node.noise_std) or node.node not in on_disk:  # infinite: a purge erased the source
            return None
        return reader.load_model(node.node)

    return noised


def replay_counterfactuals(
    engine: RunsRounds,
    reader: RunReader,
    counterfactuals: Mapping[int, Collection[int]],
    noised: NoisedModel,
    only: Collection[int] | None = None,
) -> Iterator[ReplayedNode]:
    """Yield every recorded node in order, including nodes cut by a rollback, with its model in each counterfactual run.

    Groups that train separately are replayed with their members in each counterfactual run and merged with that run's
    samples. Models after noise that is no longer known, and all their descendants, are skipped. A noise edge adds the
    same noise in every run, so a counterfactual model phi becomes phi + (noised - theta).

    Args:
        engine: Engine with the data.
        reader: Reader of the run.
        counterfactuals: Clients that each counterfactual run lacks, by key.
        noised: Returns the recorded noised models.
        only: Nodes to replay, including all their ancestors, by default all nodes.
    """
    took_part = reader.participation()
    runs: Runs = {ACTUAL: ()} | dict(counterfactuals)
    nodes = [node for node in reader.nodes() if only is None or node.node in only]
    waiting = Counter(node.parent for node in nodes)
    alive: dict[int | None, ReplayedNode] = {}
    groups = ReplayedGroups(engine, reader, runs)
    for node in nodes:
        waiting[node.parent] -= 1
        if node.kind == "group":
            yield groups.replay(node)
            continue
        before = alive.get(node.parent)
        if node.parent is not None and waiting[node.parent] == 0:
            alive.pop(node.parent, None)
        there = took_part.between(node.node, node.node).clients
        if node.kind == "merge":
            replayed = groups.merge(node)
        else:
            replayed = _replay_node(engine, node, before, there, runs, noised)
        if replayed is None:
            continue
        if waiting[node.node]:
            alive[node.node] = replayed
        yield replayed


class ReplayedGroups:
    """Replayed models of groups in every run, and their merges."""

    def __init__(self, engine: RunsRounds, reader: RunReader, runs: Runs) -> None:
        self._engine, self._runs, self._dtype = engine, runs, reader.layout.dtype
        self._rows, self._merges = reader.group_models(), reader.merges()
        self._samples = [client.samples for client in reader.clients()]
        self._fresh = engine.initial_model(0)
        self._replayed: dict[int, ReplayedNode] = {}

    def replay(self, node: PathNode) -> ReplayedNode:
        """Replay the separate rounds from a group's earlier model, or from the fresh one, to this node."""
        row, before = self._rows[node.node], self._replayed.get(node.parent or 0)
        begun = 0 if before is None else self._rows[before.node.node].rounds
        models: dict[int | None, Vector] = {}
        for key, gone in self._runs.items():
            if key is not ACTUAL and set(gone).isdisjoint(row.members):
                models[key] = models[ACTUAL]
                continue
            model = self._fresh if before is None else before.models[key]
            members = np.setdiff1d(np.array(row.members, dtype=np.int64), np.array(sorted(gone), dtype=np.int64))
            for place in range(begun, row.rounds if members.size else begun):
                model = self._engine.run_round(model, Position(node.branch, place), members).model
            models[key] = model
        self._replayed[node.node] = ReplayedNode(node, models)
        return self._replayed[node.node]

    def merge(self, node: PathNode) -> ReplayedNode | None:
        """Return the merge of the groups' models in each run, weighted by that run's samples."""
        sources = [row.source_node for row in self._merges if row.node == node.node]
        parts = [(self._replayed[source], set(self._rows[source].members)) for source in sources]
        models: dict[int | None, Vector] = {}
        for key, gone in self._runs.items():
            if key is not ACTUAL and all(members.isdisjoint(gone) for _, members in parts):
                models[key] = models[ACTUAL]
                continue
            samples = [sum(self._samples[client] for client in members - set(gone)) for _, members in parts]
            there = [
                (part.models[key].astype(np.float64), count)
                for (part, _), count in zip(parts, samples, strict=True)
                if count
            ]
            if there:
                merged = merge([model for model, _ in there], [count for _, count in there])
                models[key] = move_on(merged, self._fresh.astype(np.float64)).astype(self._dtype)
            elif key is ACTUAL:
                return None
            else:
                models[key] = self._fresh
        return ReplayedNode(node, models)


def _replay_node(
    engine: RunsRounds,
    node: PathNode,
    before: ReplayedNode | None,
    there: ClientIndices,
    runs: Runs,
    noised: NoisedModel,
) -> ReplayedNode | None:
    if node.kind == "initial":
        return ReplayedNode(node, dict.fromkeys(runs, engine.initial_model(node.branch)))
    if before is None:
        return None
    models: dict[int | None, Vector] = {}
    if node.kind == "noise":
        if node.noise_std == 0.0:
            return ReplayedNode(node, before.models)
        model = noised(node, before.model)
        if model is None:
            return None
        start = before.model.astype(np.float64)
        for key, theirs in before.models.items():
            moved = model.astype(np.float64) + (theirs.astype(np.float64) - start)
            models[key] = model if theirs is before.model else moved.astype(model.dtype)
        return ReplayedNode(node, models)
    for key, gone in runs.items():
        theirs, left = before.models[key], there[~np.isin(there, list(gone))]
        # Until the clients that it lacks first take part, a counterfactual run equals the actual one bit for bit.
        if key is not ACTUAL and theirs is before.model and left.size == there.size:
            models[key] = models[ACTUAL]
            continue
        result = engine.run_round(theirs, Position(node.branch, node.position - 1), left)
        if not np.array_equal(result.participants, left):
            raise RunDamagedError(
                f"node {node.node} cannot be replayed: {result.participants.tolist()} are drawn, "
                f"{left.tolist()} are recorded"
            )
        models[key] = result.model
    return ReplayedNode(node, models)


def recorded_psi(reader: RunReader) -> dict[tuple[int, int], float]:
    """Return Psi by (subject, node) for all subjects hidden by noise, also at nodes that a rollback cut off."""
    nodes = [node for node in reader.nodes() if node.kind != "group"]
    result: dict[tuple[int, int], float] = {}
    for leaf in sorted({node.node for node in nodes} - {node.parent for node in nodes if node.parent is not None}):
        view = RunView(reader, tip=leaf)
        for subject in view.earlier_subjects():
            psi = view.curve(subject).at(np.arange(len(view.path)))
            result |= {(subject.subject, node.node): float(p) for node, p in zip(view.path.nodes, psi, strict=True)}
    return result
