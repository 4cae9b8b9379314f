"""How much one round of FedAvg moves when clients are taken out of it (docs/theory.md, section 3).

With weights w_i = |D_i| / sum_j |D_j| over the participants S, mean = sum_i w_i theta_i and server rate g,
removing a set W changes the server's increment by

    Delta_W = g || sum_{c in W∩S} w_c (theta_c - mean) || / (1 - w_W),      w_W = sum_{c in W∩S} w_c.

For one client this is the paper's Delta_c (eqs. 7, 13) = g w_c/(1 - w_c) ||theta_c - mean||. When no one
with samples would be left the counterfactual round does nothing, so Delta = g ||mean - theta^n||: tested on the
integer counts, never on w_W == 1. The counterfactual is the same schedule with W absent and its slots not refilled.

Every function returns an upper bound: inputs are already rounded up, and each result is enlarged by more
than its own rounding error.
"""

from __future__ import annotations

import math

import numpy as np

from sifu.theory.arrays import Floats, Integers
from sifu.theory.rounding import slack

ARITHMETIC_SLACK = slack(16)
"""Covers the half dozen float64 operations of a Delta or an L, each off by at most a factor 1 + 2**-53."""


def client_increments(
    samples: Integers,
    drifts: Floats,
    total_samples: int | Integers,
    mean_shift: float | Floats,
    server_rate: float,
) -> Floats:
    """Delta_c of clients taken one at a time, from scalars: g n_c / (N - n_c) drift_c (eq. 13 of the paper).

    The participants of one round, or the rounds of one client (then `total_samples` and `mean_shift` are arrays).

    >>> client_increments(np.array([1, 3]), np.array([2.0, 2.0]), 4, 1.0, 1.0).round(6)
    array([0.666667, 6.      ])
    """
    rest = total_samples - samples
    alone = rest == 0
    if not alone.any():
        return server_rate * samples / rest * drifts * ARITHMETIC_SLACK
    increments = server_rate * samples / np.where(alone, 1, rest) * drifts
    increments = np.where(alone, server_rate * mean_shift, increments)
    return increments * ARITHMETIC_SLACK


def population_increments(samples: Integers, drifts: Floats, population_samples: int, server_rate: float) -> Floats:
    """What the authors' code adds instead: n_c / (|D_I| - n_c) drift_c with |D_I| the whole federation.

    About (M-1)/(m-1) times too small when m of M clients take part. It exists to reproduce the paper's
    figures; such a run can be compared, never certified (docs/theory.md, section 3.4).
    """
    return server_rate * samples / np.maximum(population_samples - samples, 1) * drifts


def set_increment_bound(
    samples: Integers, drifts: Floats, total_samples: int, mean_shift: float, server_rate: float
) -> float:
    """Delta_W from the scalars of its members alone, by the triangle inequality (docs/theory.md, section 3.2).

    `samples` and `drifts` are those of W∩S. Delta_W <= g sum_c n_c drift_c / (N - n_W).
    """
    rest = total_samples - int(samples.sum())
    if rest == 0 and samples.size:
        return server_rate * mean_shift * ARITHMETIC_SLACK
    return float(server_rate * np.dot(samples, drifts) / max(rest, 1)) * slack(samples.size + 16)


GRAM_SPREAD = 2.0**-24
"""t in `gram_up`: what the square of a length grows by, relatively, to make room for the errors of its parts."""


def gram_up(gram: Floats, errors: Floats) -> Floats:
    """A matrix whose form n' G n is at least || sum_c n_c (theta_c - mean) ||^2 for all n >= 0 (section 3.2).

    `gram` is that of computed differences v_c, to the mean as it was computed, and `errors` bounds ||v_c - (theta_c -
    mean)|| from above. As (a + b)^2 <= (1 + t) a^2 + (1 + 1/t) b^2, (1 + t) G + (1 + 1/t) e e' will do.

    >>> bool(gram_up(np.array([[4.0]]), np.array([1e-6]))[0, 0] >= (2.0 + 1e-6) ** 2)
    True
    """
    return (1.0 + GRAM_SPREAD) * gram + (1.0 + 1.0 / GRAM_SPREAD) * np.outer(errors, errors)


def set_increment_exact(
    samples: Integers, gram: Floats, total_samples: int, mean_shift: float, server_rate: float, parameters: int
) -> float:
    """Delta_W from the Gram matrix of W∩S, as `gram_up` makes it.

    || sum_c n_c v_c ||^2 <= n' G n. A float64 inner product of `parameters` terms is off by at most that many
    times 2**-52 ||v_i|| ||v_j||, and so cancellation can make the quadratic form too small by no more than
    (sum_c n_c ||v_c||)^2 times that, which is added before the square root.
    """
    rest = total_samples - int(samples.sum())
    if rest == 0 and samples.size:
        return server_rate * mean_shift * ARITHMETIC_SLACK
    counts = samples.astype(np.float64)
    square = float(counts @ gram @ counts)
    absolute = float(counts @ np.sqrt(np.maximum(np.diag(gram), 0.0))) ** 2
    square = max(square, 0.0) + absolute * (parameters + samples.size + 16) * 2.0**-51
    return server_rate * math.sqrt(square) / max(rest, 1) * ARITHMETIC_SLACK
