"""Comparison of the digests of exact releases with the digests of counterfactual models without the client.

The released model must equal the model that the same rounds give in an engine that never had the client's data. For a
head in closed form, the sum is recomputed from the data of the remaining clients, and its digest must be the recorded
one. If no such engine can be built, nothing is recomputed, and the audit says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sifu.audit.replay_evidence import Evidence, Watched, made_of
from sifu.core.layout import Vector
from sifu.requests.certification import solves
from sifu.run.coupled_replay import EngineWithout, replay_counterfactuals
from sifu.store.files import model_bytes, model_salt
from sifu.store.reader import RunReader
from sifu.store.replayed_ledger import ReplayedLedger
from sifu.store.statistics_files import read_statistics
from sifu.theory.history import PathNode


@dataclass(frozen=True)
class ExactAudit:
    """Digests that compare an exact release with its counterfactual.

    `released` belongs to the recorded model, `without` to the counterfactual model without the clients. `without` is
    None if that model was not recomputed, or not compared because the released file was erased together with its salt.
    For a head in closed form, `sum_recorded` belongs to the sum it was solved from, and `sum_without` to the sum
    recomputed from the data of the remaining clients; both are None if there is no sum to compare with. In place of a
    digest, a phrase such as "another model" states a difference.
    """

    request: str
    clients: tuple[str, ...]
    released: str
    without: str | None
    sum_recorded: str | None = None
    sum_without: str | None = None

    @property
    def same_model(self) -> bool:
        """True if the two models are bit-identical."""
        return self.released == self.without

    @property
    def same_sum(self) -> bool:
        """True if the two sums are equal, or if there are none to compare."""
        return self.sum_without is None or self.sum_recorded == self.sum_without


def exact_audits(
    engine_without: Callable[[Collection[int]], EngineWithout | None],
    reader: RunReader,
    watched: Sequence[Watched],
    evidence: Evidence,
) -> Iterator[tuple[ExactAudit, bool]]:
    """Yield each exact release of the subjects, compared with its counterfactual.

    The second value says whether replays with and without the subject's clients give the same model.

    Args:
        engine_without: Function that returns an engine that never had these clients' data, or None if there is none.
        reader: Reader of the run.
        watched: The subjects whose releases are compared.
        evidence: Models from the replay of the run.
    """
    digests, recorded = ReplayedLedger.of(reader).model_digests, solves(reader)
    for subject in watched:
        request = subject.request
        if request is None or request.level != "exact" or request.final_node is None:
            continue
        final, solve = request.final_node, recorded.get(request.final_node)
        here, other = evidence.finals.get((subject.subject, final)), engine_without(subject.clients)
        model = without = sum_without = those_who_stay = None
        taken = reader.everyone().between(final, final).clients
        if other is not None and other.layout == reader.layout and here is not None:
            model = _model_without(other, reader, subject, final, evidence)
        same_counterfactuals = model is not None and here is not None and np.array_equal(here, model)
        if model is not None and final in reader.models():
            salt = model_salt(reader.model_content(final))
            without = hashlib.sha256(model_bytes(reader.layout, model, salt)).hexdigest()
        elif model is not None and not same_counterfactuals:
            without = "another model"
        whole = next((row for row in reader.statistics().values() if solve and row.digest == solve["sum"]), None)
        if other is not None and whole is not None:
            those_who_stay = those_who_stay or other.sum_of(taken)
            same = those_who_stay == read_statistics(reader.folder, whole, other.fixed)
            if same or other.must_repeat_bits_of(reader):
                sum_without = whole.digest if same else "other statistics"
        elif solve is not None and whole is None and final == reader.tip and reader.statistics():
            sum_without = "other statistics"  # the sum that the current head was solved from is not stored
        yield (
            ExactAudit(
                request.request,
                subject.names,
                digests[final],
                without,
                None if whole is None else whole.digest,
                sum_without,
            ),
            same_counterfactuals,
        )


def _model_without(
    other: EngineWithout, reader: RunReader, subject: Watched, final: int, evidence: Evidence
) -> Vector | None:
    """Return the model of node `final` without the subject's data, or None if a step cannot be recomputed."""

    def noised(node: PathNode, source: Vector) -> Vector | None:
        """Apply the recorded noise of the edge to the source of the counterfactual."""
        if node.node not in evidence.edges:
            return None
        theirs, made_of_it = evidence.edges[node.node]
        if np.array_equal(theirs, source):
            return made_of_it
        moved = made_of_it.astype(np.float64) + (source.astype(np.float64) - theirs.astype(np.float64))
        return moved.astype(source.dtype)

    counterfactuals = {subject.subject: subject.clients}
    for replayed in replay_counterfactuals(other, reader, counterfactuals, noised, made_of(reader, final)):
        if replayed.node.node == final:
            return replayed.without[subject.subject]
    return None
