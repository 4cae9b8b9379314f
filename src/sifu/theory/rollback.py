"""Choice of the rollback node and of its noise, and the charge to each forgotten subject.

See docs/theory.md, sections 8.2 and 9.1. A request is allowed at a node n with noise sigma if and only if, for every
new or old subject f,

    used_f + (Psi(n, f) / sigma)^2 <= 1 / s(eps_f, delta_f)^2,

where used_f is the sum of earlier charges to f. A subject that noise on the path already covers is charged nothing.
This module also decides which models training keeps, and which models are erased after a request (sections 9.5 and
9.6).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sifu.choices import Retention
from sifu.errors import InputError
from sifu.theory.arrays import Floats, Integers
from sifu.theory.history import ActivePath, PsiCurve
from sifu.theory.rounding import ROUNDED_DOWN, ROUNDED_UP, slack


@dataclass(frozen=True)
class Subject:
    """Subject of a guarantee: one client, by all indices that it has had.

    `order` is the number of the request that forgets the subject. `used` is the sum of its charges so far.
    """

    subject: int
    clients: tuple[int, ...]
    multiplier: float
    order: int
    used: float = 0.0

    @property
    def budget(self) -> float:
        """Upper limit of the sum of all charges: 1 / s^2, rounded down."""
        return (1.0 / self.multiplier) ** 2 * ROUNDED_DOWN

    @property
    def left(self) -> float:
        """Largest charge to this subject that a request may still make."""
        return max(0.0, self.budget - self.used)


def charge(psi: float, noise_std: float) -> float:
    """Return (Psi / sigma)^2, rounded up: zero if Psi is 0, otherwise infinite without noise.

    >>> charge(0.0, 0.0), charge(1.0, 2.0) >= 0.25
    (0.0, True)
    """
    if psi == 0.0:
        return 0.0
    ratio = math.inf if noise_std == 0.0 or not math.isfinite(psi) else psi / noise_std
    if ratio > 1e150:  # the square overflows float64
        return math.inf
    return ratio**2 * ROUNDED_UP


def begins_without(path: ActivePath, subject: Subject) -> bool:
    """Return whether the path starts from a fresh model made at or after the subject's request.

    The subject took part in no round of such a path.
    """
    return path.nodes[0].order >= subject.order


def is_covered(path: ActivePath, depth: int, subject: Subject) -> bool:
    """Return whether the path to `depth` contains noise added at or after the subject's request.

    A step without noise covers no subject: after an exact restart there is nothing to hide, and a method that merely
    continues without the client (fine-tuning) hides nothing. On a path that starts from a fresh model made at or after
    the request, the subject is covered at every depth.
    """
    return begins_without(path, subject) or bool(depth >= 0 and path.covering_order[depth] >= subject.order)


class Exposure:
    """Psi of a subject along the active path; the curve is computed on first use.

    A subject that is covered at every candidate node needs no curve. This is the usual case for subjects of earlier
    requests.
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
        """Return and cache `psi_to_hide` at many depths, a hundred times faster than one depth at a time."""
        psi = np.zeros(depths.size)
        if not begins_without(self.path, self.subject):
            uncovered = self.path.covering_order[depths] < self.subject.order
            if uncovered.any():
                psi[uncovered] = self.curve.at(depths[uncovered])
                self._known.update(zip(depths[uncovered].tolist(), psi[uncovered].tolist(), strict=True))
        return psi

    def psi_to_hide(self, depth: int) -> float:
        """Return the Psi that noise at `depth` must hide for this subject, or zero if it is already covered there."""
        return 0.0 if is_covered(self.path, depth, self.subject) else self._at(depth)

    def largest_until(self, depth: int) -> float:
        """Return the largest Psi at any depth up to `depth`."""
        if depth not in self._largest:
            self._largest[depth] = self.curve.largest_until(depth)
        return self._largest[depth]

    def _at(self, depth: int) -> float:
        if depth not in self._known:
            self._known[depth] = self.curve.one(depth)
        return self._known[depth]


@dataclass(frozen=True)
class Choice:
    """Node and noise that every subject's budget allows, with the charge to each subject."""

    depth: int
    noise_std: float
    charges: tuple[float, ...]
    wanted_depth: int

    @property
    def exact(self) -> bool:
        """True if the request needs no noise: no uncovered subject influenced this model."""
        return self.noise_std == 0.0


def is_allowed(exposures: Sequence[Exposure], depth: int, noise_std: float) -> bool:
    """Return whether noise of this size at this depth stays within the budget of every subject."""
    return all(charge(exposure.psi_to_hide(depth), noise_std) <= exposure.subject.left for exposure in exposures)


def least_noise(exposures: Sequence[Exposure], depth: int) -> float:
    """Return the smallest sigma that allows a request at `depth`, rounded up, or infinity if there is none.

    The condition is sigma^2 >= Psi^2 / left_f for every subject f. The planner can therefore search over nodes instead
    of sigmas.
    """
    smallest = 0.0
    for exposure in exposures:
        psi = exposure.psi_to_hide(depth)
        if psi > 0.0:
            left = exposure.subject.left
            if left <= 0.0 or not math.isfinite(psi):
                return math.inf
            smallest = max(smallest, psi / math.sqrt(left) * slack(16))
    return smallest


