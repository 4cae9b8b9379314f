"""Method `sifu` (algorithm 3 of the paper): a rollback as far as the budget demands, noise, and retraining.

IFU (algorithm 2) is the special case of one request. Differences from the paper (docs/theory.md, section 16): budgets
are charged over all releases by default, the noise is calibrated exactly, and a client's weight is its share of the
samples in the round, not in the whole federation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from sifu.core.method_info import METHOD_INFOS, MethodInfo
from sifu.core.request_terms import RequestTerms
from sifu.errors import InputError
from sifu.methods.base import Claim, Method, plan_from
from sifu.planning.forecast import Forecast
from sifu.planning.noise_options import choose_noise, noise_options
from sifu.planning.outlook import budget_lines, outlook
from sifu.planning.plan import Plan, both_units
from sifu.run.run_view import RunView
from sifu.theory.calibration import hidden_sensitivity
from sifu.theory.facts import BUFFERS
from sifu.theory.rollback import Choice, choose_node


class Sifu(Method):
    """Rollback with calibrated Gaussian noise."""

    info: ClassVar[MethodInfo] = METHOD_INFOS["sifu"]

    def check_run(self, view: RunView) -> None:
        """Refuse a model with buffers, to which no noise can be added."""
        if BUFFERS in view.facts.outside:
            raise InputError(
                "method sifu adds noise to every number of a model, and this model has buffers, such as the running "
                "statistics of batch normalisation: use groups or scratch, or another normalisation (nn.GroupNorm)"
            )

    def plan(self, view: RunView, terms: RequestTerms) -> Plan:
        """Plan a rollback to the latest kept model that the budget allows; choose the noise if `sigma` is "auto"."""
        order, clients = view.next_order, view.leaving(terms.clients)
        new = view.exposures(view.new_subjects(terms, order))
        earlier = view.exposures(view.earlier_subjects())
        exposures = [*new, *earlier]
        forecast = Forecast(view, terms)
        anywhere = self.premises(Claim(view, clients, exposures, view.path.tip, terms, view.forgotten))
        options = noise_options(view, exposures, order, forecast, anywhere)
        sigma, why = choose_noise(options, forecast, terms.level) if terms.sigma == "auto" else (terms.sigma, ())
        node = choose_node(exposures, view.kept, sigma, order)
        plan = plan_from(self, view, terms, node.depth, node.noise_std)
        return replace(
            plan,
            wanted_node=view.path.nodes[node.wanted_depth].node,
            psi_star=hidden_sensitivity(sigma, terms.multiplier),
            options=options,
            notes=(*(plan.notes or why), *_notes(view, plan, node)),
            units=both_units(view, terms, sigma, earlier),
            budgets=budget_lines(view, earlier, node.depth, node.noise_std),
            outlook=outlook(view, node.depth, node.noise_std, terms, clients),
        )

    def bytes_kept(self, view: RunView) -> int:
        """Return the size in bytes of the kept models, except the current one, that a request may roll back to."""
        return sum(row.bytes for row in view.reader.models().values() if row.kept and row.node != view.reader.tip)


def _notes(view: RunView, plan: Plan, node: Choice) -> Iterator[str]:
    """Yield notes on the plan."""
    if node.wanted_depth > node.depth:
        yield (
            f"the budget would allow round {view.path.rounds_until(node.wanted_depth)}, whose model was not kept; "
            f"round {view.path.rounds_until(node.depth)} is the latest kept one before it"
        )
    if view.path.unbounded_from <= view.path.tip:
        yield (
            "this history contains a heuristic's model, after which no client's influence is known: only a rollback to "
            "the initial model is possible"
        )
    if plan.terms.scope == "latest":
        yield "scope latest counts the latest release only; someone who keeps several releases learns more"
    slower = (plan.predicted_rounds or 0) > (plan.scratch_rounds or math.inf)
    if plan.terms.sigma != "auto" and slower and plan.noise_std > 0.0:
        yield "method scratch would be faster, by this prediction, and exact; or use --sigma auto"
    regularity = view.regularities.measured
    if regularity.kind == "smooth" and regularity.largest_certified_rate is not None:
        yield (
            f"local.rate = {regularity.local_rate:g} is too large to be certified as convex; "
            f"the largest that is: {regularity.largest_certified_rate:.6g}"
        )
