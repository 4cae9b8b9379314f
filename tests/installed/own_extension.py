"""An installed extension like a third-party package: methods and spec keys for the tests."""

from __future__ import annotations

import math
from typing import ClassVar

from sifu import NotCertifiableError, RequestTerms, SpecKey
from sifu.core.method_info import MethodInfo
from sifu.methods.base import Method, plan_from
from sifu.planning.plan import Plan
from sifu.run.run_view import RunView
from sifu.theory.rollback import least_noise

CLIP = SpecKey("server.clip", 0.0, "bound on the norm of an update", sets="update_clip")
NOISE = SpecKey("server.noise", 0.0, "noise on updates, a multiple of the bound", sets="update_noise")
UPDATES_EVERY = SpecKey("keep.updates_every", 0, "store the updates of every Nth round", sets="updates_every")


class GoOn(Method):
    """Heuristic that continues training the current model without the client."""

    info: ClassVar[MethodInfo] = MethodInfo(
        "go_on",
        "go on from the current model without the client: proves nothing",
        certifies=False,
        protection="nothing",
        starts_from="current",
        control=True,
    )

    def plan(self, view: RunView, terms: RequestTerms) -> Plan:
        """Plan to continue from the current model without noise."""
        return plan_from(self, view, terms, view.path.tip)


class NoiseHere(Method):
    """Method that adds calibrated noise to the current model."""

    info: ClassVar[MethodInfo] = MethodInfo(
        "noise_here",
        "add the noise that the current model needs",
        certifies=True,
        protection="noise",
        starts_from="current",
        takes_sigma=True,
        control=True,
        figures="erasable",
    )

    def plan(self, view: RunView, terms: RequestTerms) -> Plan:
        """Plan the least noise that every budget allows, or the requested noise."""
        subjects = [*view.new_subjects(terms, view.next_order), *view.earlier_subjects()]
        needed = least_noise(view.exposures(subjects), view.path.tip, view.next_order)
        if math.isinf(needed):
            raise NotCertifiableError(f"{view.erased_note or 'no noise is enough here'}. Nothing was changed")
        given = terms.sigma != "auto" and needed > 0.0
        return plan_from(self, view, terms, view.path.tip, terms.sigma if given else needed)
