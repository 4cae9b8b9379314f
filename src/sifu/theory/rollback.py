"""Where a request rolls back to, and what its noise costs those forgotten (docs/theory.md, sections 8.2 and 9.1).

A request is allowed at a node n with noise sigma iff for every subject f, new or old,

    used_f + (Psi(n, f) / sigma)^2 <= 1 / s(eps_f, delta_f)^2,

where f that noise on the path already covers is charged nothing (`scope="all"`; the paper's rule, `scope="latest"`,
drops used_f). Also which models are kept while training, and which are erased after a request (sections 9.5 and 9.6).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sifu.choices import Retention, Scope
from sifu.errors import InputError
from sifu.theory.arrays import Floats, Integers
from sifu.theory.history import ActivePath, PsiCurve
from sifu.theory.rounding import ROUNDED_DOWN, ROUNDED_UP, slack


@dataclass(frozen=True)
class Subject:
    """Who is forgotten together: one client (`unit="client"`) or a whole request (`unit="joint"`).

    `order` is the number of the request that carries it out; `used` what released edges cost it so far.
    """

    subject: int
    clients: tuple[int, ...]
    multiplier: float
    scope: Scope
    order: int
    used: float = 0.0
    reserve: float = 0.0

    @property
    def budget(self) -> float:
        """1 / s^2, rounded down: what all charges together may reach."""
        return (1.0 / self.multiplier) ** 2 * ROUNDED_DOWN

    def left(self, order: int) -> float:
        """What a request of this order may still charge; the reserve is for the requests after its own."""
        share = 1.0 - self.reserve if order == self.order else 1.0
        used = self.used if self.scope == "all" else 0.0
        return max(0.0, self.budget * share - used)


def charge(psi: float, noise_std: float) -> float:
    """(Psi / sigma)^2, rounded up; nothing for Psi = 0, infinite without noise.

    >>> charge(0.0, 0.0), charge(1.0, 2.0) >= 0.25
    (0.0, True)
    """
    if psi == 0.0:
        return 0.0
    ratio = math.inf if noise_std == 0.0 or not math.isfinite(psi) else psi / noise_std
    if ratio > 1e150:  # its square is beyond float64
        return math.inf
    return ratio**2 * ROUNDED_UP


def begins_without(path: ActivePath, subject: Subject) -> bool:
    """Whether the path begins at a fresh model of the subject's request or a later one: it never took part on it."""
    return path.nodes[0].order >= subject.order


def is_covered(path: ActivePath, depth: int, subject: Subject) -> bool:
    """Whether noise added at or after the subject's request lies on the path to `depth`.

    An edge without noise covers no one: where a subject has nothing to hide (an exact restart) it need not, and
    a method that merely continues without the client (fine-tuning) hides nothing. A path that begins at a fresh model
    made then is covered whole.
    """
    return begins_without(path, subject) or bool(depth >= 0 and path.covering_order[depth] >= subject.order)


class Exposure:
    """A subject and its Psi along the active path; the curve is computed when it is first needed.

    A subject that is covered at every candidate node, as everyone forgotten earlier usually is, costs no look-up.
    """

    def __init__(self, subject: Subject, path: ActivePath, curve: Callable[[], PsiCurve]) -> None:
        self.subject = subject
        self.path = path
        self._make_curve = curve
        self._known: dict[int, float] = {}
        self._largest: dict[int, float] = {}

    @cached_property
    def curve(self) -> PsiCurve:
        """Psi(., subject) along the path."""
        return self._make_curve()

    def psi_to_hide_at(self, depths: Integers) -> Floats:
        """`psi_to_hide` of many depths at once, which are remembered; one by one takes a hundred times as long."""
        psi = np.zeros(depths.size)
        if not begins_without(self.path, self.subject):
            uncovered = self.path.covering_order[depths] < self.subject.order
            if uncovered.any():
                psi[uncovered] = self.curve.at(depths[uncovered])
                self._known.update(zip(depths[uncovered].tolist(), psi[uncovered].tolist(), strict=True))
        return psi

    def psi_to_hide(self, depth: int) -> float:
        """Psi that noise at `depth` must hide for this subject: zero where it is already covered."""
        return 0.0 if is_covered(self.path, depth, self.subject) else self._at(depth)

    def psi_without_noise(self, depth: int) -> float:
        """Psi at `depth`, whatever noise lies on the path; zero if the path began without the subject."""
        return 0.0 if begins_without(self.path, self.subject) else self._at(depth)

    def largest_until(self, depth: int) -> float:
        """The largest Psi at any depth up to this one."""
        if depth not in self._largest:
            self._largest[depth] = self.curve.largest_until(depth)
        return self._largest[depth]

    def _at(self, depth: int) -> float:
        if depth not in self._known:
            self._known[depth] = self.curve.one(depth)
        return self._known[depth]


@dataclass(frozen=True)
class Choice:
    """A node and a noise that every subject's budget allows, with what each of them is charged."""

    depth: int
    noise_std: float
    charges: tuple[float, ...]
    wanted_depth: int

    @property
    def exact(self) -> bool:
        """No noise is needed: no one uncovered ever touched this model."""
        return self.noise_std == 0.0


def is_allowed(exposures: Sequence[Exposure], depth: int, noise_std: float, order: int) -> bool:
    """Whether noise of this size at this depth stays within the budget of every subject."""
    return all(charge(exposure.psi_to_hide(depth), noise_std) <= exposure.subject.left(order) for exposure in exposures)