def least_noises(exposures: Sequence[Exposure], depths: Collection[int]) -> dict[int, float]:
    """Return the result of `least_noise` for each of many depths."""
    places = np.array(sorted(depths), dtype=np.int64)
    smallest = np.zeros(places.size)
    for exposure in exposures:
        psi = exposure.psi_to_hide_at(places)
        left = exposure.subject.left
        needed = psi / math.sqrt(left) * slack(16) if left > 0.0 else np.where(psi > 0.0, math.inf, 0.0)
        np.maximum(smallest, needed, out=smallest)
    return dict(zip(places.tolist(), smallest.tolist(), strict=True))


def choose_node(exposures: Sequence[Exposure], kept_depths: Iterable[int], noise_std: float) -> Choice:
    """Return the latest kept node that allows the request.

    This is equation 18 of the paper, with charges (docs/theory.md, section 9.1). The initial model is always kept and
    every Psi is zero there, so a node always exists.

    Args:
        exposures: The subjects with their Psi along the path.
        kept_depths: Depths whose models are stored.
        noise_std: Standard deviation of the noise of the request.

    Returns:
        The choice; its `wanted_depth` is the latest allowed depth, whether or not its model was kept.
    """
    path = exposures[0].path
    candidates = sorted(set(kept_depths), reverse=True)
    depth = next((d for d in candidates if is_allowed(exposures, d, noise_std)), 0)
    charges = tuple(charge(exposure.psi_to_hide(depth), noise_std) for exposure in exposures)
    needed = any(exposure.psi_to_hide(depth) > 0.0 for exposure in exposures)
    wanted = _latest_allowed(exposures, path, noise_std, at_least=depth)
    return Choice(depth, noise_std if needed else 0.0, charges, wanted)


def _latest_allowed(exposures: Sequence[Exposure], path: ActivePath, noise_std: float, at_least: int) -> int:
    """Return the latest allowed depth on the whole path; only depths at which the answer can change are tested."""
    if not path.constant_when_absent:
        depths = range(path.tip, at_least - 1, -1)
        return next((d for d in depths if is_allowed(exposures, d, noise_std)), at_least)
    # With L = 1, the Psi to hide decreases only where noise starts to cover a subject. Between such depths and depths
    # of participation, "allowed" can therefore only turn into "not allowed", and bisection finds the change.
    starts = {at_least}
    for exposure in exposures:
        if not is_covered(path, at_least, exposure.subject):
            starts.update(int(d) for d in exposure.curve.depths if d > at_least)
    starts.update(d for d, _ in path.noise_depths if d > at_least)
    stop = path.tip
    for start in sorted(starts, reverse=True):
        if is_allowed(exposures, start, noise_std):
            low, high = start, stop
            while low < high:
                middle = (low + high + 1) // 2
                if is_allowed(exposures, middle, noise_std):
                    low = middle
                else:
                    high = middle - 1
            return low
        stop = start - 1
    return at_least


def largest_psi_on_the_way(exposures: Sequence[Exposure], depth: int) -> float:
    """Return the largest Psi at or before `depth` of any subject that is not covered at `depth`."""
    return max(
        (
            exposure.largest_until(depth)
            for exposure in exposures
            if not is_covered(exposure.path, depth, exposure.subject)
        ),
        default=0.0,
    )


def level_ladder(lowest: float, highest: float, ratio: float) -> Floats:
    """Return the levels lowest, lowest * ratio, ... up to `highest`.

    >>> level_ladder(1.0, 2.0, 1.25).round(4)
    array([1.    , 1.25  , 1.5625, 1.9531])
    """
    if not (0.0 < lowest <= highest < math.inf and ratio > 1.0):
        raise InputError(f"levels need 0 < lowest <= highest and ratio > 1, found {lowest}, {highest}, {ratio}")
    count = math.floor(math.log(highest / lowest) / math.log(ratio) + 1e-9) + 1
    return np.asarray(lowest * ratio ** np.arange(count), dtype=np.float64)


def crosses_a_level(levels: Floats, before: Floats, after: Floats) -> bool:
    """Return whether any client's Psi rises above a level in a round: Psi(n) <= level < Psi(n+1)."""
    return bool((levels.searchsorted(after) > levels.searchsorted(before)).any())


def thin(depths: Sequence[int], protected: set[int], limit: int) -> list[int]:
    """Return the depths to drop so that at most `limit` stay; the first, the last and protected depths always stay.

    Rolling back k rounds too far costs k extra rounds, and early rounds improve the model most. The next depth to drop
    is therefore the depth whose neighbours are closest together relative to the depth itself.
    """
    kept, dropped = sorted(depths), []
    while len(kept) > limit:
        closeness = [
            ((after - before) / (depth + 8.0), place)
            for place, (before, depth, after) in enumerate(zip(kept, kept[1:], kept[2:], strict=False), 1)
            if depth not in protected
        ]
        if not closeness:
            break
        dropped.append(kept.pop(min(closeness)[1]))
    return dropped


def depths_to_erase(
    depths: Sequence[int],
    cut_after: int,
    retention: Retention,
    uncovered_trace: Callable[[int], bool],
) -> list[int]:
    """Return the kept depths whose models must be erased after a rollback to `cut_after`.

    Models after `cut_after` leave the history and may depend on the forgotten clients. Under `strict`, a model at or
    before `cut_after` is erased as well if it depends on a forgotten client that no noise on its path covers.

    Args:
        depths: Depths whose models are stored.
        cut_after: Depth of the rollback.
        retention: Retention rule of the run.
        uncovered_trace: Function that tells whether the model at a depth depends on such a client.
    """
    return [depth for depth in depths if depth > cut_after or (retention == "strict" and uncovered_trace(depth))]
