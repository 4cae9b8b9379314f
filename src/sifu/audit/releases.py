"""Upper and lower bounds on how much a release reveals about a client.

A lower bound on epsilon follows from replays, with confidence (Jagielski, Ullman & Oprea 2020; Nasr et al. 2023). Let P
be the distribution of the release with the client and Q the one without. If they are (epsilon, delta)-close, every test
that says "P" with rates TPR = P(test) and FPR = Q(test) has

    TPR <= e^epsilon FPR + delta,      so      epsilon >= ln((TPR - delta) / FPR).

The test (a statistic, a threshold, a side) is chosen on one half of the replays, and its rates are counted on the
other half. Clopper & Pearson's intervals bound both rates at once, so the bound holds with the stated confidence
for every statistic.

The release of a request is theta + N(0, sigma^2 I) with the client and phi + N(0, sigma^2 I) without, where theta and
phi are the models of its source node. Later rounds are post-processing and can only hide more. The audit therefore
attacks the noised model itself, with knowledge of both theta and phi.

An exact certificate is compared, by digests, with the counterfactual without the client. The released model must equal
the model that the same rounds give in an engine that never had the client's data. For a head in closed form, the sum is
recomputed from the data of the remaining clients, and its digest must be the recorded one. If no such engine can be
built, nothing is recomputed, and the audit says so.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sifu.audit.replay_evidence import Evidence, NoiseEdge, Watched, made_of
from sifu.core.engine import Engine
from sifu.core.layout import Vector
from sifu.core.round import NormalSource
from sifu.errors import InputError
from sifu.requests.certification import solves
from sifu.run.coupled_replay import EngineWithout, replay_counterfactuals
from sifu.store.events_check import ReplayedLedger
from sifu.store.files import model_bytes, model_salt
from sifu.store.reader import RunReader
from sifu.store.statistics_files import read_statistics
from sifu.theory.arrays import Floats, Integers
from sifu.theory.calibration import gaussian_epsilon
from sifu.theory.history import PathNode

THRESHOLDS = 400
"""Number of thresholds tried on the first half."""
FEWEST_REPLAYS = 20


@dataclass(frozen=True)
class EpsilonBound:
    """Lower bound that one statistic shows: epsilon is at least `epsilon`, with confidence `confidence`.

    `true_positive_rate` is a lower and `false_positive_rate` an upper confidence limit on the measuring half. If the
    chosen `side` is "without", a positive is the verdict that the client was absent.
    """

    statistic: str
    epsilon: float
    confidence: float
    replays: int
    true_positive_rate: float
    false_positive_rate: float
    side: str


def clopper_pearson(hits: Integers, trials: int, mistake: float) -> tuple[Floats, Floats]:
    """Return confidence limits of rates (Clopper & Pearson 1934).

    Args:
        hits: Number of successes for each rate.
        trials: Number of trials.
        mistake: Maximum probability that a limit is wrong.

    Returns:
        The lower and the upper limits.
    """
    from scipy.special import betaincinv

    counts = hits.astype(np.float64)
    inner_low, inner_high = np.maximum(counts, 1.0), np.minimum(counts, trials - 1.0)
    lower = np.where(hits == 0, 0.0, betaincinv(inner_low, trials - inner_low + 1.0, mistake))
    upper = np.where(hits == trials, 1.0, betaincinv(inner_high + 1.0, trials - inner_high, 1.0 - mistake))
    return lower, upper


def epsilon_lower_bound(
    with_client: Floats, without_client: Floats, delta: float, mistake: float = 0.01, statistic: str = "statistic"
) -> EpsilonBound:
    """Return the largest epsilon that a threshold on a statistic shows.

    Args:
        with_client: Values of the statistic in independent replays with the client.
        without_client: Values in independent replays without the client.
        delta: The delta of the budget.
        mistake: Maximum probability that the bound is wrong.
        statistic: Name of the statistic.
    """
    if min(with_client.size, without_client.size) < FEWEST_REPLAYS:
        raise InputError(
            f"{min(with_client.size, without_client.size)} replays are too few to bound epsilon: use {FEWEST_REPLAYS} "
            "at least, 10000 are usual"
        )
    best = (-math.inf, 0.0, "with", 1.0)
    for sign in (1.0, -1.0):  # the client may increase or decrease the statistic
        choose_p, choose_q = np.sort(sign * with_client[::2]), np.sort(sign * without_client[::2])
        thresholds = _thresholds(choose_p, choose_q)
        for side in ("with", "without"):
            bounds = _bounds(choose_p, choose_q, thresholds, side, delta, mistake)[0]
            place = int(np.argmax(bounds))
            best = max(best, (float(bounds[place]), float(thresholds[place]), side, sign))
    _, threshold, side, sign = best
    measure_p, measure_q = np.sort(sign * with_client[1::2]), np.sort(sign * without_client[1::2])
    epsilon, rates, alarms = _bounds(measure_p, measure_q, np.array([threshold]), side, delta, mistake)
    return EpsilonBound(
        statistic,
        max(0.0, float(epsilon[0])),
        1.0 - mistake,
        int(with_client.size),
        float(rates[0]),
        float(alarms[0]),
        side,
    )


def _thresholds(values_p: Floats, values_q: Floats) -> Floats:
    """Return candidate thresholds: evenly spaced by rank, and the outermost values, because tails matter most."""
    pooled = np.sort(np.concatenate([values_p, values_q]))
    ranks = np.linspace(0, pooled.size - 1, THRESHOLDS).astype(np.int64)
    edges = np.arange(min(50, pooled.size))
    return np.unique(pooled[np.concatenate([ranks, edges, pooled.size - 1 - edges])])


def _bounds(
    values_p: Floats, values_q: Floats, thresholds: Floats, side: str, delta: float, mistake: float
) -> tuple[Floats, Floats, Floats]:
    """Return ln((TPR_low - delta) / FPR_high) at each threshold, and both limits; the values must be sorted."""
    above_p = values_p.size - np.searchsorted(values_p, thresholds, side="right")
    above_q = values_q.size - np.searchsorted(values_q, thresholds, side="right")
    if side == "with":
        hits, alarms, trials_hits, trials_alarms = above_p, above_q, values_p.size, values_q.size
    else:
        trials_hits, trials_alarms = values_q.size, values_p.size
        hits, alarms = values_q.size - above_q, values_p.size - above_p
    rate = clopper_pearson(hits, trials_hits, mistake / 2.0)[0]
    alarm = clopper_pearson(alarms, trials_alarms, mistake / 2.0)[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        shown = np.log(np.maximum(rate - delta, 0.0) / alarm)
    return shown, rate, alarm


STATISTICS = ("likelihood ratio", "projection", "loss")
FULL_NORMALS = 5_000_000
"""Maximum number of normals drawn for replays of whole models: this many with the client, and as many without it."""
CHUNK_NORMALS = 2_000_000
FARTHEST = 4e4
"""Distance, in units of the noise, beyond which a release hides nothing: epsilon is of the order of its square."""


@dataclass(frozen=True)
class Replays:
    """Numbers of replays: `replays` for one-dimensional statistics, `losses` for evaluations of whole noised models."""

    replays: int = 100_000
    losses: int = 400
    mistake: float = 0.001


@dataclass(frozen=True)
class ReleaseAudit:
    """Leakage of the releases that are charged to one subject.

    `gaussian_mu` is the true distance of the models with and without the client in units of the noise, over all
    releases in scope; `epsilon_true` follows from it exactly. `bounds` holds the lower bounds on epsilon from tests
    that use the releases alone. `missed` counts releases in scope that could not be replayed; with them epsilon may be
    larger.
    """

    epsilon_certified: float
    delta: float
    gaussian_mu: float
    epsilon_true: float
    bounds: tuple[EpsilonBound, ...]
    missed: int = 0

    @property
    def epsilon_shown(self) -> float:
        """Best of the empirical bounds, which hold jointly with the stated confidence."""
        return max((bound.epsilon for bound in self.bounds), default=0.0)


@dataclass(frozen=True)
class _Release:
    """One noised release: its source models with and without the client, and the noise that was added."""

    with_client: Vector
    without_client: Vector
    noise_std: float

    @property
    def difference(self) -> Floats:
        return self.with_client.astype(np.float64) - self.without_client.astype(np.float64)

    @property
    def gaussian_mu(self) -> float:
        return float(np.linalg.norm(self.difference)) / self.noise_std


def audit_releases(
    engine: Engine,
    watched: Watched,
    edges: Sequence[NoiseEdge],
    evidence: Evidence,
    normals: NormalSource,
    how_many: Replays,
) -> ReleaseAudit | None:
    """Replay the releases that hide a subject; return None if none of them can be replayed.

    Args:
        engine: Engine of the run.
        watched: The subject.
        edges: Noise edges that are charged to the subject.
        evidence: Models from the replay of the run.
        normals: Source of the audit's noise.
        how_many: Number of replays.
    """
    request = watched.request
    if request is None:
        return None
    releases, missed = [], 0
    for edge in (edge for edge in edges if edge.noise_std > 0.0):
        counterfactuals = evidence.sources.get((watched.subject, edge.source))
        if counterfactuals is None:
            missed += 1
            continue
        drawn = evidence.noise.get(edge.node)
        # Noise that contradicts its record is replayed as it was drawn.
        noise_std = edge.noise_std if drawn is None or drawn.as_recorded else drawn.measured_std
        releases.append(_Release(*counterfactuals, noise_std))
    if not releases:
        return None
    strongest = max(releases, key=lambda release: release.gaussian_mu)
    terms = request.terms
    in_scope = releases if terms.scope == "all" else [strongest]
    mu = math.sqrt(sum(release.gaussian_mu**2 for release in in_scope))
    bounds: list[EpsilonBound] = []
    if mu > 0.0:
        share = how_many.mistake / len(STATISTICS)
        delta = terms.delta
        scores = _likelihood_ratios(mu, normals, how_many.replays)
        bounds.append(epsilon_lower_bound(*scores, delta, share, STATISTICS[0]))
        projections, losses = _whole_models(engine, watched, strongest, normals, how_many)
        bounds.append(epsilon_lower_bound(*projections, delta, share, STATISTICS[1]))
        if losses is not None:
            bounds.append(epsilon_lower_bound(*losses, delta, share, STATISTICS[2]))
    true = gaussian_epsilon(mu, terms.delta) if mu < FARTHEST else math.inf
    return ReleaseAudit(terms.epsilon, terms.delta, mu, true, tuple(bounds), missed)


def _likelihood_ratios(mu: float, normals: NormalSource, replays: int) -> tuple[Floats, Floats]:
    """Return ln p(releases)/q(releases) with and without the client, over all releases in scope.

    With u_k = (theta_k - phi_k) / sigma_k and z_k = (release_k - phi_k) / sigma_k it is sum_k <u_k, z_k> - mu^2/2,
    mu^2 = sum_k |u_k|^2. z_k is u_k plus standard normals with the client, and standard normals alone without. The
    inner product of standard normals with a unit vector is standard normal, so sum_k <u_k, normals> / mu is one
    standard normal exactly. One draw per replay is enough; `_whole_models` draws all of them.
    """
    drawn = normals.standard_normal(2 * replays)
    return mu * drawn[:replays] + 0.5 * mu**2, mu * drawn[replays:] - 0.5 * mu**2


def _whole_models(
    engine: Engine, watched: Watched, release: _Release, normals: NormalSource, how_many: Replays
) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats] | None]:
    """Draw whole noised models with and without the client.

    Returns:
        The projections on theta - phi, and the negative losses on the clients' data, each with and without the client.
    """
    size = release.with_client.size
    replays = int(min(how_many.replays, max(200, FULL_NORMALS // size)))
    difference = release.difference
    direction = difference / np.linalg.norm(difference)
    origin = release.without_client.astype(np.float64)
    clients = np.array(watched.clients, dtype=np.int64)
    rows = max(1, CHUNK_NORMALS // size)
    projections: list[Floats] = []
    losses: list[Floats] = []
    for model in (release.with_client, release.without_client):
        exact = model.astype(np.float64)
        projected, lost = np.empty(replays), np.empty(min(how_many.losses, replays))
        for start in range(0, replays, rows):
            count = min(rows, replays - start)
            noise = normals.standard_normal(count * size).reshape(count, size)
            projected[start : start + count] = (exact - origin) @ direction + release.noise_std * (noise @ direction)
            for row in range(start, min(start + count, lost.size)):
                released = (exact + release.noise_std * noise[row - start]).astype(model.dtype)
                lost[row] = -engine.evaluate(released, clients).loss
        projections.append(projected)
        losses.append(lost)
    enough = how_many.losses >= 20 and all(np.isfinite(loss).all() for loss in losses)
    return (projections[0], projections[1]), (losses[0], losses[1]) if enough else None


@dataclass(frozen=True)
class ExactAudit:
    """One exact request of one subject, as digests.

    `released` is the recorded model, `without` the counterfactual one without the clients. `without` is None if it was
    not recomputed, or not compared because the released file was erased together with its salt. `sum_recorded` and
    `sum_without` belong to a head in closed form: the sum it was solved from, and the sum recomputed from the data
    of the remaining clients while the file of the sum exists.
    """

    request: str
    clients: tuple[str, ...]
    released: str
    without: str | None
    sum_recorded: str | None = None
    sum_without: str | None = None

    @property
    def same_model(self) -> bool:
        """True if the two models are bit-identical."""
        return self.released == self.without

    @property
    def same_sum(self) -> bool:
        """True if the two sums are equal, or if there are none to compare."""
        return self.sum_without is None or self.sum_recorded == self.sum_without


def exact_audits(
    engine_without: Callable[[Collection[int]], EngineWithout | None],
    reader: RunReader,
    watched: Sequence[Watched],
    evidence: Evidence,
) -> Iterator[tuple[ExactAudit, bool]]:
    """Yield every exact release of the subjects, and whether it equals the counterfactual.

    Args:
        engine_without: Returns an engine without the data of these clients, which computes the counterfactual from
            the beginning, or None.
        reader: Reader of the run.
        watched: The subjects.
        evidence: Models from the replay of the run.
    """
    digests, recorded = ReplayedLedger.of(reader).model_digests, solves(reader)
    everyone = engine_without(()) if any("trunks" in solve for solve in recorded.values()) else None
    for subject in watched:
        request = subject.request
        if request is None or request.level != "exact" or request.final_node is None:
            continue
        final, solve = request.final_node, recorded.get(request.final_node)
        here, other = evidence.finals.get((subject.subject, final)), engine_without(subject.clients)
        model = without = sum_without = those_who_stay = None
        taken = reader.everyone().between(final, final).clients
        if other is not None and everyone is not None and solve is not None:
            counterfactuals = [
                counterfactual.solved_again(reader, solve, taken) for counterfactual in (everyone, other)
            ]
            if counterfactuals[0] is not None and counterfactuals[1] is not None:
                (here, _), (model, those_who_stay) = counterfactuals[0], counterfactuals[1]
        elif other is not None and other.layout == reader.layout and here is not None:
            model = _model_without(other, reader, subject, final, evidence)
        same_counterfactuals = model is not None and here is not None and np.array_equal(here, model)
        if model is not None and final in reader.models():
            salt = model_salt(reader.model_content(final))
            without = hashlib.sha256(model_bytes(reader.layout, model, salt)).hexdigest()
        elif model is not None and not same_counterfactuals:
            without = "another model"
        whole = next((row for row in reader.statistics().values() if solve and row.digest == solve["sum"]), None)
        if other is not None and whole is not None:
            those_who_stay = those_who_stay or other.sum_of(taken)
            same = those_who_stay == read_statistics(reader.folder, whole, other.fixed)
            sum_without = whole.digest if same else "other statistics"
        elif solve is not None and whole is None and final == reader.tip and reader.statistics():
            sum_without = "other statistics"  # the stored sum of the current head is a different one
        yield (
            ExactAudit(
                request.request,
                subject.names,
                digests[final],
                without,
                None if whole is None else whole.digest,
                sum_without,
            ),
            same_counterfactuals,
        )


def _model_without(
    other: EngineWithout, reader: RunReader, subject: Watched, final: int, evidence: Evidence
) -> Vector | None:
    """Return the counterfactual model of node `final` without the subject, or None if a step cannot be recomputed."""

    def noised(node: PathNode, source: Vector) -> Vector | None:
        """Apply the recorded noise of the edge to the source of the counterfactual."""
        if node.node not in evidence.edges:
            return None
        theirs, made_of_it = evidence.edges[node.node]
        if np.array_equal(theirs, source):
            return made_of_it
        moved = made_of_it.astype(np.float64) + (source.astype(np.float64) - theirs.astype(np.float64))
        return moved.astype(source.dtype)

    counterfactuals = {subject.subject: subject.clients}
    for replayed in replay_counterfactuals(other, reader, counterfactuals, noised, made_of(reader, final)):
        if replayed.node.node == final:
            return replayed.without[subject.subject]
    return None