def least_noise(exposures: Sequence[Exposure], depth: int, order: int) -> float:
    """The smallest sigma with which a request is allowed at `depth`, rounded up; inf if none is.

    sigma^2 >= Psi^2 / left_f for every f, so the planner can walk over nodes instead of over sigmas.
    """
    smallest = 0.0
    for exposure in exposures:
        psi = exposure.psi_to_hide(depth)
        if psi > 0.0:
            left = exposure.subject.left(order)
            if left <= 0.0 or not math.isfinite(psi):
                return math.inf
            smallest = max(smallest, psi / math.sqrt(left) * slack(16))
    return smallest


def least_noises(exposures: Sequence[Exposure], depths: Collection[int], order: int) -> dict[int, float]:
    """`least_noise` of many depths at once."""
    places = np.array(sorted(depths), dtype=np.int64)
    smallest = np.zeros(places.size)
    for exposure in exposures:
        psi = exposure.psi_to_hide_at(places)
        left = exposure.subject.left(order)
        needed = psi / math.sqrt(left) * slack(16) if left > 0.0 else np.where(psi > 0.0, math.inf, 0.0)
        np.maximum(smallest, needed, out=smallest)
    return dict(zip(places.tolist(), smallest.tolist(), strict=True))


def choose_node(exposures: Sequence[Exposure], kept_depths: Iterable[int], noise_std: float, order: int) -> Choice:
    """The latest kept node that allows the request (eq. 18 of the paper, with charges; docs/theory.md, section 9.1).

    Every Psi is zero at the initial model, which is always kept, so there is always one. `wanted_depth` is
    the latest allowed depth whether its model was kept or not.
    """
    path = exposures[0].path
    candidates = sorted(set(kept_depths), reverse=True)
    depth = next((d for d in candidates if is_allowed(exposures, d, noise_std, order)), 0)
    charges = tuple(charge(exposure.psi_to_hide(depth), noise_std) for exposure in exposures)
    needed = any(exposure.psi_to_hide(depth) > 0.0 for exposure in exposures)
    wanted = _latest_allowed(exposures, path, noise_std, order, at_least=depth)
    return Choice(depth, noise_std if needed else 0.0, charges, wanted)


def _latest_allowed(
    exposures: Sequence[Exposure], path: ActivePath, noise_std: float, order: int, at_least: int
) -> int:
    """The latest allowed depth of the whole path, looking only where something can change."""
    if not path.constant_when_absent:
        depths = range(path.tip, at_least - 1, -1)
        return next((d for d in depths if is_allowed(exposures, d, noise_std, order)), at_least)
    # With L = 1 nothing falls along the path but where a noise edge begins to cover someone. So between two
    # participations or edges "allowed" can only turn into "not allowed", and bisection finds where.
    starts = {at_least}
    for exposure in exposures:
        if not is_covered(path, at_least, exposure.subject):
            starts.update(int(d) for d in exposure.curve.depths if d > at_least)
    starts.update(d for d, _ in path.noise_depths if d > at_least)
    stop = path.tip
    for start in sorted(starts, reverse=True):
        if is_allowed(exposures, start, noise_std, order):
            low, high = start, stop
            while low < high:
                middle = (low + high + 1) // 2
                if is_allowed(exposures, middle, noise_std, order):
                    low = middle
                else:
                    high = middle - 1
            return low
        stop = start - 1
    return at_least


def largest_psi_on_the_way(exposures: Sequence[Exposure], depth: int) -> float:
    """The largest Psi any subject that is not covered at `depth` had at or before it."""
    return max(
        (
            exposure.largest_until(depth)
            for exposure in exposures
            if not is_covered(exposure.path, depth, exposure.subject)
        ),
        default=0.0,
    )


def level_ladder(lowest: float, highest: float, ratio: float) -> Floats:
    """Levels lowest, lowest * ratio, ... up to `highest`.

    >>> level_ladder(1.0, 2.0, 1.25).round(4)
    array([1.    , 1.25  , 1.5625, 1.9531])
    """
    if not (0.0 < lowest <= highest < math.inf and ratio > 1.0):
        raise InputError(f"levels need 0 < lowest <= highest and ratio > 1, found {lowest}, {highest}, {ratio}")
    count = math.floor(math.log(highest / lowest) / math.log(ratio) + 1e-9) + 1
    return np.asarray(lowest * ratio ** np.arange(count), dtype=np.float64)


def crosses_a_level(levels: Floats, before: Floats, after: Floats) -> bool:
    """Whether some client goes from at most a level to above it: Psi(n) <= level < Psi(n+1)."""
    return bool((levels.searchsorted(after) > levels.searchsorted(before)).any())


def thin(depths: Sequence[int], protected: set[int], limit: int) -> list[int]:
    """Depths to drop so that at most `limit` stay; protected ones always stay.

    Rolling back k rounds too far costs k rounds again, and early rounds are the ones that gain most, so the
    next to go is always the one whose neighbours are closest together relative to how far training had got.
    """
    kept, dropped = sorted(depths), []
    while len(kept) > limit:
        middle = [i for i in range(1, len(kept) - 1) if kept[i] not in protected]
        if not middle:
            break
        closest = min(middle, key=lambda i: (kept[i + 1] - kept[i - 1]) / (kept[i] + 8.0))
        dropped.append(kept.pop(closest))
    return dropped


def depths_to_erase(
    depths: Sequence[int],
    cut_after: int,
    retention: Retention,
    uncovered_trace: Callable[[int], bool],
) -> list[int]:
    """Kept depths whose models must go after a rollback to `cut_after`.

    Everything later is cut off the history and still holds the forgotten. Under `strict`, so does every
    node at or before it with Psi(n, f) > 0 and no f-charged noise edge on its path (`uncovered_trace`).
    """
    return [depth for depth in depths if depth > cut_after or (retention == "strict" and uncovered_trace(depth))]
