"""What every method is called, rests on and starts from: data that planning and verification read without the methods.

`sifu.methods` implements them. A method of a user's own brings its own `MethodInfo` (docs/new-method.md).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from sifu.choices import Level
from sifu.errors import InputError
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
        control: Whether it is a control of experiments, which `auto` shows and never chooses.
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
_heuristic = partial(MethodInfo, certifies=False, protection="nothing")
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
        _heuristic(
            "fine_tuning",
            "go on from the current model without the client: fast, proves nothing",
            starts_from="current",
        ),
        _noised(
            "last",
            "add the noise that the current model needs, without going back, retrain",
            starts_from="current",
            takes_sigma=True,
            preserves=30,
            figures="erasable",
        ),
        MethodInfo(
            "dp",
            "rely on the clipping and noise of training, go on without the client",
            certifies=True,
            protection="training noise",
            starts_from="current",
            preserves=20,
        ),
        _heuristic(
            "fed_eraser",
            "replay the kept rounds without the client, calibrated by a few local steps; proves nothing",
            starts_from="initial",
        ),
        _heuristic(
            "fed_accum",
            "add the kept updates of the others up again from the initial model; proves nothing",
            starts_from="initial",
        ),
        _noised(
            "noisy_scratch",
            "a fresh model plus sifu's noise, without the client: exact, a control",
            starts_from="fresh",
            control=True,
            extra_premises=("noise size",),
        ),
    )
}
"""The methods by name, in the order in which people see them."""
CLOSED_FORM = "closed_form"
"""The one method of ridge heads, which no other method can do anything with."""


def method_info(name: str) -> MethodInfo:
    """The description of the method of this name, or a sentence with the known names."""
    if name not in METHOD_INFOS:
        near = difflib.get_close_matches(name, METHOD_INFOS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"unknown method {name!r}: there are {', '.join(METHOD_INFOS)}{hint}")
    return METHOD_INFOS[name]
