"""Noisy Scratch, Fine-tuning and Last: the controls that sifu is compared with on the same history.

Noisy Scratch: a fresh initial model plus the noise that sifu would have used. It is a control: sifu's gain over it
comes from the history, and its gain over Scratch comes from a larger initial scale. No client's data influenced its
starting model, so with noise of a given size it is exact like Scratch. With sigma auto the forgotten clients' influence
determines the size, which the model reveals: then it is conditional.

Fine-tuning: continue from the current model without the client. It is a heuristic and proves nothing.

Last: noise on the current model, sized by the clients' Psi there; SIFU without the rollback. The paper adapts
Descent-to-Delete (Neel, Roth & Sharifi-Malvajerdi 2021) this way. It is the Gaussian mechanism at the current model, so
it is charged and certified like sifu; its noise mostly destroys what was learned. `sigma = "auto"` uses the least noise
that the budgets of the new clients, and of everyone forgotten earlier, allow at the current model. That value reveals
Psi, and a public certificate states sigma. So if something is certified, it is raised to the next power of 1.1;
otherwise (the paper's own accounting, seeded noise) it is exactly the least. A given number is used unchanged, and
refused if it is too small.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

from sifu import NotCertifiableError, RequestTerms
from sifu.core.method_info import MethodInfo
from sifu.core.premises import Premise, level_of
from sifu.methods.base import Claim, Method, plan_from, premises_of
from sifu.methods.scratch import Scratch
from sifu.methods.sifu import Sifu
from sifu.planning.noise_options import on_ladder
from sifu.planning.plan import Plan
from sifu.run.run_view import RunView
from sifu.theory.calibration import hidden_sensitivity
from sifu.theory.rollback import least_noise


class NoisyScratch(Scratch):
    """Method that runs Scratch from a noised initial model."""

    info: ClassVar[MethodInfo] = MethodInfo(
        "noisy_scratch",
        "a fresh model plus sifu's noise, without the client: exact, a control",
        certifies=True,
        protection="noise",
        starts_from="fresh",
        control=True,
        extra_premises=("noise size",),
    )

    def plan(self, view: RunView, terms: RequestTerms) -> Plan:
        """Plan Scratch with the requested noise; with auto, with the noise that sifu would add (possibly none)."""
        noise_std = Sifu().plan(view, terms).noise_std if terms.sigma == "auto" else terms.sigma
        star = hidden_sensitivity(noise_std, terms.multiplier)
        return replace(super().plan(view, terms), noise_std=noise_std, psi_star=star)

    def premises(self, claim: Claim) -> tuple[Premise, ...]:
        """Return the premises of Scratch, preceded by the premise on the size of the noise."""
        size = Premise("noise size", "assumed" if claim.terms.sigma == "auto" else "trusted")
        return (size, *super().premises(claim))


class FineTuning(Method):
    """Method that continues training the current model without the client."""

    info: ClassVar[MethodInfo] = MethodInfo(
        "fine_tuning",
        "go on from the current model without the client: fast, proves nothing",
        certifies=False,
        protection="nothing",
        starts_from="current",
        control=True,
    )

    def plan(self, view: RunView, terms: RequestTerms) -> Plan:
        """Plan to continue from the current model without noise."""
        return plan_from(self, view, terms, view.path.tip)


NOT_ENOUGH = (
    "no noise on the current model is enough: the budget of a client forgotten earlier is used up there, or a client's "
    "influence is not bounded"
)


class Last(Method):
    """Method that adds calibrated Gaussian noise to the current model."""

    info: ClassVar[MethodInfo] = MethodInfo(
        "last",
        "add the noise that the current model needs, without going back, retrain",
        certifies=True,
        protection="noise",
        starts_from="current",
        takes_sigma=True,
        control=True,
        preserves=30,
        figures="erasable",
    )

    def plan(self, view: RunView, terms: RequestTerms) -> Plan:
        """Plan the current model with the least noise that every budget allows there, or the larger requested noise."""
        subjects = view.new_subjects(terms, view.next_order)
        exposures = view.exposures([*subjects, *view.earlier_subjects()])
        tip = view.path.tip
        needed = least_noise(exposures, tip, view.next_order)
        if math.isinf(needed):
            raise NotCertifiableError(
                f"{view.erased_note or NOT_ENOUGH}. Nothing was changed. Use method sifu, which goes back, or "
                "scratch; where the earlier requests have scope latest, their budgets are not used up"
            )
        premises = premises_of(self, Claim(view, view.leaving(terms.clients), exposures, tip, terms, view.forgotten))
        untouched = needed == 0.0 and not view.were_refused(terms.clients, tip)
        certified = level_of(premises, exact=untouched) != "none"
        noise_std = on_ladder(needed) if certified else needed
        if needed > 0.0 and terms.sigma != "auto":
            noise_std = terms.sigma
            if noise_std < needed:
                raise NotCertifiableError(
                    f"sigma = {terms.sigma:g} is not enough on the current model, {needed:.6g} is: nothing was "
                    "changed. Use sigma auto or a larger one, or method sifu, which goes back to where it is enough"
                )
        return plan_from(self, view, terms, tip, noise_std)
