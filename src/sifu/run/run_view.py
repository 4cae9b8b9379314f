"""Read-only view of a run at one instant: its history, its clients, and the Psi of each client."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from sifu.core.engine import Evaluation
from sifu.core.operator_words import FLOWER, LAST_CLIENT, LOOP
from sifu.core.premises import MeasuredRegularity, RateSource, RecordHistory
from sifu.core.request_terms import Terms
from sifu.core.round import NoiseSource
from sifu.core.spec import Spec
from sifu.core.spec.regime import Regime
from sifu.errors import InputError, RoundRejectedError
from sifu.run.clients_view import ClientsView
from sifu.store.projection import EvaluationRow, ModelRow, RequestRow
from sifu.store.reader import NOISE_GIVEN, RunReader, check_rows, readable
from sifu.theory.arrays import Floats, Integers
from sifu.theory.facts import TrainingFacts
from sifu.theory.history import ActivePath, PsiCurve, TakenPart, client_curve
from sifu.theory.participation import ClientIndices, Participation
from sifu.theory.regularity import RoundRegularity
from sifu.theory.rollback import Exposure, Subject
from sifu.theory.rounding import slack
from sifu.theory.tracking import RoundScalars, summarise_round

ACTIVE = "active"
"""Name of the subset of evaluations that the stop rule uses: all active clients."""


def evaluation_row(node: int, subset: str, evaluation: Evaluation) -> EvaluationRow:
    """Return the row that records an evaluation.

    Raises:
        RoundRejectedError: If the loss is not finite.
    """
    if not math.isfinite(evaluation.loss):
        raise RoundRejectedError(
            f"the loss on {subset} clients is {evaluation.loss}: training diverged, lower local.rate; "
            "the last good state stays"
        )
    return EvaluationRow(node, subset, int(evaluation.samples.sum()), evaluation.accuracy, evaluation.loss)


MOST_EXPOSURES = 20_000
"""Largest number of subjects whose Psi is kept in memory."""


def _facts_of(recorded: dict[str, Any]) -> TrainingFacts:
    participation, outside = Participation.parse(recorded["participation"]), tuple(recorded["outside"])
    return TrainingFacts(**(recorded | {"participation": participation, "outside": outside}))


class RunView(ClientsView):
    """A run at one instant: its path, its clients, the forgotten clients, and the stored models.

    Args:
        reader: Reader of the run.
        tip: Node whose history is viewed, by default the current one.
        before: Sequence number of the event before which clients must have joined, by default all clients count.
        certified: Sequence number of the event before which restorations and unsigned events count, by default all.
    """

    def __init__(
        self, reader: RunReader, tip: int | None = None, before: int | None = None, certified: int | None = None
    ) -> None:
        self.reader, self._certified = reader, certified
        self._exposures: dict[Subject, Exposure] = {}
        with readable(reader.folder):
            self.spec: Spec = reader.constant("spec", lambda: Spec.from_mapping(reader.spec))
            self.facts: TrainingFacts = reader.constant("facts", lambda: _facts_of(reader.facts))
            everyone, joined = reader.clients(), reader.joined()
            later = [seq for seq in joined if before is not None and seq >= before]
            self.clients = everyone[: len(everyone) - len(later)]
            self.founders = len(everyone) - len(joined)
            self.nodes = reader.path(tip)
            self.requests: list[RequestRow] = reader.requests()
            self.noise_source: NoiseSource = "given" if reader.value(NOISE_GIVEN, "") else "system"

    @cached_property
    def regularity(self) -> MeasuredRegularity:
        """Regularity of the clients' losses."""
        regularity: MeasuredRegularity = self.reader.constant(
            ("regularity", len(self.clients)), lambda: MeasuredRegularity.of(self.clients, self.facts, self.spec)
        )
        return regularity

    @property
    def rate_source(self) -> RateSource:
        """Source of the clients' steps: a limit that the operator set, or their own data alone."""
        return "own" if self.spec.local.rate == "auto" else "given"

    @cached_property
    def regime(self) -> Regime:
        """Kind of training of the run."""
        return self.spec.regime

    @cached_property
    def parameters(self) -> int:
        """Number d of model parameters."""
        return self.reader.layout.size

    @cached_property
    def training_rounds(self) -> int | None:
        """Number of rounds in which the first training reached its target, or None if it never did."""
        target = self.spec.stop.target
        evaluated = {
            row.node for row in self.reader.evaluations() if row.subset == ACTIVE and row.accuracy >= target > 0
        }
        nodes = self.reader.nodes()
        return max(
            (node.position for node in nodes if node.branch == 0 and node.kind == "round" and node.node in evaluated),
            default=None,
        )

    @cached_property
    def path(self) -> ActivePath:
        """History of the viewed model, from its initial model on."""
        return ActivePath(self.nodes)

    def rounds_until(self, depth: int) -> int:
        """Return the number of rounds that led to the model at `depth`, including separate rounds of merged groups."""
        merged = any(node.kind == "merge" for node in self.path.nodes[: depth + 1])
        return self.path.rounds_until(depth) + (self.spec.groups.rounds if merged else 0)

    def replies_left_out(self, depth: int) -> int:
        """Return the number of replies that were refused and left out on the path to the model at `depth`."""
        left_out = [rejection for rejection in self.reader.rejections() if rejection.left_out]
        if not left_out:
            return 0
        rounds = self._rounds_until(depth)
        return sum(1 for rejection in left_out if (rejection.branch, rejection.round) in rounds)

    def were_refused(self, clients: Sequence[str], depth: int) -> bool:
        """Return whether a reply of one of `clients`, under any name, was refused on the path to the model at `depth`.

        Such a client contributed nothing in these rounds, but its reply may have decided whether a round took place.
        """
        names = {self.clients[client].name for client in self.leaving(clients)}
        refused = {(row.branch, row.round) for row in self.reader.rejections() if row.left_out and row.client in names}
        return bool(refused) and not refused.isdisjoint(self._rounds_until(depth))

    def _rounds_until(self, depth: int) -> set[tuple[int, int]]:
        """Return branch and number of every round on the path to the model at `depth`."""
        return {(node.branch, node.position - 1) for node in self.path.nodes[: depth + 1] if node.kind == "round"}

    @cached_property
    def record_history(self) -> RecordHistory:
        """Number of restorations and unsigned events so far, or before the event `certified`."""
        last = 2**62 if self._certified is None else self._certified
        counts = "SELECT SUM(kind = 'restored'), SUM(signature IS NULL) FROM events WHERE seq < ?"
        ((restored, unsigned),) = self.reader.query(counts, (last,))
        return RecordHistory(restored or 0, unsigned or 0)

    @cached_property
    def kept(self) -> dict[int, ModelRow]:
        """Models that can be rolled back to, by depth, always including the current model."""
        depth_of = self.path.depth_of
        return {depth_of[node]: row for node, row in self.reader.models().items() if node in depth_of}

    @property
    def next_order(self) -> int:
        """Order of the next request to be executed; the first is 1."""
        return 1 + sum(1 for request in self.requests if request.request_order is not None)

    def new_subjects(self, terms: Terms, order: int) -> tuple[Subject, ...]:
        """Return the subjects of a request: one per client."""
        indices = self.indices(terms.clients)
        if terms.records:
            check_rows(self.reader, indices[0], terms.records)
        elif len(self.forgotten) + len(indices) >= len(self.clients):
            raise InputError(f"the request would forget every client. {LAST_CLIENT}")
        first = 1 + max((row.subject for row in self.reader.subjects()), default=0)
        return tuple(
            Subject(first + k, chain, terms.multiplier, order) for k, chain in enumerate(self.chains(terms.clients))
        )

    def earlier_subjects(self, before_order: int | None = None) -> tuple[Subject, ...]:
        """Return the subjects that earlier requests promised to hide, with the budget they have used so far.

        Args:
            before_order: Order before which requests count, by default all count.
        """
        key = f"subjects before {before_order}"
        find = partial(self._find_earlier, before_order)
        subjects: tuple[Subject, ...] = self.reader.remembered(key, find)
        return subjects

    def _find_earlier(self, before_order: int | None) -> tuple[Subject, ...]:
        by_request = {request.request: request for request in self.requests}
        nodes = self.reader.nodes_by_number()
        used: dict[int, float] = {}
        for charge in self.reader.charges():
            noised = nodes.get(charge.noise_node)
            if before_order is None or (noised is not None and noised.order < before_order):
                used[charge.subject] = used.get(charge.subject, 0.0) + charge.charge
        result = []
        for row in self.reader.subjects():
            request = by_request[row.request]
            order = request.request_order or 0
            if before_order is None or order < before_order:
                multiplier = request.multiplier or 0.0
                # `slack` exceeds the rounding error of the float64 sum.
                spent = used.get(row.subject, 0.0) * slack(2**12)
                result.append(Subject(row.subject, row.clients, multiplier, order, spent))
        return tuple(result)

    def exposures(self, subjects: Sequence[Subject]) -> list[Exposure]:
        """Return the subjects with their Psi along the path, which is computed on first use."""
        exposures = self._exposures
        if len(exposures) > MOST_EXPOSURES:
            exposures.clear()
        for subject in subjects:
            if subject not in exposures:
                exposures[subject] = Exposure(subject, self.path, partial(self.curve, subject))
        return [exposures[subject] for subject in subjects]

    def curve(self, subject: Subject) -> PsiCurve:
        """Return the subject's Psi along the path."""
        return client_curve(self.path, *self._taken_part(subject.clients))

    def _taken_part(self, clients: Sequence[int]) -> list[TakenPart]:
        rows = self.reader.participation(clients)
        depth_of = self.path.depth_of
        depths = np.array([depth_of.get(int(node), -1) for node in rows.nodes], dtype=np.int64)
        parts = []
        for client in clients:
            chosen = (rows.clients == client) & (depths >= 0)
            parts.append(
                TakenPart(
                    depths[chosen],
                    rows.samples[chosen],
                    rows.drifts[chosen],
                    float(self.regularity.factors[client]),
                )
            )
        return parts

    def summarise_round(
        self, participants: ClientIndices, samples: Integers, drifts: Floats, mean_shift: float, rounding: float
    ) -> tuple[RoundRegularity, RoundScalars]:
        """Return the terms that a round adds to Psi (see `theory.tracking.summarise_round`)."""
        return summarise_round(
            participants,
            samples,
            drifts,
            mean_shift,
            rounding,
            factors=self.regularity.factors[participants],
        )


def measures_training_rows(view: RunView) -> bool:
    """Return whether requests measure the accuracy on training rows.

    Evaluating a closed-form head takes longer than solving it, so only `sifu evaluate` measures it on training rows.
    Clients on other machines measure their accuracy themselves.
    """
    return not view.regime.solves or view.spec.data.name in (FLOWER, LOOP)
