"""Change of a FedAvg round when clients are removed (docs/theory.md, section 3), and the resulting update of every Psi.

With weights w_i = |D_i| / sum_j |D_j| over the participants and mean = sum_i w_i theta_i, removing a client c changes
the mean by the paper's Delta_c (eqs. 7, 13) = w_c/(1 - w_c) ||theta_c - mean||. If no client with samples remains, the
counterfactual round does nothing and Delta = ||mean - theta^n||. This is tested on the integer counts, never on
w_c == 1. The counterfactual is the same schedule with c absent and its slot not refilled.

Every function returns an upper bound: inputs are already rounded up, and each result is enlarged by more than its own
rounding error.

Updating Psi of every client takes O(participants) per round (theorem 1, eq. 9 of the paper; docs/theory.md, section 4).
All clients absent from a round share one L, so it is applied to a common scale, Psi_c = scale * value_c, and only the
participants' values are rewritten. The floating-point allowance is the same for all clients and is stored as one number
(section 6.4).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sifu.theory.arrays import Floats, Integers
from sifu.theory.participation import ClientIndices
from sifu.theory.regularity import RoundRegularity
from sifu.theory.rounding import ROUNDED_UP, slack, up

ARITHMETIC_SLACK = slack(16)
"""Factor that covers the rounding errors of a Delta or an L, which takes about six float64 operations."""


def client_increments(
    samples: Integers, drifts: Floats, total_samples: int | Integers, mean_shift: float | Floats
) -> Floats:
    """Return Delta_c of clients taken one at a time: n_c / (N - n_c) drift_c (eq. 13 of the paper).

    The arrays hold either the participants of one round, or the rounds of one client.

    Args:
        samples: Number of samples n_c of each client.
        drifts: Distance ||theta_c - mean|| of each client's model from the mean.
        total_samples: N, an array for the rounds of one client.
        mean_shift: ||mean - theta^n||, an array for the rounds of one client.

    >>> client_increments(np.array([1, 3]), np.array([2.0, 2.0]), 4, 1.0).round(6)
    array([0.666667, 6.      ])
    """
    rest = total_samples - samples
    alone = rest == 0
    if not alone.any():
        return samples / rest * drifts * ARITHMETIC_SLACK
    increments = np.where(alone, mean_shift, samples / np.where(alone, 1, rest) * drifts)
    return increments * ARITHMETIC_SLACK


_SCALE_RANGE = (1e-100, 1e100)
SMALLEST_TRACE = 2.0**-1000
"""Smallest Psi of a client that took part. Only a client that never took part has Psi zero, which certifies `exact`."""


@dataclass(frozen=True)
class RoundScalars:
    """Quantities of one round from which the Psi of every client is updated."""

    participants: ClientIndices
    increments: Floats
    own_contractions: Floats
    absent_contraction: float
    rounding: float
    rounding_growth: float


def summarise_round(
    participants: ClientIndices,
    samples: Integers,
    drifts: Floats,
    mean_shift: float,
    rounding: float,
    *,
    factors: Floats,
) -> tuple[RoundRegularity, RoundScalars]:
    """Return a round's regularity and the quantities that update Psi: Delta_c, L_n(c), and the L of absent clients.

    Args:
        participants: Indices of the participants.
        samples: Number of samples n_c of each participant.
        drifts: ||theta_c - mean|| of each participant.
        mean_shift: Distance ||mean - theta^n|| that the mean moved.
        rounding: Floating-point allowance of the round.
        factors: Expansion P_i of each participant.
    """
    regularity = RoundRegularity.of(samples, factors)
    return regularity, RoundScalars(
        participants,
        client_increments(samples, drifts, regularity.total_samples, mean_shift),
        regularity.without(samples.astype(np.float64), factors),
        regularity.absent,
        rounding,
        rounding_growth(regularity),
    )


def rounding_growth(regularity: RoundRegularity) -> float:
    """Return an upper bound on every L of the round: max(1, max P_i) (docs/theory.md, section 6.4)."""
    return 1.0 if regularity.factor_max <= 1.0 else regularity.factor_max * ROUNDED_UP


def gather_rounding(gathered: float, growth: float, rounding: float) -> float:
    """Return R' = growth R + r, rounded up."""
    carried = gathered if growth == 1.0 or gathered == 0.0 else up(gathered * growth)
    return up(carried + rounding) if rounding else carried


class SensitivityTracker:
    """Psi(n, c) of all clients at the tip of the active history."""

    def __init__(self, client_count: int) -> None:
        self._values: Floats = np.zeros(client_count)
        self._seen = np.zeros(client_count, dtype=bool)
        self._scale = 1.0
        self.rounding = 0.0
        """R(n), the accumulated floating-point allowance."""

    def copy(self) -> SensitivityTracker:
        """Return an independent copy of the state."""
        result = SensitivityTracker(0)
        result._values, result._seen = self._values.copy(), self._seen.copy()
        result._scale, result.rounding = self._scale, self.rounding
        return result

    def add_rounding(self, rounding: float) -> None:
        """Add the rounding allowance for added noise, which increases every distance by at most `rounding`."""
        self.rounding = gather_rounding(self.rounding, 1.0, rounding)

    @property
    def client_count(self) -> int:
        """Number of tracked clients."""
        return int(self._values.size)

    def bare(self, clients: ClientIndices) -> Floats:
        """Return Psi of these clients without the rounding allowance."""
        return self._read(self._values[clients])

    def total(self, clients: ClientIndices, rounding: float | None = None) -> Floats:
        """Return Psi(n, c) with the rounding allowance, or with `rounding` instead.

        Psi is zero for a client that never took part.
        """
        allowance = self.rounding if rounding is None else rounding
        total = np.maximum((self.bare(clients) + allowance) * ROUNDED_UP, SMALLEST_TRACE)
        return np.where(self._seen[clients], total, 0.0)

    def update(self, scalars: RoundScalars) -> tuple[Floats, Floats]:
        """Update every Psi by one round; return the participants' Psi before and after it, without the allowance."""
        who = scalars.participants
        before = self.bare(who)
        if scalars.absent_contraction != 1.0:
            self._rescale(scalars.absent_contraction)
        with np.errstate(over="ignore", invalid="ignore"):
            grown = before * scalars.own_contractions * ROUNDED_UP
            # Zero stays zero and infinity stays infinity, whatever the factor.
            after = np.where((scalars.own_contractions == 1.0) | (before == 0.0) | np.isinf(before), before, grown)
            after = np.where(scalars.increments > 0.0, (after + scalars.increments) * ROUNDED_UP, after)
            self._values[who] = after if self._scale == 1.0 else after / self._scale * ROUNDED_UP
        self._seen[who] = True
        self.rounding = gather_rounding(self.rounding, scalars.rounding_growth, scalars.rounding)
        return before, after

    def _read(self, values: Floats) -> Floats:
        if self._scale == 1.0:
            return values.copy()
        with np.errstate(over="ignore", invalid="ignore"):
            return np.where((values == 0.0) | np.isinf(values), values, values * self._scale * ROUNDED_UP)

    def _rescale(self, factor: float) -> None:
        self._scale *= factor * ROUNDED_UP if factor else 0.0
        if not _SCALE_RANGE[0] < self._scale < _SCALE_RANGE[1]:
            with np.errstate(over="ignore", invalid="ignore"):
                scaled = self._values * self._scale * ROUNDED_UP
            # 0 * inf: a client that never took part stays at exactly zero, and an infinite Psi stays infinite.
            self._values = np.where((self._values == 0.0) | np.isinf(self._values), self._values, scaled)
            self._scale = 1.0
