"""A release replayed many times with fresh noise: what anyone who sees it can tell of the client at most, and at least.

The release of a request is theta + N(0, sigma^2 I) with the client and phi + N(0, sigma^2 I) without, theta and phi
the models of its source node in the two worlds. Rounds after it are post-processing and can only hide more, so
the noised model itself is attacked, by one who knows both worlds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sifu.audit.empirical import EpsilonBound, epsilon_lower_bound, gaussian_epsilon
from sifu.audit.evidence import Evidence, NoiseEdge, Watched
from sifu.core.engine import Engine
from sifu.core.layout import Vector
from sifu.core.randomness import NormalSource
from sifu.theory.arrays import Floats

STATISTICS = ("likelihood ratio", "projection", "loss")
FULL_NORMALS = 5_000_000
"""How many normals the replays of whole models draw in each world, at most."""
CHUNK_NORMALS = 2_000_000


@dataclass(frozen=True)
class Replays:
    """How many replays each statistic gets: exact one-dimensional ones, and evaluations of whole noised models."""

    replays: int = 100_000
    losses: int = 400
    mistake: float = 0.001


@dataclass(frozen=True)
class ReleaseAudit:
    """What the releases charged to one subject give away.

    `gaussian_mu` is the true distance of the two worlds in units of the noise, over all releases in scope;
    `epsilon_true` follows from it exactly. `bounds` is what tests that see only releases could show. `missed` releases
    in scope could not be replayed; with them epsilon may be larger.
    """

    epsilon_certified: float
    delta: float
    gaussian_mu: float
    epsilon_true: float
    bounds: tuple[EpsilonBound, ...]
    missed: int = 0

    @property
    def epsilon_shown(self) -> float:
        """The best of the empirical bounds; they hold together with the stated confidence."""
        return max((bound.epsilon for bound in self.bounds), default=0.0)


@dataclass(frozen=True)
class _Release:
    """One noised release: the models of its source in both worlds, and the noise as it was carried out."""

    edge: NoiseEdge
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
    """Replay what was released to hide a subject; None where no release of it could be replayed."""
    request = watched.request
    if request is None:
        return None
    releases, missed = [], 0
    for edge in (edge for edge in edges if edge.noise_std > 0.0):
        worlds = evidence.sources.get((watched.subject, edge.source))
        if worlds is None:
            missed += 1
            continue
        drawn = evidence.noise.get(edge.node)
        # Noise that cannot be what was recorded is replayed as it was carried out.
        noise_std = edge.noise_std if drawn is None or drawn.as_recorded else drawn.measured_std
        releases.append(_Release(edge, *worlds, noise_std))
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
    return ReleaseAudit(terms.epsilon, terms.delta, mu, gaussian_epsilon(mu, terms.delta), tuple(bounds), missed)


def _likelihood_ratios(mu: float, normals: NormalSource, replays: int) -> tuple[Floats, Floats]:
    """ln p(releases)/q(releases) in both worlds, over all releases in scope.

    With u_k = (theta_k - phi_k) / sigma_k and z_k = (release_k - phi_k) / sigma_k it is sum_k <u_k, z_k> - mu^2/2,
    mu^2 = sum_k |u_k|^2. z_k is u_k plus standard normals with the client, standard normals alone without; and
    sum_k <u_k, normals> / mu is one standard normal, exactly, since an inner product of independent standard normals
    with a unit vector is. So one draw per replay is enough; `_whole_models` draws all of them.
    """
    drawn = normals.standard_normal(2 * replays)
    return mu * drawn[:replays] + 0.5 * mu**2, mu * drawn[replays:] - 0.5 * mu**2


def _whole_models(
    engine: Engine, watched: Watched, release: _Release, normals: NormalSource, how_many: Replays
) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats] | None]:
    """Noised models drawn whole, in both worlds: projections on theta - phi, and minus losses on the clients' data."""
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
