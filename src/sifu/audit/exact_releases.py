"""Exact certificates held against the world that never had the client: equality of digests, no statistics about it.

The released model is compared with the one that the same rounds give in an engine that was never given the client's
data: another federation, with other counts. Of a head in closed form the sum is made again from the data of those who
stay: its digest must be the one that was recorded. Where no such engine can be built, nothing was recomputed, and the
audit says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sifu.audit.evidence import Evidence, Watched, made_of
from sifu.core.layout import Vector
from sifu.record.coupled_replay import replay_worlds
from sifu.record.other_world import EngineWithout
from sifu.requests.certification import solves
from sifu.store.files import model_bytes, model_salt
from sifu.store.reader import RunReader
from sifu.store.replayed_ledger import ReplayedLedger
from sifu.store.statistics import read_statistics
from sifu.theory.history import PathNode


@dataclass(frozen=True)
class ExactAudit:
    """One exact request of one subject, in digests.

    `released` is the model as it was recorded, `without` the one of the world without the clients (None: it was not
    recomputed, or not compared, since the digest of a released file that was erased has lost its salt). `sum_recorded`
    and `sum_without` are of a head in closed form: the sum it was solved from, and the sum made again from the data of
    those who stay, while the file of the sum is there.
    """

    request: str
    clients: tuple[str, ...]
    released: str
    without: str | None
    sum_recorded: str | None = None
    sum_without: str | None = None

    @property
    def same_model(self) -> bool:
        """Whether the two models are one, to the bit."""
        return self.released == self.without

    @property
    def same_sum(self) -> bool:
        """Whether the two sums are one; nothing is said where there are none."""
        return self.sum_without is None or self.sum_recorded == self.sum_without


def exact_audits(
    engine_without: Callable[[Collection[int]], EngineWithout | None],
    reader: RunReader,
    watched: Sequence[Watched],
    evidence: Evidence,
) -> Iterator[tuple[ExactAudit, bool]]:
    """Every exact release of the watched, and whether the replay gives the same model in both worlds.

    The other world is computed from the beginning by an engine that `engine_without` made without the clients' data.
    """
    digests, recorded = ReplayedLedger.of(reader).model_digests, solves(reader)
    for subject in watched:
        request = subject.request
        if request is None or request.level != "exact" or request.final_node is None:
            continue
        final, solve = request.final_node, recorded.get(request.final_node)
        here, other = evidence.finals.get((subject.subject, final)), engine_without(subject.clients)
        model = without = sum_without = None
        if other is not None and other.layout == reader.layout and here is not None:
            model = _model_without(other, reader, subject, final, evidence)
        same_worlds = model is not None and here is not None and np.array_equal(here, model)
        if model is not None and final in reader.models():
            salt = model_salt(reader.model_content(final))
            without = hashlib.sha256(model_bytes(reader.layout, model, salt)).hexdigest()
        elif model is not None and not same_worlds:
            without = "another model"
        whole = next((row for row in reader.statistics().values() if solve and row.digest == solve["sum"]), None)
        if other is not None and whole is not None:
            those_who_stay = other.sum_of(reader.everyone().between(final, final).clients)
            same = those_who_stay == read_statistics(reader.folder, whole, other.fixed)
            sum_without = whole.digest if same else "other statistics"
        elif solve is not None and whole is None and final == reader.tip and reader.statistics():
            sum_without = "other statistics"  # the sum of the current head is kept, and this is not it
        yield (
            ExactAudit(
                request.request,
                subject.names,
                digests[final],
                without,
                None if whole is None else whole.digest,
                sum_without,
            ),
            same_worlds,
        )


def _model_without(
    other: EngineWithout, reader: RunReader, subject: Watched, final: int, evidence: Evidence
) -> Vector | None:
    """The model of node `final` in the world without the subject; None if something on the way cannot be made again."""

    def noised(node: PathNode, source: Vector) -> Vector | None:
        """The noise of the edge as it was drawn, on the source of this world."""
        if node.node not in evidence.edges:
            return None
        theirs, made_of_it = evidence.edges[node.node]
        if np.array_equal(theirs, source):
            return made_of_it
        moved = made_of_it.astype(np.float64) + (source.astype(np.float64) - theirs.astype(np.float64))
        return moved.astype(source.dtype)

    worlds = {subject.subject: subject.clients}
    for replayed in replay_worlds(other, reader, worlds, noised, made_of(reader, final)):
        if replayed.node.node == final:
            return replayed.without[subject.subject]
    return None
