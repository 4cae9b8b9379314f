"""What the plans of all methods share: where they start, who is forgotten, what certificates would rest on."""

from __future__ import annotations

from dataclasses import replace

from sifu.core.premises import level_of
from sifu.core.request_terms import RequestTerms
from sifu.methods.base import Method, planned_charges
from sifu.planning.forecast import Forecast, predicted_rounds
from sifu.planning.plan import Plan
from sifu.run.run_view import RunView
from sifu.theory.calibration import hidden_sensitivity


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
        premises=method.premises(view, view.leaving(terms.clients), exposures, depth or 0, terms),
        level="none",
        predicted_rounds=None,
        scratch_rounds=predicted_rounds(Forecast(view, terms).scratch()),
        protection=method.info.protection,
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
