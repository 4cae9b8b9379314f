"""Comparison of two releases of a run: before and after a request or a trial deletion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from sifu.audit.audited import Audited
from sifu.audit.before_after import HEAD_KINDS, BeforeAfterAttack, Candidates, TwoHeads, attempt
from sifu.core.engine import Position
from sifu.core.round import keyed_generator
from sifu.requests.certification import RecordedRequest
from sifu.theory.arrays import Array, Floats
from sifu.theory.closed_form import fit_head, statistics_of, total

if TYPE_CHECKING:
    from sifu.engines.sim.embedded_heads import ClosedFormFederation
    from sifu.export.loaded_model import LoadedModel

FEWEST_CLIENTS = 3
WIDE_HEAD, TRIALS_OF_WIDE = 1000, 10
"""Number of features from which a head is wide, and the maximum number of trials with a wide head."""


def with_constant(features: Array) -> Floats:
    """Return rows of features with the constant 1 appended."""
    rows = np.asarray(features, dtype=np.float64).reshape(len(features), -1)
    return np.concatenate([rows, np.ones((len(rows), 1))], axis=1)


def encoded(kind: str, labels: Array, outputs: int) -> Floats:
    """Return the targets of a head trained in rounds: one-hot for softmax, the labels themselves otherwise."""
    if kind != "softmax":
        return np.asarray(labels, dtype=np.float64).reshape(len(labels), outputs)
    return np.eye(outputs)[np.asarray(labels, dtype=np.int64)]


class RunComparison:
    """Attack on the releases of one run by an observer who kept the earlier one.

    Earlier heads in closed form are solved again from the clients' data.
    """

    def __init__(self, audited: Audited) -> None:
        from sifu.engines.sim.embedded_heads import ClosedFormFederation  # this import needs torch

        self._audited, self._engine, self._spec = audited, audited.engine, audited.spec
        self._solved = self._engine if isinstance(self._engine, ClosedFormFederation) else None
        self._kind = self._spec.model.kind
        self._generator = keyed_generator(audited.options.seed or self._spec.seed, "audit before and after")

    def execute(self) -> Iterator[BeforeAfterAttack]:
        """Yield the attack on a request's releases, and the attack on deletions that the audit makes itself."""
        public = self._public() if self._kind in HEAD_KINDS else None
        if public is None or self._audited.data is None:
            reason = "public samples" if public is None else "the clients' data"
            if self._kind not in HEAD_KINDS:
                reason = f"linear head (the model is a {self._kind})"
            self._audited.notes.append(f"two releases were not compared: the audit has no {reason}")
            return
        yield from self._request(public)
        if self._solved is not None:
            yield from self._trials(self._solved, public)

    def _public(self) -> Floats | None:
        """Return public samples as features, from the given file or from the run's held-out rows."""
        audited, given = self._audited, self._audited.options.public
        if given is not None:
            # A linear head needs no user-defined module.
            model = cast("LoadedModel", audited.run.model())
            return with_constant(model.features(model.inputs_of(given)[0]))
        held = audited.held_out
        return None if held is None else self._features(held[0])

    def _features(self, x: Any) -> Floats:
        samples = np.asarray(x)
        return with_constant(samples if self._solved is None else self._solved.features(samples))

    def _targets(self, labels: Any) -> Floats:
        if self._solved is not None:
            return self._solved.targets.encode(np.asarray(labels))
        return encoded(self._kind, np.asarray(labels), self._engine.layout.shapes[-1][-1])

    def _candidates(self, clients: Sequence[int], records: bool) -> Candidates:
        data = self._audited.data
        phi = [self._features(data[client].x) for client in clients]
        targets = np.concatenate([self._targets(data[client].y) for client in clients])
        owners = np.repeat(np.arange(len(clients)), [len(rows) for rows in phi])
        return Candidates(np.concatenate(phi), targets, np.arange(len(owners)) if records else owners)

    def _another(self, count: int, deleted: Sequence[int]) -> int:
        """Return a candidate that was not deleted."""
        others = np.setdiff1d(np.arange(count), deleted)
        return int(others[self._generator.integers(len(others))])

    def _released(self, weights: Floats, node: int | None = None) -> Floats:
        """Return a head in the form in which it is released."""
        released = self._audited.as_released(weights.ravel(), node, self._generator)
        return np.asarray(released.astype(np.float64).reshape(weights.shape))

    # -- a request of the run ------------------------------------------------------------------------------

    def _request(self, public: Floats) -> Iterator[BeforeAfterAttack]:
        row, joined, index_of = self._audited.attacked, self._audited.remainder, self._audited.view.index_of
        if row is None:
            return
        recorded = RecordedRequest(self._audited.reader, row)
        leaving = [index_of[name] for name in row.clients] if joined is None else [joined.first]
        until = recorded.view.earlier_subjects(before_order=recorded.order + 1)
        left = {client for subject in until for client in subject.clients}
        stay = [client for client in range(len(recorded.view.clients)) if client not in left]
        clients = sorted({*stay, *leaving})
        after = stay if joined is None else [*stay, joined.client]
        pair = self._pair(row.final_node, clients, after)
        if pair is None:
            note = f"request {row.request}: a release before or after it is gone, so the two were not compared"
            self._audited.notes.append(note)
            return
        candidates = self._candidates(clients, records=bool(row.records))
        if row.records:
            start = sum(len(self._audited.data[client].x) for client in clients if client < leaving[0])
            deleted = [start + record for record in row.records]
        else:
            deleted = [clients.index(client) for client in leaving]
        if candidates.count <= len(deleted):
            return
        heads = TwoHeads(*pair, public, self._kind, self._spec.regime.penalty)  # the observer knows the spec
        found = attempt(heads, candidates, deleted, self._another(candidates.count, deleted))
        yield BeforeAfterAttack.of([found], f"request {row.request}", candidates, len(public))

    def _pair(self, final: int | None, clients: Sequence[int], stay: Sequence[int]) -> tuple[Floats, Floats] | None:
        """Return the head trained on `clients` and the head trained on `stay`, or None if one is not available."""
        audited, engine = self._audited, self._engine
        after, before = audited.model_of(final), None
        if self._solved is None:
            before = audited.model_of(audited.before)
        else:
            fresh, start = engine.initial_model(0), Position(0, 0)
            before = engine.run_round(fresh, start, np.array(clients)).model
            after = engine.run_round(fresh, start, np.array(stay)).model if after is None else after
        if before is None or after is None:
            return None
        shape = (-1, engine.layout.shapes[-1][-1])
        earlier, later = (head.astype(np.float64).reshape(shape) for head in (before, after))
        return self._released(earlier), self._released(later, final)

    # -- deletions by the audit itself --------------------------------------------------------------------

    def _trials(self, engine: ClosedFormFederation, public: Floats) -> Iterator[BeforeAfterAttack]:
        members = self._audited.view.active.tolist()
        statistics = [engine.sent_by(client) for client in members]
        whole = total(engine.fixed, statistics)

        before = fit_head(whole, engine.relative_penalty)
        most = self._audited.options.trials
        most = min(most, TRIALS_OF_WIDE) if engine.fixed.features > WIDE_HEAD else most
        for records in (True, False):
            candidates = self._candidates(members, records)
            if candidates.count < FEWEST_CLIENTS or most < 1:
                continue
            attempts = []
            for number in self._generator.permutation(candidates.count)[:most].tolist():
                if records:
                    phi, targets = candidates.phi[number, :-1], candidates.targets[number]
                    gone = statistics_of(engine.fixed, phi[None], targets[None])
                else:
                    gone = statistics[number]
                after = fit_head(whole - gone, engine.relative_penalty)
                heads = TwoHeads(
                    self._released(before.weights),
                    self._released(after.weights),
                    public,
                    self._kind,
                    before.relative_penalty,
                )
                attempts.append(attempt(heads, candidates, [number], self._another(candidates.count, [number])))
                self._audited.progress("comparing two releases", len(attempts), most)
            yield BeforeAfterAttack.of(attempts, "trials", candidates, len(public))
