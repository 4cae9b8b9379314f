"""Regularity of the clients' losses, and whether the local rate was derived from their data."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sifu.core.premises import MeasuredRegularity, RateSource
from sifu.core.spec import Spec
from sifu.theory.arrays import Floats
from sifu.theory.facts import ClientProfile, TrainingFacts
from sifu.theory.participation import ClientIndices
from sifu.theory.regularity import (
    certified_rates,
    classify,
    is_copied_rate,
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
    def of(
        clients: Sequence[ClientProfile], facts: TrainingFacts, spec: Spec, erased: Collection[int] = ()
    ) -> Regularities:
        """Return the regularities that the clients reported, or that the spec assumes.

        Args:
            clients: Profiles of the clients.
            facts: Facts of the training.
            spec: Spec of the run.
            erased: Forgotten clients whose regularity was erased (`store.erased_figures`). No claim rests on their
                regularity: Psi is unbounded in all of their rounds, and without it the rate can only seem to depend on
                more clients.
        """
        assumed = spec.regularity.factor if spec.regularity.kind == "assumed" else None
        betas = [client.smoothness for client in clients if client.smoothness is not None]
        stays = [index for index in range(len(clients)) if index not in erased]
        if erased and assumed is None:
            clients = [
                replace(client, smoothness=0.0, curvature=0.0) if index in erased else client
                for index, client in enumerate(clients)
            ]
        factors, averagedness = local_regularities(clients, facts, assumed)
        rates = certified_rates(clients, facts.momentum)
        measured = MeasuredRegularity(
            kind=classify([clients[index] for index in stays], factors[stays], assumed is not None),
            largest_smoothness=max(betas) if betas else None,
            largest_factor=float(factors[stays].max()),
            local_rate=facts.local_rate,
            largest_certified_rate=largest_rate_within(rates),
            assumed_factor=assumed,
        )
        return Regularities(factors, averagedness, measured, rates)

    def rate_source(
        self,
        clients: Sequence[ClientProfile],
        setting_it: ClientIndices,
        facts: TrainingFacts,
        model: str,
        given: bool,
        leaving: Iterable[int],
    ) -> RateSource:
        """Return the source of the local rate: given, from clients that stay, or possibly from clients in `leaving`.

        Args:
            clients: Profiles of the clients.
            setting_it: Clients that the rate was derived from; clients that joined later are not among them.
            facts: Facts of the training.
            model: Kind of the model.
            given: True if the spec states a rate.
            leaving: Clients that leave.
        """
        # Reuse the known rates: recomputing them for a hundred thousand clients takes longer than the rest of a plan.
        rates = self.certified_rates
        rates = (
            certified_rates([clients[k] for k in setting_it], facts.momentum) if rates is None else rates[setting_it]
        )
        largest = largest_rate_within(rates)
        # A rate copied by hand from a plan's output reveals as much as an automatic one.
        copied = largest is not None and is_copied_rate(facts.local_rate, largest, model)
        if given and not copied:
            return "given"
        stays = ~np.isin(setting_it, list(leaving))
        if rates is not None and largest_rate_within(rates[stays]) != largest:
            return "forgotten"
        return "given" if given else "others"
