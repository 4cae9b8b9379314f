"""Base class of unlearning methods, which plan a request and make the model that retraining starts from.

CONTRIBUTING.md shows how to add a method. `plan_from` makes a complete plan, in which a
method replaces the fields that it decides itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from sifu.core.engine import Engine
from sifu.core.layout import Vector
from sifu.core.method_info import MethodInfo
from sifu.core.premises import (
    Premise,
    before_training_premises,
    collect_premises,
    level_of,
    record_premises,
)
from sifu.core.request_terms import Terms
from sifu.core.round import SystemNormals, add_noise
from sifu.errors import NotCertifiableError
from sifu.planning.plan import Plan, PlannedCharge
from sifu.planning.rounds import FirstTraining, rounds_to_run
from sifu.run.group_state import Merged
from sifu.run.run_view import RunView
from sifu.theory.calibration import hidden_sensitivity
from sifu.theory.rollback import Exposure, charge, largest_psi_on_the_way

TOLERANCE = 1e-9
"""Relative amount by which a charge may exceed its budget, because noise is rounded; verification allows the same."""


@dataclass(frozen=True)
class Claim:
    """Claim that `clients` are hidden under `terms` in the model at `depth`.

    Attributes:
        view: View of the run.
        clients: Clients that the request forgets, under every index they have had.
        exposures: Psi of each subject along the active path.
        depth: Depth of the model on the active path.
        terms: Terms of the request.
        noise_std: Standard deviation of the noise on the model.
    """

    view: RunView
    clients: Sequence[int]
    exposures: Sequence[Exposure]
    depth: int
    terms: Terms
    noise_std: float = 0.0

    @property
    def is_initial(self) -> bool:
        """True if the model is the initial model without noise, as in Scratch."""
        return self.depth == 0 and self.noise_std == 0.0 and self.view.path.nodes[0].kind == "initial"


def is_scratch(info: MethodInfo, claim: Claim) -> bool:
    """Return whether a rollback method starts from the initial model without noise, which is equivalent to Scratch."""
    return info.starts_from == "rule" and claim.is_initial


def noised_premises(claim: Claim) -> tuple[Premise, ...]:
    """Return the premises of a noised release (docs/theory.md, section 12.1).

    The initial model without noise needs only the premises about the steps before training, as in Scratch.
    """
    view = claim.view
    if claim.is_initial:
        before = before_training_premises(view.facts, view.rate_source)
        return (*record_premises(view.record_history), *before)
    return collect_premises(
        view.facts,
        view.regularity,
        noise=view.noise_source,
        largest_psi=largest_psi_on_the_way(claim.exposures, claim.depth),
        rate_source=view.rate_source,
        left_out=view.replies_left_out(claim.depth),
        history=view.record_history,
    )


def noised_model(view: RunView, plan: Plan, model: Vector) -> Vector:
    """Return the model plus noise N(0, sigma^2 I) drawn from the run's noise source, with sigma from the plan."""
    if plan.noise_std == 0.0:
        return model
    return add_noise(model, plan.noise_std, view.reader.noise or SystemNormals())


@dataclass(frozen=True)
class Start:
    """Model that retraining starts from, noise included, and the merge of group models that made it, if any."""

    model: Vector
    merged: Merged | None = None


class Method(Protocol):
    """Interface of an unlearning method; a method receives its engine as an argument and never imports one."""

    info: ClassVar[MethodInfo]

    def check_run(self, view: RunView) -> None:
        """Check that the method can work with a run, before a request is accepted.

        Raises:
            InputError: If the method cannot work with the run.
        """
        return

    def plan(self, view: RunView, terms: Terms) -> Plan:
        """Return the plan of a request; the run is not changed."""
        ...

    def premises(self, claim: Claim) -> tuple[Premise, ...]:
        """Return the premises of the claim's certificate, by default those of a noised release.

        They determine its level.
        """
        return noised_premises(claim)

    def starting_model(self, view: RunView, plan: Plan, engine: Engine) -> Start:
        """Return the model that retraining starts from, noise included.

        The default is the model of the plan's source, or a fresh model of the plan's branch, plus the plan's noise.
        """
        source = plan.source_node
        model = engine.initial_model(plan.order) if source is None else view.reader.load_model(source)
        return Start(noised_model(view, plan, model))


def plan_from(method: Method, view: RunView, terms: Terms, depth: int | None, noise_std: float = 0.0) -> Plan:
    """Return the plan that continues from the model at `depth` with noise of standard deviation `noise_std`.

    A method replaces the fields that it decides itself.

    Args:
        method: Method to plan for.
        view: View of the run.
        terms: Terms of the request.
        depth: Depth of the source, or None for a fresh model.
        noise_std: Standard deviation of the noise.

    Raises:
        NotCertifiableError: If the method hides by noise and this noise is not enough.
    """
    order, place = view.next_order, depth or 0
    subjects = view.new_subjects(terms, order)
    exposures = [] if depth is None else view.exposures([*subjects, *view.earlier_subjects()])
    claim = Claim(view, view.leaving(terms.clients), exposures, place, terms, noise_std)
    premises = method.premises(claim)
    fresh = depth is None or is_scratch(method.info, claim)
    # No client influenced the initial model, at place 0.
    hidden = {exposure.subject: exposure.psi_to_hide(place) for exposure in exposures if place}
    untouched = not any(hidden.values()) and (depth is None or not view.were_refused(terms.clients, place))
    psi_of = dict.fromkeys(subjects, 0.0) | hidden
    charges = tuple(
        PlannedCharge(subject, psi, charge(psi, noise_std))
        for subject, psi in psi_of.items()
        if psi > 0.0 or subject in subjects
    )
    if any(cost.charge > cost.subject.left * (1.0 + TOLERANCE) for cost in charges):
        raise NotCertifiableError(
            f"method {method.info.name} would add noise of {noise_std:g}, which does not hide all clients that "
            "influenced the model it continues from: nothing was changed. Use more noise, or an earlier model"
        )
    first = FirstTraining.of(view)
    needed = first.rounds if depth is None else first.rounds_from(view, place, noise_std)
    node = None if depth is None else view.path.nodes[depth].node
    return Plan(
        terms=terms,
        order=order,
        subjects=subjects,
        source_node=node,
        source_depth=place,
        source_rounds=view.rounds_until(place),
        wanted_node=node,
        tip_rounds=view.rounds_until(view.path.tip),
        noise_std=noise_std,
        multiplier=terms.multiplier,
        psi=max(psi_of[subject] for subject in subjects),
        psi_star=hidden_sensitivity(noise_std, terms.multiplier),
        charges=charges,
        premises=premises,
        level=level_of(premises, exact=untouched, fresh=fresh),
        rounds=rounds_to_run(view.spec.stop, needed),
        target=view.spec.stop.target,
        untouched=untouched,
    )
