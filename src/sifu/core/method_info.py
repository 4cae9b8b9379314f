"""Facts about methods, which planning and verification read without the methods themselves.

`sifu.methods` implements them. A method of another package brings its own `MethodInfo` (docs/new-method.md).
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
"""What a method's promise rests on: noise of the request, charged to budgets; noise of training; or nothing.

Only the first is charged, covers those who asked before, and binds later requests to the budgets of its clients."""


def delta_of_budget(
    epsilon: float, multiplier: float, untouched: bool, protection: Protection, training_noise: TrainingNoise | None
) -> float:
    """The delta at epsilon once the budget is used up whole: 0 where nothing needs hiding, 1 where nothing is hidden.

    Never between 0 and 1e-10: noise in floating point delivers no less.

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
    """The delta at epsilon that the release of this request reached: what was spent, not what may be.

    `charges` are those of the request's own subjects. Rounded up to four digits, and never between 0 and 1e-10. It
    tells Psi, so it stands in the auditor's copy alone.

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


def attacker_rate(level: Level, multiplier: float) -> float | None:
    """What an attacker allowed 1 % false alarms can spot at most, rounded up to four digits.

    0.01 is a blind guess: all there is at level `exact`. At level `none` nothing bounds it.

    >>> attacker_rate("proven", 0.3501), attacker_rate("exact", 0.3501), attacker_rate("none", 0.3501)
    (0.702, 0.01, None)
    """
    if level == "none":
        return None
    if level == "exact":
        return 0.01
    return math.ceil(true_positive_rate(1.0 / multiplier) * 1e4 - 1e-6) / 1e4


StartsFrom = Literal["rule", "current", "fresh", "initial", "merge", "any"]
"""Which model a request starts from: the latest one the budgets allow, the current one, a fresh one, the initial one
of the active history (moved by stored updates), the merge of the groups that are left (a fresh one if none is), or
any."""


Figures = Literal["unused", "erasable", "needed"]
"""What a purge may do to the recorded figures of rounds once a method has executed a request: erase them, because its
certificates rest on none; erase them if the operator chooses so; or nothing."""


@dataclass(frozen=True)
class MethodInfo:
    """Facts about a method, which planning, purges and verification ask for.

    Attributes:
        name: The name in specs, terms, certificates and the ledger.
        summary: One line for people.
        certifies: False for a heuristic, whose level is always `none`.
        protection: What a promise rests on; verification holds every request to it.
        starts_from: Which model a request may start from; verification holds every request to it.
        takes_sigma: Whether it honours a sigma of the request's own; `auto` takes no other method where one is given.
        control: Whether it is a baseline or control of experiments, which `auto` never takes.
        preserves: How much of the training it preserves, compared with other methods; among exact methods `auto`
            prefers the largest, so that no client's data decides between them.
        figures: What a purge may erase after its requests.
        extra_premises: Premises that its certificates must state, besides those that follow from the other facts.
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
            "take the client out of the sum a ridge head is solved from, solve again: exact, no rounds or one",
            starts_from="fresh",
            preserves=60,
            figures="unused",
            extra_premises=("features", "statistics"),
        ),
        _noised(
            "groups",
            "merge the groups that never held the client, go on with everyone who stays: exact",
            starts_from="merge",
            preserves=50,
            figures="unused",
            extra_premises=("grouping", "rounds apart"),
        ),
    )
}
"""The methods by name, in the order in which people see them."""
CLOSED_FORM = "closed_form"
"""The one method of ridge heads, which no other method can do anything with."""


def find_method_info(name: str) -> MethodInfo | None:
    """Return the facts about the method of this name; None where neither sifu nor an installed package has it."""
    if name not in METHOD_INFOS and (method := provided(METHODS, name)) is not None:
        METHOD_INFOS[name] = method.info
    return METHOD_INFOS.get(name)


def method_info(name: str) -> MethodInfo:
    """Return the facts about the method of this name.

    Raises:
        InputError: If neither sifu nor an installed package has the method; the message lists those there are.
    """
    info = find_method_info(name)
    if info is None:
        listed = [known.name for known in all_method_infos()]
        near = difflib.get_close_matches(name, listed, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"unknown method {name!r}: there are {', '.join(listed)}{hint}")
    return info


def all_method_infos() -> tuple[MethodInfo, ...]:
    """Return the facts about every method of sifu, of installed packages and of this process."""
    for name in provided_names(METHODS):
        find_method_info(name)
    return tuple(METHOD_INFOS.values())


def require_methods(names: Iterable[str]) -> None:
    """Check that the methods that a record names are installed.

    Raises:
        MissingExtensionError: If one is not.
    """
    for name in names:
        if find_method_info(name) is None:
            raise MissingExtensionError(
                f"method {name[:80]!r} is recorded, which no installed package has: install the one that provides it "
                f"and try again ({WHERE_BASELINES_ARE})"
            )
