"""Budgets of forgotten clients: which noise at which model keeps everyone within (epsilon, delta).

A request with noise sigma is allowed at depth n if for every subject f, new or forgotten earlier,

    used_f + (Psi(n, f) / sigma)^2 <= 1 / s^2,

where noise that was added since f asked, on the path to n, makes its share 0. `used_f` are the earlier shares under
scope `all`, and 0 under the paper's scope `latest` (eq. 18 of the paper looks at the latest release only).
"""

from __future__ import annotations

import math

from sifu_paper.history import History
from sifu_paper.running import State, Subject


def to_hide(history: History, subject: Subject, depth: int) -> float:
    """Return the Psi of a subject that noise at this depth must hide."""
    covered = any(here <= depth and request >= subject.request for here, request in history.covers)
    return 0.0 if covered else float(history.psi[depth][subject.client])


def least_noise(state: State, depth: int) -> float:
    """Return the smallest sigma that every subject's budget allows at this depth; infinity if none does."""
    smallest = 0.0
    for subject in state.subjects:
        psi = to_hide(state.history, subject, depth)
        used = subject.used if state.rules.scope == "all" else 0.0
        left = 1.0 / state.multiplier**2 - used
        if psi > 0.0:
            smallest = max(smallest, psi / math.sqrt(left) if left > 1e-12 else math.inf)
    return smallest


def largest_psi(state: State, depth: int) -> float:
    """Return the largest Psi at this depth of the clients of the current request."""
    asking = [subject.client for subject in state.subjects if subject.request == state.requests]
    return max(float(state.history.psi[depth][client]) for client in asking)


def release(state: State, depth: int, sigma: float) -> None:
    """Go back to a depth and add noise, which uses every subject's budget; without noise nothing is used."""
    shares = [to_hide(state.history, subject, depth) for subject in state.subjects]
    state.history.roll_back(depth)
    if not any(shares):
        return  # nobody to hide ever moved this model
    for subject, psi in zip(state.subjects, shares, strict=True):
        subject.used += (psi / sigma) ** 2
    state.history.add_noise(sigma, state.noise(), state.requests)
