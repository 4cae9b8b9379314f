"""How regular the clients' losses are, and whether the local rate was found from their data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sifu.core.premises import MeasuredRegularity, RateSource
from sifu.core.spec import Spec
from sifu.theory.arrays import Floats
from sifu.theory.facts import ClientProfile, TrainingFacts
from sifu.theory.regularity import (
    certified_rates,
    classify,
    is_copied_rate,
    largest_certified_rate,
    largest_rate_within,
    local_regularities,
)


@dataclass(frozen=True)
class Regularities:
    """P_i and alpha_i of every client, and the class the run falls into."""

    factors: Floats
    averagedness: Floats
    measured: MeasuredRegularity
    certified_rates: Floats | None

    @staticmethod
    def of(clients: Sequence[ClientProfile], facts: TrainingFacts, spec: Spec) -> Regularities:
        """From what the clients reported, or from what the spec assumes."""
        assumed = spec.regularity.factor if spec.regularity.kind == "assumed" else None
        factors, averagedness = local_regularities(clients, facts, assumed)
        betas = [client.smoothness for client in clients if client.smoothness is not None]
        rates = certified_rates(clients, facts.momentum)
        measured = MeasuredRegularity(
            kind=classify(clients, factors, assumed is not None),
            largest_smoothness=max(betas) if betas else None,
            largest_factor=float(factors.max()),
            local_rate=facts.local_rate,
            largest_certified_rate=largest_rate_within(rates),
            assumed_factor=assumed,
        )
        return Regularities(factors, averagedness, measured, rates)

    def rate_source(
        self, founders: Sequence[ClientProfile], facts: TrainingFacts, model: str, given: bool, leaving: Iterable[int]
    ) -> RateSource:
        """Whether the local rate was given, and if not, whether it would be the same without those who are `leaving`.

        Clients that joined after the `founders` had no say in it.
        """
        count, rates = len(founders), self.certified_rates
        # Everyone's rate is known already; going over a hundred thousand clients takes longer than the rest of a plan.
        largest = (
            largest_certified_rate(founders, facts.momentum) if rates is None else largest_rate_within(rates[:count])
        )
        # A rate copied by hand from what a plan printed tells as much as an automatic one.
        copied = largest is not None and is_copied_rate(facts.local_rate, largest, model)
        if given and not copied:
            return "given"
        gone = sorted(client for client in set(leaving) if client < count)
        if rates is None:
            rest = [founder for client, founder in enumerate(founders) if client not in gone]
            same = largest_certified_rate(rest, facts.momentum) == largest
        else:
            same = largest_rate_within(np.delete(rates[:count], gone)) == largest
        if not same:
            return "forgotten"
        return "given" if given else "others"
