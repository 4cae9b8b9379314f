"""A request of several clients in both units: each covered by itself, or all of them together.

Psi of a set taken jointly is exact where the Gram matrix of a round was kept, and bounded by the triangle inequality
from the same scalars elsewhere (docs/theory.md, section 3.2). A plan shows both units, so that the price of the
stronger one is seen before it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sifu.choices import Unit
from sifu.core.request_terms import RequestTerms
from sifu.record.run_view import RunView
from sifu.theory.rollback import Exposure, choose_node, least_noise


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
