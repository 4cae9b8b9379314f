"""Method `sifu` (algorithm 3 of the paper): a rollback as far as the budget demands, noise, and retraining.

IFU (algorithm 2) is the special case of one request. Differences from the paper (docs/theory.md, section 10): budgets
are charged over all releases by default, the noise is calibrated exactly, and a client's weight is its share of the
samples in the round, not in the whole federation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from sifu.core.method_info import METHOD_INFOS, MethodInfo
from sifu.core.request_terms import Terms
from sifu.errors import InputError
from sifu.methods.base import Method, plan_from
from sifu.planning.plan import Plan
from sifu.planning.rounds import FirstTraining
from sifu.run.run_view import RunView
from sifu.theory.automatic_noise import rounded_up_sigma
from sifu.theory.facts import BUFFERS
from sifu.theory.rollback import Choice, Exposure, choose_node, least_noises


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

    def plan(self, view: RunView, terms: Terms) -> Plan:
        """Plan a rollback to the latest kept model that the budget allows; choose the noise if `sigma` is "auto"."""
        order = view.next_order
        new = view.exposures(view.new_subjects(terms, order))
        exposures = [*new, *view.exposures(view.earlier_subjects())]
        sigma = _automatic_sigma(view, terms, exposures) if terms.sigma == "auto" else terms.sigma
        node = choose_node(exposures, view.kept, sigma)
        plan = plan_from(self, view, terms, node.depth, node.noise_std)
        return replace(
            plan,
            wanted_node=view.path.nodes[node.wanted_depth].node,
            notes=(*plan.notes, *_notes(view, plan, node)),
        )


def _automatic_sigma(view: RunView, terms: Terms, exposures: Sequence[Exposure]) -> float:
    """Return the least noise of the kept model with the fewest expected rounds, rounded up.

    If that model needs no noise, the result is less noise than any other model needs, so that the rule chooses it.
    """
    needed = least_noises(exposures, view.kept)
    options = {depth: rounded_up_sigma(least) for depth, least in needed.items() if math.isfinite(least)}
    if terms.level == "exact":
        options = {depth: noise for depth, noise in options.items() if noise == 0.0}
    first = FirstTraining.of(view)
    best = min(options, key=lambda depth: (first.rounds_from(view, depth, options[depth]), options[depth], -depth))
    return options[best] or 0.5 * min((least for least in needed.values() if least > 0.0), default=1.0)


def _notes(view: RunView, plan: Plan, node: Choice) -> Iterator[str]:
    """Yield notes on the plan."""
    if node.wanted_depth > node.depth:
        yield (
            f"the budget would allow round {view.rounds_until(node.wanted_depth)}, whose model was not kept; "
            f"round {view.rounds_until(node.depth)} is the latest kept one before it"
        )
