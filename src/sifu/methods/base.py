"""What a method is: it plans a request from what was recorded, and makes the model retraining starts from.

A new method is one file with one class and one line in `registry`; docs/new-method.md writes one.

What the plans of all methods share: where they start, who is forgotten, what certificates would rest on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from sifu.core.engine import Engine
from sifu.core.layout import Vector
from sifu.core.method_info import MethodInfo
from sifu.core.premises import (
    Premise,
    before_training_premises,
    collect_premises,
    grouping_premise,
    heuristic_premise,
    level_of,
)
from sifu.core.randomness import add_noise, noise_source
from sifu.core.request_terms import RequestTerms
from sifu.planning.forecast import Forecast, predicted_rounds
from sifu.planning.plan import Plan, PlannedCharge
from sifu.run.group_state import Merged
from sifu.run.run_view import RunView
from sifu.theory.calibration import TrainingNoise, hidden_sensitivity
from sifu.theory.participation import ClientIndices
from sifu.theory.rollback import Exposure, Subject, charge, largest_psi_on_the_way


@dataclass(frozen=True)
class Claim:
    """That `clients` are hidden under `terms` in the model at `depth`; `exposures` have their Psi along the path."""

    view: RunView
    clients: Sequence[int]
    exposures: Sequence[Exposure]
    depth: int
    terms: RequestTerms


def noised_premises(claim: Claim) -> tuple[Premise, ...]:
    """Every premise of a noised release (docs/theory.md, section 12.1)."""
    view, clients, terms = claim.view, claim.clients, claim.terms
    # Said only where it matters: a merge may lie on the way to the model gone back to.
    grouping = (grouping_premise(view.spec.groups.count, depends=True),) if view.groups_depend_on(clients) else ()
    return grouping + collect_premises(
        view.facts,
        view.regularities.measured,
        accounting=view.spec.privacy.accounting,
        calibration=terms.calibration,
        epsilon=terms.epsilon,
        noise=view.spec.privacy.noise,
        largest_psi=largest_psi_on_the_way(claim.exposures, claim.depth),
        rate_source=view.rate_source(clients),
        left_out=view.replies_left_out(claim.depth),
        history=view.record_history,
    )


def planned_charges(
    exposures: Sequence[Exposure], new: Sequence[Subject], depth: int, noise_std: float
) -> tuple[PlannedCharge, ...]:
    """What noise at `depth` costs every new subject, and every earlier one with something to hide there."""
    return tuple(
        PlannedCharge(exposure.subject, psi, charge(psi, noise_std))
        for exposure in exposures
        for psi in [exposure.psi_to_hide(depth)]
        if psi > 0.0 or exposure.subject in new
    )


def noised_model(view: RunView, plan: Plan, model: Vector) -> Vector:
    """The model plus N(0, sigma^2 I) from the run's source of noise."""
    if plan.noise_std == 0.0:
        return model
    return add_noise(model, plan.noise_std, noise_source(view.spec.privacy.noise, view.spec.seed, plan.order))


@dataclass(frozen=True)
class RoundUpdates:
    """Updates of one round: a row for each of its clients; with their `salts` if they were stored before."""

    clients: ClientIndices
    values: NDArray[np.floating]
    salts: NDArray[np.uint8] | None = None


@dataclass(frozen=True)
class Start:
    """The model retraining starts from, noise included, and what making it took.

    `rounds`, `local_steps` (of all clients together) and `bytes_sent` (both ways) count what clients did for it. A
    model made from stored updates brings them along in `replayed`, round by round: nothing is known of anyone's
    influence on it (its node is a heuristic), and they take the place of the stored ones. A merge of groups brings
    what it was made of in `merged`.
    """

    model: Vector
    rounds: int = 0
    local_steps: int = 0
    bytes_sent: int = 0
    replayed: tuple[RoundUpdates, ...] | None = None
    merged: Merged | None = None


class Method(Protocol):
    """Decides what a request does; handed an engine, it never imports one."""

    info: ClassVar[MethodInfo]

    def check_run(self, view: RunView) -> None:
        """Refuse a run that this method can do nothing with; asked before a request is taken in."""
        return

    def plan(self, view: RunView, terms: RequestTerms) -> Plan:
        """What the request would do; changes nothing."""
        ...

    def premises(self, claim: Claim) -> tuple[Premise, ...]:
        """What a certificate of this claim rests on; the level follows from it.

        Those of any noised release, unless the method is a heuristic.
        """
        if self.info.certifies:
            return noised_premises(claim)
        before = before_training_premises(claim.view.facts, claim.view.rate_source(claim.clients))
        return (heuristic_premise(self.info.name), *before)

    def training_noise(self, view: RunView, subjects: Sequence[Subject], terms: RequestTerms) -> TrainingNoise | None:
        """What noise in training promises the subjects; None for methods that do not rest on it."""
        return None

    def bytes_kept(self, view: RunView) -> int:
        """Bytes on disk, beyond the current model, that the next request needs."""
        return 0

    def starting_model(self, view: RunView, plan: Plan, engine: Engine) -> Start:
        """The model retraining starts from, noise included, and what clients did for it."""
        ...


def plan_from(method: Method, view: RunView, terms: RequestTerms, depth: int | None) -> Plan:
    """A plan from the model at `depth` (None: a fresh one) that adds no noise, charges no one and promises nothing.

    A method replaces what it does differently.
    """
    order = view.next_order
    subjects = view.new_subjects(terms, order)
    exposures = [] if depth is None else view.exposures([*subjects, *view.earlier_subjects()])
    node = None if depth is None else view.path.nodes[depth].node
    return Plan(
        terms=terms,
        order=order,
        subjects=subjects,
        source_node=node,
        source_depth=depth or 0,
        source_rounds=view.path.rounds_until(depth or 0),
        wanted_node=node,
        tip_rounds=view.path.rounds_until(view.path.tip),
        noise_std=0.0,
        multiplier=terms.multiplier,
        psi=0.0,
        psi_star=0.0,
        charges=(),
        premises=method.premises(Claim(view, view.leaving(terms.clients), exposures, depth or 0, terms)),
        level="none",
        predicted_rounds=None,
        scratch_rounds=predicted_rounds(Forecast(view, terms).scratch()),
        protection=method.info.protection,
        notes=(view.erased_note,) if view.erased_note else (),
    )


def plan_in_place(method: Method, view: RunView, terms: RequestTerms, noise_std: float = 0.0) -> Plan:
    """The plan of a method that continues from the current model, with this noise: nothing is undone."""
    tip = view.path.tip
    plan = plan_from(method, view, terms, tip)
    exposures = view.exposures([*plan.subjects, *view.earlier_subjects()])
    hidden = any(exposure.psi_to_hide(tip) > 0.0 for exposure in exposures)
    untouched = not hidden and not view.were_refused(terms.clients, tip)
    charged = method.info.protection == "noise"
    forecast = Forecast(view, terms)
    predicted = forecast.predict(tip, noise_std)
    return replace(
        plan,
        noise_std=noise_std,
        psi=max(exposure.psi_to_hide(tip) for exposure in exposures if exposure.subject in plan.subjects),
        psi_star=hidden_sensitivity(noise_std, terms.multiplier),
        charges=planned_charges(exposures, plan.subjects, tip, noise_std) if charged else (),
        level=level_of(plan.premises, exact=untouched),
        predicted_rounds=predicted_rounds(predicted),
        predicted_interval=predicted.interval if predicted else None,
        expected_rounds=forecast.expected(tip, noise_std),
        untouched=untouched,
    )
