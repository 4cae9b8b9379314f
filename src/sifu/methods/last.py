"""Last: noise on the current model, sized by the clients' Psi there; SIFU without the rollback.

The paper adapts Descent-to-Delete (Neel, Roth & Sharifi-Malvajerdi 2021) this way. It is the Gaussian mechanism at
the current model, so it is charged and certified as sifu is; it mostly drowns what was learned.

`sigma = "auto"` takes the least noise that the budgets of the new clients, and of everyone forgotten earlier,
allow at the current model, whatever it destroys. That figure says what Psi is, and a public certificate
states sigma; so where something is certified it is raised to the next power of 1.1, and where nothing is (the paper's
own accounting, seeded noise) it is exactly the least. A number is used as given, and refused if it is too small.
"""

from __future__ import annotations

import math
from typing import ClassVar

from sifu.core.engine import Engine
from sifu.core.method_info import METHOD_INFOS, MethodInfo
from sifu.core.premises import level_of
from sifu.core.request_terms import RequestTerms
from sifu.errors import NotCertifiableError
from sifu.methods.base import Claim, Method, Start, noised_model, plan_in_place
from sifu.planning.noise_choice import on_ladder
from sifu.planning.plan import Plan
from sifu.run.run_view import RunView
from sifu.theory.rollback import least_noise

NOT_ENOUGH = (
    "no noise on the current model is enough: the budget of a client forgotten earlier is used up there, or a client's "
    "influence is not bounded"
)


class Last(Method):
    """Calibrated Gaussian noise on the current model."""

    info: ClassVar[MethodInfo] = METHOD_INFOS["last"]

    def plan(self, view: RunView, terms: RequestTerms) -> Plan:
        """The current model, with the least noise that every budget allows there, or the larger one asked for."""
        subjects = view.new_subjects(terms, view.next_order)
        exposures = view.exposures([*subjects, *view.earlier_subjects()])
        tip = view.path.tip
        needed = least_noise(exposures, tip, view.next_order)
        if math.isinf(needed):
            raise NotCertifiableError(
                f"{view.erased_note or NOT_ENOUGH}. Nothing was changed. Use method sifu, which goes back, or "
                "scratch; where the earlier requests have scope latest, their budgets are not used up"
            )
        premises = self.premises(Claim(view, view.leaving(terms.clients), exposures, tip, terms))
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
        return plan_in_place(self, view, terms, noise_std)

    def starting_model(self, view: RunView, plan: Plan, engine: Engine) -> Start:
        """The current model plus N(0, sigma^2 I)."""
        return Start(noised_model(view, plan, view.reader.load_model(view.reader.tip)))
