"""A recorded run replayed, beside the worlds in which some clients were never there.

All worlds share everything that is random: schedule, batches, initial models and noise. In each of them some clients
are missing, their slots not refilled (docs/theory.md, section 2.2). ||theta^n - phi^n|| can then be compared with
Psi(n, W) at every node, and against what was charged at every noise edge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from sifu.core.engine import Engine, Position
from sifu.core.layout import Vector
from sifu.core.noise import add_noise, noise_source
from sifu.core.spec import Spec
from sifu.errors import RunDamagedError
from sifu.record.run_view import RunView
from sifu.store.reader import RunReader
from sifu.theory.history import PathNode
from sifu.theory.participation import ClientIndices

NoisedModel = Callable[[PathNode, Vector], Vector | None]
"""The model that a noise edge made of its source in the real world; None where that cannot be known any more."""


@dataclass(frozen=True)
class ReplayedNode:
    """A node's model with everyone, and its model in each of the other worlds, by the key of the world."""

    node: PathNode
    model: Vector
    without: dict[int, Vector]


def recorded_noise(reader: RunReader) -> NoisedModel:
    """Noise as it was: from the noised model where it is still on disk, drawn again where it was seeded.

    Certified noise is drawn once from the operating system and kept nowhere but in the model it made. When a later
    request cut that model off and erased it, what came after it cannot be replayed.
    """
    on_disk = reader.models()
    spec = Spec.from_mapping(reader.spec)

    def noised(node: PathNode, source: Vector) -> Vector | None:
        if node.node in on_disk:
            return reader.load_model(node.node)
        if spec.privacy.noise == "seeded":
            return add_noise(source, node.noise_std, noise_source("seeded", spec.seed, node.order))
        return None

    return noised


def replay_worlds(
    engine: Engine, reader: RunReader, worlds: Mapping[int, Collection[int]], noised: NoisedModel
) -> Iterator[ReplayedNode]:
    """Every node, the cut ones too, in the order of the record: with everyone, and without the clients of each world.

    Left out are what a heuristic made, what follows noise that is not known any more, and whatever comes after
    them. A noise edge adds the same noise in every world, so there the other models move as the real one does:
    phi + (noised - theta).
    """
    took_part = reader.participation()
    nodes = [row.node for row in reader.node_rows()]
    waiting = Counter(node.parent for node in nodes)
    alive: dict[int | None, ReplayedNode] = {}
    for node in nodes:
        before = alive.get(node.parent)
        waiting[node.parent] -= 1
        if node.parent is not None and waiting[node.parent] == 0:
            alive.pop(node.parent, None)
        there = took_part.between(node.node, node.node).clients
        replayed = _replay_node(engine, node, before, there, worlds, noised)
        if replayed is None:
            continue
        if waiting[node.node]:
            alive[node.node] = replayed
        yield replayed


def _replay_node(
    engine: Engine,
    node: PathNode,
    before: ReplayedNode | None,
    there: ClientIndices,
    worlds: Mapping[int, Collection[int]],
    noised: NoisedModel,
) -> ReplayedNode | None:
    if node.kind == "initial":
        first = engine.initial_model(node.branch)
        return ReplayedNode(node, first, dict.fromkeys(worlds, first))
    if before is None or node.kind in ("heuristic", "group", "merge"):
        return None
    if node.kind == "noise":
        if node.noise_std == 0.0:
            return ReplayedNode(node, before.model, before.without)
        model = noised(node, before.model)
        if model is None:
            return None
        return ReplayedNode(node, model, {key: _moved(model, before, key) for key in worlds})

    position = Position(node.branch, node.position - 1)

    def round_from(model: Vector, gone: Collection[int]) -> Vector:
        """The recorded participants except those gone: a draw among exactly them takes them all."""
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
    for key, gone in worlds.items():
        theirs = before.without[key]
        # Until its clients first take part a world is the real one, to the last bit.
        same = theirs is before.model and not np.isin(there, list(gone)).any()
        without[key] = model if same else round_from(theirs, gone)
    return ReplayedNode(node, model, without)


def _moved(noised: Vector, before: ReplayedNode, key: int) -> Vector:
    theirs = before.without[key]
    if theirs is before.model:
        return noised
    exact = noised.astype(np.float64) + (theirs.astype(np.float64) - before.model.astype(np.float64))
    return exact.astype(noised.dtype)


def recorded_psi(reader: RunReader) -> dict[tuple[int, int], float]:
    """Psi by (subject, node), for everyone whom noise of a request promised to hide, at every node, cut or not."""
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
