"""Regularity of the clients' losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sifu.core.premises import MeasuredRegularity
from sifu.core.spec import Spec
from sifu.theory.arrays import Floats
from sifu.theory.facts import ClientProfile, TrainingFacts
from sifu.theory.regularity import (
    certified_rates,
    classify,
    largest_rate_within,
    local_regularities,
)


@dataclass(frozen=True)
class Regularities:
    """Factor P_i and averagedness alpha_i of every client, and the regularity class of the run."""

    factors: Floats
    averagedness: Floats
    measured: MeasuredRegularity
    certified_rates: Floats | None

    @staticmethod
    def of(clients: Sequence[ClientProfile], facts: TrainingFacts, spec: Spec) -> Regularities:
        """Return the regularities that the clients reported, or that the spec assumes."""
        assumed = spec.regularity.factor if spec.regularity.kind == "assumed" else None
        betas = [client.smoothness for client in clients if client.smoothness is not None]
        factors, averagedness = local_regularities(clients, facts, assumed)
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
