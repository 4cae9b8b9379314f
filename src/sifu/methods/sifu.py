"""SIFU (algorithm 3 of the paper): roll back to where the budget allows, add noise, go on without the client.

IFU (algorithm 2) is its case of one request. Differences from the paper, all of DESIGN.md: budgets are
charged over all releases by default, the noise is calibrated exactly, and weights are those of the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from sifu.core.calibration import Calibration, hidden_sensitivity
from sifu.core.engine import Engine
from sifu.core.noise import add_noise, noise_source
from sifu.core.premises import Premise, collect_premises, level_of
from sifu.core.rollback import Exposure, choose_node, largest_psi, largest_psi_on_the_way
from sifu.core.terms import RequestTerms
from sifu.methods.method import Start
from sifu.methods.noise_choice import NoiseChoice, choose_noise, predict_rounds
from sifu.methods.plan import Plan, PlannedCharge
from sifu.methods.view import RunView


class Sifu:
    """Rollback and calibrated Gaussian noise."""

    name: ClassVar[str] = "sifu"
    summary: ClassVar[str] = "roll back to the last model within the budget, add calibrated noise, retrain"
    certifies: ClassVar[bool] = True

    def plan(self, view: RunView, terms: RequestTerms) -> Plan:
        """The latest allowed node, with the noise asked for or the one chosen from the recorded scalars."""
        order = view.next_order
        subjects = view.new_subjects(terms, order)
        new = view.exposures(subjects)
        exposures = [*new, *view.exposures(view.earlier_subjects())]
        choice: NoiseChoice | None = None
        if terms.sigma == "auto":
            choice = choose_noise(view, exposures, terms, order)
            noise_std = choice.noise_std
        else:
            noise_std = terms.sigma
        node = choose_node(exposures, view.kept, noise_std, order)
        new_ids = {one.subject for one in subjects}
        charges = tuple(
            PlannedCharge(one.subject, one.psi_to_hide(node.depth), cost)
            for one, cost in zip(exposures, node.charges, strict=True)
            if one.subject.subject in new_ids or one.psi_to_hide(node.depth) > 0.0
        )
        premises = self.premises(
            view, view.indices(terms.clients), exposures, node.depth, terms.calibration, terms.epsilon
        )
        notes = list(choice.notes) if choice else []
        if node.wanted_depth > node.depth:
            notes.append(
                f"the budget would allow round {view.path.rounds_until(node.wanted_depth)}, whose model was not kept; "
                f"round {view.path.rounds_until(node.depth)} is the latest kept one before it"
            )
        if view.path.unbounded_from <= view.path.tip:
            notes.append(
                "a heuristic's model lies on this history: nobody's influence is known after it, so only the initial "
                "model can be gone back to"
            )
        if terms.scope == "latest":
            notes.append("scope latest counts the latest release only; whoever keeps several releases learns more")
        rate = view.regularities.measured
        if rate.kind == "smooth" and rate.largest_certified_rate is not None:
            notes.append(
                f"local.rate = {rate.local_rate:g} is too large to be certified as convex; "
                f"the largest that is: {rate.largest_certified_rate:.6g}"
            )
        return Plan(
            terms=terms,
            order=order,
            subjects=subjects,
            source_node=view.path.nodes[node.depth].node,
            source_depth=node.depth,
            source_rounds=view.path.rounds_until(node.depth),
            wanted_node=view.path.nodes[node.wanted_depth].node,
            tip_rounds=view.path.rounds_until(view.path.tip),
            noise_std=node.noise_std,
            multiplier=terms.multiplier,
            psi=largest_psi(new, node.depth),
            psi_star=hidden_sensitivity(noise_std, terms.multiplier),
            charges=charges,
            premises=premises,
            level=level_of(premises, exact=node.exact),
            predicted_rounds=predict_rounds(view, node.depth, node.noise_std),
            scratch_rounds=predict_rounds(view, 0, 0.0),
            options=choice.options if choice else (),
            notes=tuple(notes),
        )

    def premises(
        self,
        view: RunView,
        clients: Sequence[int],
        exposures: Sequence[Exposure],
        depth: int,
        calibration: Calibration,
        epsilon: float,
    ) -> tuple[Premise, ...]:
        """Every premise of a noised release (DESIGN section 7)."""
        return collect_premises(
            view.facts,
            view.regularities.measured,
            accounting=view.spec.privacy.accounting,
            calibration=calibration,
            epsilon=epsilon,
            noise=view.spec.privacy.noise,
            largest_psi=largest_psi_on_the_way(exposures, depth),
            rate_source=view.rate_source(clients),
        )

    def starting_model(self, view: RunView, plan: Plan, engine: Engine) -> Start:
        """The source node's model plus N(0, sigma^2 I); nothing is added where nothing needs hiding."""
        model = view.reader.load_model(plan.source_node or 0)
        if plan.noise_std == 0.0:
            return Start(model)
        noise = noise_source(view.spec.privacy.noise, view.spec.seed, plan.order)
        return Start(add_noise(model, plan.noise_std, noise))
