"""What a request would do, before anything is done. A request of several clients is planned in both units.

Psi of a set taken jointly is exact where the Gram matrix of a round was kept, and bounded by the triangle inequality
from the same scalars elsewhere (docs/theory.md, section 3.2). A plan shows both units, so that the price of the
stronger one is seen before it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sifu.choices import Level, Unit
from sifu.core.method_info import Protection, delta_of_budget, delta_of_charges
from sifu.core.premises import Premise
from sifu.core.request_terms import RequestTerms
from sifu.planning.budgets import BudgetLine, Outlook
from sifu.planning.ways import AutoChoice, Way
from sifu.run.run_view import RunView
from sifu.theory.composition import TrainingNoise
from sifu.theory.rollback import Exposure, Subject, choose_node, least_noise


@dataclass(frozen=True)
class UnitView:
    """What a unit would mean for the request, with the plan's noise.

    `psi_now` and `noise_now` are those of the current model, `rollback_to` the rounds of the latest kept model allowed
    with the plan's noise. `gram_rounds` of the `shared_rounds` that two or more of the clients took part in
    have a kept Gram matrix; the others are bounded.
    """

    unit: Unit
    psi_now: float
    noise_now: float
    rollback_to: int
    gram_rounds: int
    shared_rounds: int


def both_units(
    view: RunView, terms: RequestTerms, noise_std: float, earlier: Sequence[Exposure]
) -> tuple[UnitView, ...]:
    """The request in both units; nothing for a single client, for whom they are the same."""
    if len(terms.clients) < 2:
        return ()
    order, tip = view.next_order, view.path.tip
    result = []
    units: tuple[Unit, ...] = ("client", "joint")
    for unit in units:
        in_unit = replace(terms, unit=unit)
        new = view.exposures(view.new_subjects(in_unit, order))
        node = choose_node([*new, *earlier], view.kept, noise_std, order)
        shared = view.shared_depths(view.leaving(terms.clients)) if unit == "joint" else []
        result.append(
            UnitView(
                unit,
                max(exposure.psi_to_hide(tip) for exposure in new),
                least_noise([*new, *earlier], tip, order),
                view.path.rounds_until(node.depth),
                sum(1 for depth in shared if view.path.gram(depth) is not None),
                len(shared),
            )
        )
    return tuple(result)


@dataclass(frozen=True)
class PlannedCharge:
    """What the noise of a plan costs one subject."""

    subject: Subject
    psi: float
    charge: float


@dataclass(frozen=True)
class NoiseOption:
    """One noise that could be used, and what would come of it.

    `expected` is the figure options are compared by; it is rounds where the first training reached its target.
    """

    noise_std: float
    depth: int
    rounds: int
    noise_to_signal: float
    expected: float
    predicted_rounds: int | None
    predicted_interval: tuple[int, int] | None = None
    level: Level = "none"


@dataclass(frozen=True)
class Plan:
    """Node, noise, cost and level of a request.

    `source_node` is None for a fresh initial model. `wanted_node` is the latest node the budget allows,
    whether its model was kept or not. `charges` holds every subject the noise is charged to, new ones first.
    `untouched` says that no one who must be hidden ever touched the source, `training_noise` what noise in training
    promises where the method rests on it. `predicted_interval` holds the rounds to the target in most cases, `units` a
    request of several clients in both units, `budgets` those of everyone forgotten earlier, `outlook` what is to come.
    `expected_rounds` is the prediction unrounded, and where no target was reached the rounds to come back to where
    training ended. Where the method was left to `auto`, `ways` has every way side by side and `auto` says which was
    taken and why.
    """

    terms: RequestTerms
    order: int
    subjects: tuple[Subject, ...]
    source_node: int | None
    source_depth: int
    source_rounds: int
    wanted_node: int | None
    tip_rounds: int
    noise_std: float
    multiplier: float
    psi: float
    psi_star: float
    charges: tuple[PlannedCharge, ...]
    premises: tuple[Premise, ...]
    level: Level
    predicted_rounds: int | None
    scratch_rounds: int | None
    options: tuple[NoiseOption, ...] = ()
    notes: tuple[str, ...] = ()
    protection: Protection = "nothing"
    untouched: bool = False
    training_noise: TrainingNoise | None = None
    predicted_interval: tuple[int, int] | None = None
    units: tuple[UnitView, ...] = ()
    budgets: tuple[BudgetLine, ...] = ()
    outlook: Outlook | None = None
    expected_rounds: float | None = None
    rebuild_client_rounds: int = 0
    ways: tuple[Way, ...] = ()
    auto: AutoChoice | None = None
    predicted_accuracy: float | None = None
    """Of the model when the request is done, on the clients that stay; None where the record does not tell."""

    @property
    def method(self) -> str:
        """The method that would carry the request out, also where it was left to `auto`."""
        return self.terms.method

    @property
    def delta_at_most(self) -> float:
        """The delta at the request's epsilon once the budget is used up whole."""
        return delta_of_budget(
            self.terms.epsilon, self.multiplier, self.untouched, self.protection, self.training_noise
        )

    @property
    def delta_reached(self) -> float:
        """The delta at the request's epsilon that this release would reach on its own."""
        own = [charge.charge for charge in self.charges if charge.subject.order == self.order]
        return delta_of_charges(self.terms.epsilon, own, self.protection, self.training_noise)
