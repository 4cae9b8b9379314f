"""What a method is: it plans a request from what was recorded, and makes the model retraining starts from.

A new method is one file with one class and one line in `registry`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from sifu.core.calibration import Calibration
from sifu.core.engine import Engine
from sifu.core.layout import Vector
from sifu.core.premises import Premise
from sifu.core.rollback import Exposure
from sifu.core.terms import RequestTerms
from sifu.methods.plan import Plan
from sifu.methods.view import RunView


class Method(Protocol):
    """Decides what a request does; handed an engine, it never imports one."""

    name: ClassVar[str]
    summary: ClassVar[str]
    certifies: ClassVar[bool]

    def plan(self, view: RunView, terms: RequestTerms) -> Plan:
        """What the request would do; changes nothing."""
        ...

    def premises(
        self,
        view: RunView,
        clients: Sequence[int],
        exposures: Sequence[Exposure],
        depth: int,
        calibration: Calibration,
        epsilon: float,
    ) -> tuple[Premise, ...]:
        """What a certificate for `clients` rests on, with noise at `depth`; the level follows from it."""
        ...

    def starting_model(self, view: RunView, plan: Plan, engine: Engine) -> Vector:
        """The model retraining starts from, noise included."""
        ...
