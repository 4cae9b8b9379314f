"""What every method is called, rests on and starts from: data that planning and verification read without the methods.

`sifu.methods` implements them. A method of a user's own brings its own `MethodInfo` (docs/new-method.md).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from sifu.core.protection import Protection
from sifu.errors import InputError

StartsFrom = Literal["rule", "current", "fresh", "initial", "merge", "any"]
"""Which model a request starts from: the latest one the budgets allow, the current one, a fresh one, the initial one
of the active history (moved by stored updates), the merge of the groups that are left (a fresh one if none is), or
any."""


@dataclass(frozen=True)
class MethodInfo:
    """A method in five words.

    `certifies` is False for a heuristic, whose level is always `none`. `protection` says what a promise rests on and
    `starts_from` which model a request may start from: verification holds every request to both.
    """

    name: str
    summary: str
    certifies: bool
    protection: Protection
    starts_from: StartsFrom


METHOD_INFOS: dict[str, MethodInfo] = {
    info.name: info
    for info in (
        MethodInfo(
            "sifu",
            "roll back to the last model within the budget, add calibrated noise, retrain",
            certifies=True,
            protection="noise",
            starts_from="rule",
        ),
        MethodInfo(
            "scratch",
            "train a fresh model without the client: exact, and the slowest",
            certifies=True,
            protection="noise",
            starts_from="fresh",
        ),
        MethodInfo(
            "closed_form",
            "take the client out of the sum a ridge head is solved from, solve again: exact, no rounds or one",
            certifies=True,
            protection="noise",
            starts_from="fresh",
        ),
        MethodInfo(
            "groups",
            "merge the groups that never held the client, go on with everyone who stays: exact",
            certifies=True,
            protection="noise",
            starts_from="merge",
        ),
        MethodInfo(
            "fine_tuning",
            "go on from the current model without the client: fast, proves nothing",
            certifies=False,
            protection="nothing",
            starts_from="current",
        ),
        MethodInfo(
            "last",
            "add the noise that the current model needs, without going back, retrain",
            certifies=True,
            protection="noise",
            starts_from="current",
        ),
        MethodInfo(
            "dp",
            "rely on the clipping and noise of training, go on without the client",
            certifies=True,
            protection="training noise",
            starts_from="current",
        ),
        MethodInfo(
            "fed_eraser",
            "replay the kept rounds without the client, calibrated by a few local steps; proves nothing",
            certifies=False,
            protection="nothing",
            starts_from="initial",
        ),
        MethodInfo(
            "fed_accum",
            "add the kept updates of the others up again from the initial model; proves nothing",
            certifies=False,
            protection="nothing",
            starts_from="initial",
        ),
        MethodInfo(
            "noisy_scratch",
            "a fresh model plus sifu's noise, without the client: exact, a control",
            certifies=True,
            protection="noise",
            starts_from="fresh",
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
