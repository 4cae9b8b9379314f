"""What a request asks for: whom to forget, under which budget, by which method."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from sifu.core.spec import StopSpec
from sifu.errors import InputError
from sifu.theory.calibration import Calibration, check_deliverable, check_noise, noise_multiplier
from sifu.theory.retention import Retention
from sifu.theory.rollback import Scope, Unit

SigmaChoice = float | Literal["auto"]
MOST_ROUNDS = 10**9
"""More than anybody trains, and few enough for the database."""


@dataclass(frozen=True)
class RequestTerms:
    """The terms of one request; `clients` are names.

    `max_rounds` (0: the spec's) and `target` (None: the spec's) take the place of `stop.max_rounds` and `stop.target`
    for the retraining of this request; a target of 0 runs exactly `max_rounds`, whatever the accuracy.
    """

    clients: tuple[str, ...]
    epsilon: float
    delta: float
    sigma: SigmaChoice = "auto"
    unit: Unit = "client"
    scope: Scope = "all"
    calibration: Calibration = "exact"
    retention: Retention = "paper"
    reserve: float = 0.0
    method: str = "sifu"
    max_rounds: int = 0
    target: float | None = None

    def __post_init__(self) -> None:
        if not self.clients:
            raise InputError("the request names no client: give at least one, for example --clients client-007")
        nameless = [name for name in self.clients if not isinstance(name, str)]
        if nameless:
            raise InputError(f"clients are named by texts, found {nameless[0]!r}")
        repeated = sorted(name for name, times in Counter(self.clients).items() if times > 1)
        if repeated:
            raise InputError(f"the request names {', '.join(repeated[:5])} more than once")
        if not isinstance(self.method, str):
            raise InputError(f"a method is named by a text, found {self.method!r}")
        for name in ("epsilon", "delta", "reserve", "sigma"):
            found: object = getattr(self, name)
            if name == "sigma" and found == "auto":
                continue
            if isinstance(found, bool) or not isinstance(found, int | float):
                raise InputError(f"{name} must be a number{' or auto' if name == 'sigma' else ''}, found {found!r}")
            if isinstance(found, int) and abs(found) > MOST_ROUNDS:
                raise InputError(f"{name} is a number of {found.bit_length()} bits, which nobody needs")
        check_deliverable(self.epsilon, self.delta)
        if self.sigma != "auto":
            check_noise(self.sigma)
        for name, value, options in (
            ("unit", self.unit, ("client", "joint")),
            ("scope", self.scope, ("all", "latest")),
            ("calibration", self.calibration, ("exact", "classical")),
            ("retention", self.retention, ("paper", "strict")),
        ):
            if value not in options:
                raise InputError(f"{name} must be {' or '.join(options)}, found {value!r}")
        if not 0.0 <= self.reserve < 1.0:
            raise InputError(f"reserve must be a fraction in [0, 1), found {self.reserve}")
        rounds: object = self.max_rounds
        if isinstance(rounds, bool) or not isinstance(rounds, int) or not 0 <= rounds <= MOST_ROUNDS:
            raise InputError(
                f"max_rounds must be a whole number up to {MOST_ROUNDS}, 0 for the spec's, found {rounds!r}"
            )
        wanted: object = self.target
        if wanted is not None and (
            isinstance(wanted, bool) or not isinstance(wanted, int | float) or not 0.0 <= wanted <= 1.0
        ):
            raise InputError(f"target must be an accuracy in [0, 1], 0 for none, found {wanted!r}")

    def stop(self, usual: StopSpec) -> StopSpec:
        """The run's stop rule with what this request says otherwise."""
        target = usual.target if self.target is None else float(self.target)
        return replace(usual, target=target, max_rounds=self.max_rounds or usual.max_rounds)

    @property
    def multiplier(self) -> float:
        """s(epsilon, delta) by the calibration asked for."""
        return noise_multiplier(self.epsilon, self.delta, self.calibration)


def is_request_id(request: object) -> bool:
    """Whether this can be a request's id, which becomes a file name."""
    return isinstance(request, str) and bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", request))


def check_request_id(request: str) -> str:
    """A request id becomes a file name: letters, digits, dot, dash and underscore, at most 64 of them."""
    if not is_request_id(request):
        raise InputError(
            f"request id {request!r} is not usable: write 1 to 64 letters, digits, dots, dashes or underscores"
        )
    return request
