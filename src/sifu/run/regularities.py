"""Regularity of the clients' losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sifu.core.premises import MeasuredRegularity
from sifu.core.spec import Spec
from sifu.theory.arrays import Floats
from sifu.theory.facts import ClientProfile, TrainingFacts
from sifu.theory.regularity import classify, client_factors


@dataclass(frozen=True)
class Regularities:
    """Expansion P_i of every client, and the regularity class of the run."""

    factors: Floats
    measured: MeasuredRegularity

    @staticmethod
    def of(clients: Sequence[ClientProfile], facts: TrainingFacts, spec: Spec) -> Regularities:
        """Return the expansions that the clients reported, or that the spec assumes.

        Raises:
            InputError: If an expansion is unknown, or one that safe steps cannot have.
        """
        assumed = spec.regularity.factor if spec.regularity.kind == "assumed" else None
        factors = client_factors(clients, facts.weight_decay, assumed)
        measured = MeasuredRegularity(
            kind=classify(factors, assumed is not None),
            largest_factor=float(factors.max()),
            assumed_factor=assumed,
        )
        return Regularities(factors, measured)
