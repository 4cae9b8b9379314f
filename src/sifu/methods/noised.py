"""What every method shares that hides clients by noise of its own: premises, charges, the noised model."""

from __future__ import annotations

from collections.abc import Sequence

from sifu.core.layout import Vector
from sifu.core.premises import Premise, collect_premises, grouping_premise
from sifu.core.randomness import add_noise, noise_source
from sifu.core.request_terms import RequestTerms
from sifu.planning.plan import Plan, PlannedCharge
from sifu.record.run_view import RunView
from sifu.theory.rollback import Exposure, Subject, charge, largest_psi_on_the_way


def noised_premises(
    view: RunView, clients: Sequence[int], exposures: Sequence[Exposure], depth: int, terms: RequestTerms
) -> tuple[Premise, ...]:
    """Every premise of a noised release (docs/theory.md, section 12.1)."""
    # Said only where it matters: a merge may lie on the way to the model gone back to.
    grouping = (grouping_premise(view.spec.groups.count, depends=True),) if view.groups_depend_on(clients) else ()
    return grouping + collect_premises(
        view.facts,
        view.regularities.measured,
        accounting=view.spec.privacy.accounting,
        calibration=terms.calibration,
        epsilon=terms.epsilon,
        noise=view.spec.privacy.noise,
        largest_psi=largest_psi_on_the_way(exposures, depth),
        rate_source=view.rate_source(clients),
        left_out=view.replies_left_out(depth),
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
