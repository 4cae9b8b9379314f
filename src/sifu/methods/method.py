"""What a method is: it plans a request from what was recorded, and makes the model retraining starts from.

A new method is one file with one class and one line in `registry`; docs/new-method.md writes one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, Protocol

from sifu.core.certificate import Protection
from sifu.core.composition import TrainingNoise
from sifu.core.engine import Engine
from sifu.core.layout import Vector
from sifu.core.premises import Premise, heuristic_premise, hyper_parameters_premise, preprocessing_premise
from sifu.core.rollback import Exposure, Subject
from sifu.core.terms import RequestTerms
from sifu.methods.plan import Plan
from sifu.methods.view import RunView

Start = Literal["rule", "current", "fresh", "any"]
"""Which model a request starts from: the latest one the budgets allow, the current one, a fresh one, or any."""


class Method(Protocol):
    """Decides what a request does; handed an engine, it never imports one.

    `certifies` is False for a heuristic, whose level is always `none`. `protection` says what a promise rests on and
    `starts_from` which model a request may start from: verification holds every request to both.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    certifies: ClassVar[bool]
    protection: ClassVar[Protection]
    starts_from: ClassVar[Start]

    def check_run(self, view: RunView) -> None:
        """Refuse a run that this method can do nothing with; asked before a request is taken in."""
        return

    def plan(self, view: RunView, terms: RequestTerms) -> Plan:
        """What the request would do; changes nothing."""
        ...

    def premises(
        self,
        view: RunView,
        clients: Sequence[int],
        exposures: Sequence[Exposure],
        depth: int,
        terms: RequestTerms,
    ) -> tuple[Premise, ...]:
        """What a certificate for `clients` rests on, with noise at `depth`; the level follows from it."""
        ...

    def training_noise(self, view: RunView, subjects: Sequence[Subject], terms: RequestTerms) -> TrainingNoise | None:
        """What noise in training promises the subjects; None for methods that do not rest on it."""
        return None

    def bytes_kept(self, view: RunView) -> int:
        """Bytes on disk, beyond the current model, that the next request needs."""
        return 0

    def starting_model(self, view: RunView, plan: Plan, engine: Engine) -> Vector:
        """The model retraining starts from, noise included."""
        ...


def heuristic_premises(view: RunView, clients: Sequence[int], method: str) -> tuple[Premise, ...]:
    """The premises of a method that proves nothing."""
    return (
        heuristic_premise(method),
        preprocessing_premise(view.facts),
        hyper_parameters_premise(view.rate_source(clients), view.facts.shape_from_labels),
    )
