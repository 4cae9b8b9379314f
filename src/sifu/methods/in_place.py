"""The plan of a request that goes on from the current model: fine_tuning, last and dp share it."""

from __future__ import annotations

from collections.abc import Sequence

from sifu.core.premises import Premise, level_of
from sifu.core.request_terms import RequestTerms
from sifu.methods.base import Method
from sifu.methods.noised import planned_charges
from sifu.planning.forecast import Forecast
from sifu.planning.plan import Plan
from sifu.planning.prediction import predicted_rounds
from sifu.record.run_view import RunView
from sifu.theory.calibration import hidden_sensitivity
from sifu.theory.composition import TrainingNoise
from sifu.theory.rollback import Exposure, Subject


def plan_in_place(
    method: Method,
    view: RunView,
    terms: RequestTerms,
    subjects: tuple[Subject, ...],
    exposures: Sequence[Exposure],
    premises: tuple[Premise, ...],
    noise_std: float = 0.0,
    training_noise: TrainingNoise | None = None,
    notes: tuple[str, ...] = (),
) -> Plan:
    """Nothing is undone; `exposures` are those of the new subjects first, then of everyone owed something."""
    tip = view.path.tip
    node, rounds = view.path.nodes[tip].node, view.path.rounds_until(tip)
    untouched = all(one.psi_to_hide(tip) == 0.0 for one in exposures)
    charged = method.info.protection == "noise"
    return Plan(
        terms=terms,
        order=view.next_order,
        subjects=subjects,
        source_node=node,
        source_depth=tip,
        source_rounds=rounds,
        wanted_node=node,
        tip_rounds=rounds,
        noise_std=noise_std,
        multiplier=terms.multiplier,
        psi=max(one.psi_to_hide(tip) for one in exposures if one.subject in subjects),
        psi_star=hidden_sensitivity(noise_std, terms.multiplier),
        charges=planned_charges(exposures, subjects, tip, noise_std) if charged else (),
        premises=premises,
        level=level_of(premises, exact=untouched),
        predicted_rounds=predicted_rounds(Forecast(view, terms).predict(tip, noise_std)),
        scratch_rounds=predicted_rounds(Forecast(view, terms).scratch()),
        notes=notes,
        protection=method.info.protection,
        untouched=untouched,
        training_noise=training_noise,
    )
