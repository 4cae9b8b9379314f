"""What a method is: it plans a request from what was recorded, and makes the model retraining starts from.

A new method is one file with one class and one line in `registry`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from sifu.core.calibration import Calibration
from sifu.core.engine import Engine
from sifu.core.layout import Vector
from sifu.core.participation import ClientIndices
from sifu.core.premises import Premise
from sifu.core.rollback import Exposure
from sifu.core.terms import RequestTerms
from sifu.methods.plan import Plan
from sifu.methods.view import RunView


@dataclass(frozen=True)
class RoundUpdates:
    """Updates of one round: a row for each of its clients."""

    clients: ClientIndices
    values: NDArray[np.floating]


@dataclass(frozen=True)
class Start:
    """The model retraining starts from, noise included, and what making it took.

    `rounds`, `local_steps` (of all clients together) and `bytes_sent` (both ways) count what clients did for it. A
    model made from stored updates brings them along in `replayed`, round by round: nothing is known of anybody's
    influence on it (its node is a heuristic), and they take the place of the stored ones.
    """

    model: Vector
    rounds: int = 0
    local_steps: int = 0
    bytes_sent: int = 0
    replayed: tuple[RoundUpdates, ...] | None = None


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

    def starting_model(self, view: RunView, plan: Plan, engine: Engine) -> Start:
        """The model retraining starts from, noise included."""
        ...
