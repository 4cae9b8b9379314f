"""SIFU (algorithm 3 of the paper): roll back to where the budget allows, add noise, go on without the client.

IFU (algorithm 2) is its case of one request. Differences from the paper (docs/theory.md, section 16): budgets are
charged over all releases by default, the noise is calibrated exactly, and weights are those of the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from sifu.core.engine import Engine
from sifu.core.method_info import METHOD_INFOS, MethodInfo
from sifu.core.premises import Premise, level_of
from sifu.core.request_terms import RequestTerms
from sifu.methods.base import Method, Start
from sifu.methods.noised import noised_model, noised_premises, planned_charges
from sifu.planning.budgets import budget_lines, outlook
from sifu.planning.forecast import Forecast
from sifu.planning.forward_forgetting import weigh_forward
from sifu.planning.noise_choice import NoiseChoice, choose_noise, noise_options
from sifu.planning.plan import Plan
from sifu.planning.prediction import predicted_rounds
from sifu.planning.units import both_units
from sifu.record.run_view import RunView
from sifu.theory.calibration import hidden_sensitivity
from sifu.theory.rollback import Exposure, choose_node, largest_psi, least_noise


class Sifu(Method):
    """Rollback and calibrated Gaussian noise."""

    info: ClassVar[MethodInfo] = METHOD_INFOS["sifu"]

    def plan(self, view: RunView, terms: RequestTerms) -> Plan:
        """The latest allowed node, with the noise asked for or the one chosen from the recorded scalars."""
        order = view.next_order
        subjects = view.new_subjects(terms, order)
        new = view.exposures(subjects)
        earlier = view.exposures(view.earlier_subjects())
        exposures = [*new, *earlier]
        clients = view.indices(terms.clients)
        forecast = Forecast(view, terms)
        anywhere = self.premises(view, clients, exposures, view.path.tip, terms)
        options = noise_options(view, exposures, order, forecast, anywhere)
        choice: NoiseChoice | None = None
        if terms.sigma == "auto":
            choice = choose_noise(options, forecast)
            noise_std = choice.noise_std
        else:
            noise_std = terms.sigma
        node = choose_node(exposures, view.kept, noise_std, order)
        premises = self.premises(view, clients, exposures, node.depth, terms)
        predicted, scratch = forecast.predict(node.depth, node.noise_std), forecast.scratch()
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
        if choice is None and predicted and scratch and predicted.rounds > scratch.rounds and node.noise_std > 0.0:
            notes.append("method scratch would be faster, by this prediction, and exact; or use --sigma auto")
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
            charges=planned_charges(exposures, subjects, node.depth, noise_std),
            premises=premises,
            level=level_of(premises, exact=node.exact),
            predicted_rounds=predicted_rounds(predicted),
            predicted_interval=predicted.interval if predicted else None,
            scratch_rounds=predicted_rounds(scratch),
            options=options,
            notes=tuple(notes),
            protection=self.info.protection,
            untouched=node.exact,
            units=both_units(view, terms, noise_std, earlier),
            budgets=budget_lines(view, earlier, node.depth, node.noise_std),
            outlook=outlook(view, node.depth, node.noise_std, terms, clients),
            forward=weigh_forward(view, forecast, clients, least_noise(exposures, view.path.tip, order)),
        )

    def premises(
        self,
        view: RunView,
        clients: Sequence[int],
        exposures: Sequence[Exposure],
        depth: int,
        terms: RequestTerms,
    ) -> tuple[Premise, ...]:
        """Every premise of a noised release (docs/theory.md, section 12.1)."""
        return noised_premises(view, clients, exposures, depth, terms)

    def bytes_kept(self, view: RunView) -> int:
        """The models a later request may go back to."""
        return sum(row.bytes for row in view.reader.models().values() if row.kept and row.node != view.reader.tip)

    def starting_model(self, view: RunView, plan: Plan, engine: Engine) -> Start:
        """The source node's model plus N(0, sigma^2 I); nothing is added where nothing needs hiding."""
        return Start(noised_model(view, plan, view.reader.load_model(plan.source_node or 0)))
