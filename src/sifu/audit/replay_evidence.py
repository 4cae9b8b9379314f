"""Evidence from a replay of a run: true distances against Psi, true costs against charges, and the drawn noise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from sifu.audit.audited import Audited
from sifu.core.layout import Vector
from sifu.run.coupled_replay import recorded_noise, recorded_psi, replay_counterfactuals
from sifu.store.projection import RequestRow
from sifu.theory.arrays import Floats
from sifu.theory.history import PathNode
from sifu.theory.rollback import Subject

RARE = 1e-6
"""Probability below which drawn noise contradicts the promised distribution."""
SLACK = {"float64": 1e-12, "float32": 1e-5}
"""Rounding error of the audit's distances relative to the model, by number type. It is far below any relevant Psi."""
REPLAY_TOLERANCE = {"float64": 1e-7, "float32": 1e-2}
"""Maximum relative distance of a replay on another machine from the model on disk, by number type."""


@dataclass(frozen=True)
class Watched:
    """A subject with a replayed counterfactual: clients of a request, or a client that did not ask to be forgotten."""

    subject: int
    clients: tuple[int, ...]
    names: tuple[str, ...]
    request: RequestRow | None = None

    @property
    def order(self) -> int:
        """Number of the subject's request in the order of execution, or 0 if there is no request."""
        return 0 if self.request is None else self.request.request_order or 0

    @property
    def budget(self) -> float:
        """Upper limit 1/s^2 on the sum of the subject's charges."""
        return 0.0 if self.request is None else 1.0 / (self.request.multiplier or math.inf) ** 2

    @property
    def level(self) -> str:
        """Certified level of the subject's request, or `none` without a request or while it is being executed."""
        return "none" if self.request is None else self.request.level or "none"


@dataclass(frozen=True)
class NodeDistance:
    """True distance and bound at one node."""

    node: int
    distance: float
    psi: float


@dataclass(frozen=True)
class NoiseEdge:
    """Step that added noise to the model of node `source`, and the amount it charged to one subject's budget."""

    node: int
    source: int
    noise_std: float
    charge: float


@dataclass(frozen=True)
class NoiseDrawn:
    """The noise added at an edge, compared with its record.

    ||noise||^2 / sigma^2 follows the chi-squared distribution with d degrees of freedom. `p_small` is the probability
    of so little noise, `p_normal` the p-value of the Kolmogorov-Smirnov test for normality.
    """

    node: int
    order: int
    noise_std: float
    measured_std: float
    p_small: float
    p_normal: float

    @property
    def as_recorded(self) -> bool:
        """True if the drawn noise is consistent with the promised distribution."""
        return self.p_small >= RARE and self.p_normal >= RARE


@dataclass
class Evidence:
    """Results of one replay of a run."""

    distances: dict[tuple[int, int], float] = field(default_factory=dict)
    """True distance ||theta - phi||, by (subject, node). Model phi is the counterfactual without the subject."""
    lengths: dict[int, float] = field(default_factory=dict)
    """Norm ||theta|| of each replayed model, by node."""
    sources: dict[tuple[int, int], tuple[Vector, Vector]] = field(default_factory=dict)
    """Pairs (theta, phi), by (subject, source of a noise edge that is charged to the subject)."""
    edges: dict[int, tuple[Vector, Vector]] = field(default_factory=dict)
    """Source and noised model of the noise edges on the paths to exact releases."""
    noise: dict[int, NoiseDrawn] = field(default_factory=dict)
    deviations: dict[int, float] = field(default_factory=dict)
    """Relative distance of the replay from a model on disk, by node."""
    missed: int = 0
    """Number of nodes that could not be recomputed."""


def charged_edges(audited: Audited, watched: Watched) -> list[NoiseEdge]:
    """Return the noise edges that are charged to a subject (docs/theory.md, section 8.2)."""
    if watched.request is None:
        return []
    reader = audited.reader
    nodes = reader.nodes_by_number()
    charges = {(charge.noise_node, charge.subject): charge.charge for charge in reader.charges()}

    def covered(number: int | None) -> bool:
        while number is not None:
            node = nodes[number]
            if node.order >= watched.order and (node.kind == "initial" or node.noise_std > 0.0):
                return True
            number = node.parent
        return False

    return [
        NoiseEdge(node.node, node.parent, node.noise_std, charges.get((node.node, watched.subject), 0.0))
        for node in nodes.values()
        if node.kind == "noise" and node.parent is not None and node.order >= watched.order and not covered(node.parent)
    ]


