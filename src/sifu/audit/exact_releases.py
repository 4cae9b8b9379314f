"""Exact certificates held against the world that never had the client: equality of digests, no statistics about it.

The released model is compared with the one that the same rounds give without the client. Of a head in closed form the
sum is made again from the data of those who stay: its digest must be the one that was recorded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from sifu.audit.evidence import Evidence, Watched
from sifu.core.closed_form import StatisticsEngine
from sifu.core.engine import Engine, Position, Rejection
from sifu.requests.certification import solves
from sifu.store.files import model_bytes, model_salt
from sifu.store.reader import RunReader
from sifu.store.replayed_ledger import ReplayedLedger
from sifu.store.statistics import StatisticsRow, read_statistics
from sifu.theory.closed_form import total

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sifu.theory.closed_form import Statistics


@dataclass(frozen=True)
class ExactAudit:
    """One exact request of one subject, in digests.

    `released` is the model as it was recorded, `without` the one of the world without the clients (None: it could not
    be replayed, or not compared, since the digest of a released file that was erased has lost its salt).
    `sum_recorded` and `sum_without` are of a head in closed form: the sum it was solved from, and the sum
    made again from the data of those who stay, while the file of the sum is there.
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
        return self.sum_recorded == self.sum_without


def exact_audits(
    engine: Engine, reader: RunReader, watched: Sequence[Watched], evidence: Evidence
) -> Iterator[tuple[ExactAudit, bool]]:
    """Every exact release of the watched, and whether the replay gives the same model in both worlds."""
    digests, recorded = ReplayedLedger.of(reader).model_digests, solves(reader)
    sums: dict[int, str | None] = {}
    for subject in watched:
        request = subject.request
        if request is None or request.level != "exact" or request.final_node is None:
            continue
        final = request.final_node
        worlds = evidence.finals.get((subject.subject, final))
        without = None
        if worlds is not None and final not in reader.models():
            without = None if np.array_equal(*worlds) else "another model"
        elif worlds is not None:
            salt = model_salt(reader.model_content(final))
            without = hashlib.sha256(model_bytes(reader.layout, worlds[1], salt)).hexdigest()
        solve = recorded.get(final)
        whole = next((row for row in reader.statistics().values() if solve and row.digest == solve["sum"]), None)
        if whole is not None and final not in sums:
            sums[final] = _sum_of_those_who_stay(engine, reader, final, whole)
        yield (
            ExactAudit(
                request.request,
                subject.names,
                digests[final],
                without,
                None if whole is None else whole.digest,
                sums.get(final),
            ),
            worlds is not None and np.array_equal(*worlds),
        )


def _sum_of_those_who_stay(engine: Engine, reader: RunReader, node: int, whole: StatisticsRow) -> str | None:
    """The digest of the file of the sum, if the data of everyone who took part in a solve give these statistics."""
    there = reader.everyone().between(node, node).clients.tolist()

    def parts() -> Iterator[Statistics]:
        for _, sent in cast("StatisticsEngine", engine).collect(there, Position(0, 0)):
            if sent is not None and not isinstance(sent, Rejection):
                yield sent

    fixed = cast("StatisticsEngine", engine).fixed
    same = total(fixed, parts()) == read_statistics(reader.folder, whole, fixed)
    return whole.digest if same else "other statistics"
