"""Facts about methods, which planning and verification read without importing `sifu.methods`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sifu.errors import InputError
from sifu.theory.calibration import SMALLEST_DELTA, delta_reached, stated_delta, true_positive_rate


def delta_of_budget(epsilon: float, multiplier: float, untouched: bool) -> float:
    """Return the delta at epsilon once the budget is fully used.

    The result is 0 if nothing needs to be hidden. It is never between 0 and 1e-10, because floating-point noise cannot
    achieve a smaller delta.

    Args:
        epsilon: Epsilon of the request's budget.
        multiplier: Noise multiplier s of the budget.
        untouched: True if no forgotten client influenced the model.

    >>> delta_of_budget(10.0, 0.31075, True)
    0.0
    >>> round(delta_of_budget(10.0, 0.31075, False), 5)
    0.04058
    """
    return 0.0 if untouched else max(delta_reached(epsilon, multiplier), SMALLEST_DELTA)


def delta_of_charges(epsilon: float, charges: Iterable[float]) -> float:
    """Return the delta at epsilon that this request's release reached, computed from the charges actually spent.

    The result is rounded up to four digits, and never between 0 and 1e-10. It reveals Psi, so only the auditor's copy
    contains it.

    >>> delta_of_charges(10.0, [1 / 0.31075**2]), delta_of_charges(10.0, [0.0])
    (0.04058, 0.0)
    """
    largest = max(charges, default=0.0)
    if largest == 0.0:
        return 0.0
    delta = stated_delta(epsilon, 1.0 / math.sqrt(largest))
    scale = 10.0 ** (3 - math.floor(math.log10(delta)))
    return min(1.0, math.ceil(delta * scale - 1e-6) / scale)


BLIND_GUESS_RATE = 0.01
"""True-positive rate of a blind guess with 1 % false alarms."""


def attacker_rate(level: str, multiplier: float) -> float | None:
    """Return the largest true-positive rate of an attacker with 1 % false alarms, rounded up to four digits.

    At level `exact` the rate is 0.01, that of a blind guess. At level `none` there is no bound, and the result is None.

    >>> attacker_rate("proven", 0.3501), attacker_rate("exact", 0.3501), attacker_rate("none", 0.3501)
    (0.702, 0.01, None)
    """
    if level == "none":
        return None
    if level == "exact":
        return BLIND_GUESS_RATE
    return math.ceil(true_positive_rate(1.0 / multiplier) * 1e4 - 1e-6) / 1e4


StartsFrom = Literal["rule", "fresh", "merge"]
"""Model that a request starts from.

* `rule`: the latest model that the budgets allow.
* `fresh`: a new model.
* `merge`: the merge of the remaining groups, or a fresh model if none remain.
"""


@dataclass(frozen=True)
class MethodInfo:
    """Facts about a method for planning and verification.

    Attributes:
        name: Name in specs, terms, certificates and the ledger.
        summary: One line for users.
        starts_from: Model that a request may start from; verification checks every request against it.
        takes_sigma: True if the method uses a sigma that the request gives. For a request with a sigma, `auto` chooses
            only such methods.
        preserves: Rank by the amount of training preserved. Among exact methods, `auto` chooses the largest rank, so
            that the choice does not depend on any client's data.
        extra_premises: Premises that its certificates must state, besides the premises that follow from the other
            facts.
    """

    name: str
    summary: str
    starts_from: StartsFrom
    takes_sigma: bool = False
    preserves: int = 0
    extra_premises: tuple[str, ...] = ()


METHOD_INFOS: dict[str, MethodInfo] = {
    info.name: info
    for info in (
        MethodInfo(
            "sifu",
            "roll back to the last model within the budget, add calibrated noise, retrain",
            starts_from="rule",
            takes_sigma=True,
            preserves=40,
        ),
        MethodInfo(
            "scratch",
            "train a fresh model without the client: exact, and the slowest",
            starts_from="fresh",
            preserves=10,
        ),
        MethodInfo(
            "closed_form",
            "remove the client from the sum of a ridge head and solve again: exact, at most one round",
            starts_from="fresh",
            preserves=60,
            extra_premises=("features", "statistics"),
        ),
        MethodInfo(
            "groups",
            "merge the groups that never held the client, continue with the remaining clients: exact",
            starts_from="merge",
            preserves=50,
            extra_premises=("grouping", "rounds apart"),
        ),
    )
}
"""Methods by name, in display order."""
CLOSED_FORM = "closed_form"
"""Name of the only method that applies to ridge heads."""


def method_info(name: str) -> MethodInfo:
    """Return the facts about the method of this name; raise `InputError` if there is none."""
    info = METHOD_INFOS.get(name)
    if info is None:
        near = difflib.get_close_matches(name, METHOD_INFOS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"unknown method {name[:80]!r}: there are {', '.join(METHOD_INFOS)}{hint}")
    return info