def made_of(audited: Audited, node: int) -> set[int]:
    """Return a node and all nodes that it depends on: its ancestors, and the group models merged into any of them."""
    parents = {node.node: node.parent for node in audited.reader.nodes()}
    needed, waiting = set[int](), [node]
    while waiting:
        number = waiting.pop()
        if number not in needed:
            needed.add(number)
            parent = parents[number]
            waiting += [] if parent is None else [parent]
            waiting += [row.source_node for row in audited.reader.merges() if row.node == number]
    return needed


def gather(audited: Audited, watched: Sequence[Watched]) -> Evidence:
    """Replay the run with everyone and without each subject, in one pass; keep the models that the audit needs."""
    evidence, reader = Evidence(), audited.reader
    nodes, on_disk = reader.nodes(), reader.models()
    sources = {(subject.subject, edge.source) for subject in watched for edge in charged_edges(audited, subject)}
    counterfactuals = {subject.subject: subject.clients for subject in watched}
    finals = {row.final_node for row in (subject.request for subject in watched) if row and row.level == "exact"}
    attacked = () if audited.attacked is None else (audited.before, audited.attacked.final_node)
    noise_parents = {node.parent for node in nodes if node.kind == "noise"}
    exact_sources: dict[int, Vector] = {}
    on_the_way = {node for final in finals if final is not None for node in made_of(audited, final)}
    seen = 0
    for item in replay_counterfactuals(audited.engine, reader, counterfactuals, recorded_noise(reader)):
        number, exact = item.node.node, item.model.astype(np.float64)
        evidence.lengths[number] = float(np.linalg.norm(exact))
        for subject, theirs in item.without.items():
            away = 0.0 if theirs is item.model else float(np.linalg.norm(exact - theirs.astype(np.float64)))
            evidence.distances[subject, number] = away
            if (subject, number) in sources:
                evidence.sources[subject, number] = (item.model, theirs)
        if number in finals or number in attacked:
            audited.models[number] = item.model
        if number in noise_parents:
            exact_sources[number] = item.model
        if item.node.kind == "noise" and item.node.noise_std > 0.0 and item.node.parent in exact_sources:
            source = exact_sources[item.node.parent]
            evidence.noise[number] = noise_drawn(item.node, exact - source.astype(np.float64))
            if number in on_the_way:
                evidence.edges[number] = (source, item.model)
        if number in on_disk:
            gap = float(np.linalg.norm(exact - reader.load_model(number).astype(np.float64)))
            evidence.deviations[number] = gap / max(evidence.lengths[number], 1e-300) if gap else 0.0
        seen += 1
        audited.progress("replaying the run", seen, len(nodes))
    evidence.missed = len(nodes) - seen
    return evidence


def noise_drawn(node: PathNode, noise: Floats) -> NoiseDrawn:
    """Test whether `noise` is consistent with N(0, sigma^2 I)."""
    from scipy.special import ndtr
    from scipy.stats import chi2, kstest

    scaled = noise / node.noise_std
    square = float(scaled @ scaled)
    return NoiseDrawn(
        node.node,
        node.order,
        node.noise_std,
        float(np.sqrt(square / noise.size)) * node.noise_std,
        float(chi2.cdf(square, noise.size)),
        float(kstest(scaled, ndtr).pvalue),
    )


# -- comparison of the evidence with the record ----------------------------------------------------------------


def distance_rows(audited: Audited, watched: Sequence[Watched], evidence: Evidence) -> dict[int, list[NodeDistance]]:
    """Return the true distance and Psi at every node that could be replayed, by subject."""
    psi, view = recorded_psi(audited.reader), audited.view
    for subject in watched:
        if subject.request is None:
            curve = view.curve(Subject(subject.subject, subject.clients, 1.0, view.next_order))
            along = curve.at(np.arange(len(view.path))).tolist()
            psi |= {(subject.subject, node): value for node, value in zip(view.path.depth_of, along, strict=True)}
    rows: dict[int, list[NodeDistance]] = {subject.subject: [] for subject in watched}
    for (number, node), distance in evidence.distances.items():
        if (number, node) in psi:
            rows[number].append(NodeDistance(node, distance, psi[number, node]))
    return rows


