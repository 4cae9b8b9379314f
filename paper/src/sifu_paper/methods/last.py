"""Last: noise on the current model, sized by the clients' Psi there; SIFU without going back.

The paper adapts Descent-to-Delete (Neel, Roth and Sharifi-Malvajerdi 2021) this way. The noise mostly destroys what was
learned.
"""

from __future__ import annotations

from sifu.theory.automatic_noise import rounded_up_sigma
from sifu_paper.budgets import least_noise, release
from sifu_paper.running import State


def last(state: State, most: int) -> int:
    """Add the least noise that the current model needs; by our rules, rounded up so that it reveals little of Psi."""
    needed = least_noise(state, state.history.depth)
    release(state, state.history.depth, needed if state.rules.sigma == "table" else rounded_up_sigma(needed))
    return 0
