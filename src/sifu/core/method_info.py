"""Facts about methods, which planning and verification read without importing the methods.

`sifu.methods` implements the methods. A method of another package provides its own `MethodInfo` (docs/new-method.md).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from sifu.choices import Level
from sifu.core.extensions import METHODS, WHERE_BASELINES_ARE, provided, provided_names
from sifu.errors import InputError, MissingExtensionError
from sifu.theory.calibration import SMALLEST_DELTA, TrainingNoise, delta_reached, stated_delta, true_positive_rate

Protection = Literal["noise", "training noise", "nothing"]
"""Basis of a method's guarantee: noise added by the request, noise added during training, or nothing.

Only noise added by the request is charged to budgets and also covers the subjects of earlier requests. In this case
alone, later requests must respect the budgets of the request's clients.
"""


def delta_of_budget(
    epsilon: float, multiplier: float, untouched: bool, protection: Protection, training_noise: TrainingNoise | None
) -> float:
    """Return the delta at epsilon once the budget is fully used.

    The result is 0 if nothing needs to be hidden, and 1 if nothing is hidden. It is never between 0 and 1e-10, because
    floating-point noise cannot achieve a smaller delta.

    Args:
        epsilon: Epsilon of the request's budget.
        multiplier: Noise multiplier s of the budget.
        untouched: True if no forgotten client influenced the model.
        protection: Basis of the method's guarantee.
        training_noise: Guarantee of noise added during training, or None without such noise.

    >>> delta_of_budget(10.0, 0.31075, False, "nothing", None)
    1.0
    >>> round(delta_of_budget(10.0, 0.31075, False, "noise", None), 5)
    0.04058
    """
    if protection == "nothing":
        return 1.0
    if untouched:
        return 0.0
    if training_noise is not None:
        return training_noise.delta_composed
    return max(delta_reached(epsilon, multiplier), SMALLEST_DELTA)


def delta_of_charges(
    epsilon: float, charges: Iterable[float], protection: Protection, training_noise: TrainingNoise | None
) -> float:
    """Return the delta at epsilon that this request's release reached, computed from the charges actually spent.

    The result is rounded up to four digits, and never between 0 and 1e-10. It reveals Psi, so only the auditor's copy
    contains it.

    Args:
        epsilon: Epsilon of the request's budget.
        charges: Charges to the request's own subjects.
        protection: Basis of the method's guarantee.
        training_noise: Guarantee of noise added during training, or None without such noise.

    >>> delta_of_charges(10.0, [1 / 0.31075**2], "noise", None), delta_of_charges(10.0, [0.0], "noise", None)
    (0.04058, 0.0)
    """
    if protection == "nothing":
        return 1.0
    if training_noise is not None:
        return training_noise.delta_composed
    largest = max(charges, default=0.0)
    if largest == 0.0:
        return 0.0
    delta = stated_delta(epsilon, 1.0 / math.sqrt(largest))
    scale = 10.0 ** (3 - math.floor(math.log10(delta)))
    return min(1.0, math.ceil(delta * scale - 1e-6) / scale)


BLIND_GUESS_RATE = 0.01
"""True-positive rate of a blind guess with 1 % false alarms."""


def attacker_rate(level: Level, multiplier: float) -> float | None:
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


StartsFrom = Literal["rule", "current", "fresh", "initial", "merge", "any"]
"""Model that a request starts from.

* `rule`: the latest model that the budgets allow.
* `current`: the current model.
* `fresh`: a new model.
* `initial`: the initial model of the active history, moved by stored updates.
* `merge`: the merge of the remaining groups, or a fresh model if none remain.
* `any`: any of these models.
"""


Figures = Literal["unused", "erasable", "needed"]
"""Permission to purge the recorded figures of rounds after a method has executed a request.

`unused`: a purge may erase the figures, because the method's certificates need none. `erasable`: a purge erases them
only if the operator chooses to. `needed`: they are never erased.
"""


@dataclass(frozen=True)
class MethodInfo:
    """Facts about a method for planning, purges and verification.

    Attributes:
        name: Name in specs, terms, certificates and the ledger.
        summary: One line for users.
        certifies: False for a heuristic, whose level is always `none`.
        protection: Basis of the guarantee; verification checks every request against it.
        starts_from: Model that a request may start from; verification checks every request against it.
        takes_sigma: True if the method uses a sigma that the request gives. For a request with a sigma, `auto` chooses
            only such methods.
        control: True for a baseline or a control of experiments, which `auto` never chooses.
        preserves: Rank by the amount of training preserved. Among exact methods, `auto` chooses the largest rank, so
            that the choice does not depend on any client's data.
        figures: Permission to purge figures after its requests.
        extra_premises: Premises that its certificates must state, besides the premises that follow from the other
            facts.
    """

    name: str
    summary: str
    certifies: bool
    protection: Protection
    starts_from: StartsFrom
    takes_sigma: bool = False
    control: bool = False
    preserves: int = 0
    figures: Figures = "needed"
    extra_premises: tuple[str, ...] = ()


_noised = partial(MethodInfo, certifies=True, protection="noise")
METHOD_INFOS: dict[str, MethodInfo] = {
    info.name: info
    for info in (
        _noised(
            "sifu",
            "roll back to the last model within the budget, add calibrated noise, retrain",
            starts_from="rule",
            takes_sigma=True,
            preserves=40,
            figures="erasable",
        ),
        _noised(
            "scratch",
            "train a fresh model without the client: exact, and the slowest",
            starts_from="fresh",
            preserves=10,
            figures="unused",
        ),
        _noised(
            "closed_form",
            "remove the client from the sum of a ridge head and solve again: exact, at most one round",
            starts_from="fresh",
            preserves=60,
            figures="unused",
            extra_premises=("features", "statistics"),
        ),
        _noised(
            "groups",
            "merge the groups that never held the client, continue with the remaining clients: exact",
            starts_from="merge",
            preserves=50,
            figures="unused",
            extra_premises=("grouping", "rounds apart"),
        ),
    )
}
"""Methods by name, in display order."""
CLOSED_FORM = "closed_form"
"""Name of the only method that applies to ridge heads."""


def find_method_info(name: str) -> MethodInfo | None:
    """Return the facts about the method of this name, or None if neither sifu nor an installed package has it."""
    if name not in METHOD_INFOS and (method := provided(METHODS, name)) is not None:
        METHOD_INFOS[name] = method.info
    return METHOD_INFOS.get(name)


def method_info(name: str) -> MethodInfo:
    """Return the facts about the method of this name.

    Raises:
        InputError: If neither sifu nor an installed package has the method; the message lists the known methods.
    """
    info = find_method_info(name)
    if info is None:
        listed = [known.name for known in all_method_infos()]
        near = difflib.get_close_matches(name, listed, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"unknown method {name!r}: there are {', '.join(listed)}{hint}")
    return info


def all_method_infos() -> tuple[MethodInfo, ...]:
    """Return the facts about every method that sifu, an installed package or this process provides."""
    for name in provided_names(METHODS):
        find_method_info(name)
    return tuple(METHOD_INFOS.values())


def require_methods(names: Iterable[str]) -> None:
    """Check that the methods named in a record are installed.

    Raises:
        MissingExtensionError: If no installed package provides one of the methods.
    """
    for name in names:
        if find_method_info(name) is None:
            raise MissingExtensionError(
                f"method {name[:80]!r} is recorded, but no installed package provides it: install that package and try "
                f"again ({WHERE_BASELINES_ARE})"
            )