def wrong_claims(
    watched: Watched, rows: Sequence[NodeDistance], edges: Sequence[NoiseEdge], evidence: Evidence, slack: float
) -> Iterator[str]:
    """Yield what the replay found wrong with a subject's distances and charges; `slack` is a relative tolerance."""
    broken = [
        row
        for row in rows
        if not row.distance <= row.psi * (1.0 + slack) + (slack * evidence.lengths[row.node] if row.psi > 0.0 else 0.0)
    ]
    if broken:
        worst = max(broken, key=lambda node: node.distance - node.psi)
        yield (
            f"the true distance is above Psi at {len(broken)} of {len(rows)} nodes, first at node "
            f"{broken[0].node}; at node {worst.node} it is {worst.distance:.6g} and Psi is {worst.psi:.6g}"
        )
    if watched.request is not None:
        yield from _wrong_charges(watched, watched.request, edges, evidence, slack)


def _wrong_charges(
    watched: Watched, request: RequestRow, edges: Sequence[NoiseEdge], evidence: Evidence, slack: float
) -> Iterator[str]:
    """Yield a problem for each noise edge that cost more than was charged, and one for charges above the budget."""
    final = evidence.distances.get((watched.subject, request.final_node or -1))
    if request.noise_std == 0.0 and final:
        yield f"its release is called untouched, but the clients moved it by {final:.6g}"
    spent = paid = 0.0
    for edge in edges:
        distance = evidence.distances.get((watched.subject, edge.source))
        if distance is None:
            continue
        if edge.noise_std == 0.0:
            if distance > 0.0:
                yield (
                    f"node {edge.node} was released without noise, {distance:.6g} away from the counterfactual "
                    "without it"
                )
            continue
        certain = max(0.0, distance * (1.0 - slack) - slack * evidence.lengths[edge.source])
        cost = (certain / edge.noise_std) ** 2
        spent, paid = spent + cost, paid + edge.charge
        if cost > edge.charge:
            yield (
                f"at node {edge.source} it is {distance:.6g} away, so noise {edge.noise_std:.6g} costs {cost:.6g}; "
                f"{edge.charge:.6g} was charged"
            )
        if edge.charge > watched.budget:
            yield f"it was charged {edge.charge:.6g} at node {edge.node}, its budget is {watched.budget:.6g}"
        if cost > watched.budget:
            yield f"the noise at node {edge.node} really costs {cost:.6g}, its whole budget is {watched.budget:.6g}"
    if len(edges) > 1 and max(spent, paid) > watched.budget:
        yield f"all releases together cost {spent:.6g} (charged {paid:.6g}), its budget is {watched.budget:.6g}"


def watched_subjects(audited: Audited) -> list[Watched]:
    """Return the subjects to replay the run without; a note counts subjects beyond the maximum.

    Only subjects whose request added noise are considered; of these, those with the largest charges are returned.
    If no client was forgotten, up to three active clients with the largest Psi are returned.
    """
    reader, most, index_of = audited.reader, audited.options.subjects, audited.view.index_of
    if not reader.subjects():
        active = [client for client in audited.run.status().clients if client.state == "active"]
        largest = sorted(active, key=lambda client: -client.psi)[: min(most, 3)]
        return [Watched(-1 - k, (index_of[client.name],), (client.name,)) for k, client in enumerate(largest)]
    requests = {request.request: request for request in audited.view.requests}
    names = [client.name for client in reader.clients()]
    charged: dict[int, float] = {}
    for charge in reader.charges():
        charged[charge.subject] = max(charged.get(charge.subject, 0.0), charge.charge)
    subjects = [
        Watched(row.subject, row.clients, audited.names([names[k] for k in row.clients]), requests[row.request])
        for row in reader.subjects()
        if requests[row.request].noise_node is not None
    ]
    subjects.sort(key=lambda row: (-charged.get(row.subject, 0.0), row.subject))
    if len(subjects) > most:
        largest_ones = f"the {most} with the largest charges were replayed"
        audited.notes.append(f"{len(subjects) - most} more subjects were forgotten; {largest_ones}")
    return sorted(subjects[:most], key=lambda row: row.subject)
