"""Comparison of the digests of exact releases with the digests of counterfactual models without the client.

The released model must equal the model that the same rounds give in an engine that never had the client's data. For a
head in closed form, the sum is recomputed from the data of the remaining clients, and its digest must be the recorded
one. If no such engine can be built, nothing is recomputed, and the audit says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sifu.audit.audited import Audited
from sifu.audit.replay_evidence import Evidence, Watched, made_of
from sifu.core.layout import Vector
from sifu.requests.certification import solves
from sifu.run.coupled_replay import EngineWithout, replay_counterfactuals
from sifu.store.files import model_bytes, model_salt
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


def exact_audits(audited: Audited, watched: Sequence[Watched], evidence: Evidence) -> Iterator[ExactAudit]:
    """Yield each exact release of the subjects, compared with its counterfactual; say which claims are false."""
    reader = audited.reader
    digests, recorded = ReplayedLedger.of(reader).model_digests, solves(reader)
    for subject in watched:
        request = subject.request
        if request is None or request.level != "exact" or request.final_node is None:
            continue
        final, solve = request.final_node, recorded.get(request.final_node)
        here, other = audited.models.get(final), audited.run.engine_without(subject.clients)
        model = without = sum_without = None
        if other is not None and other.layout == reader.layout and here is not None:
            model = _model_without(audited, other, subject, final, evidence)
        same_counterfactuals = model is not None and here is not None and np.array_equal(here, model)
        if model is not None and final in reader.models():
            salt = model_salt(reader.model_content(final))
            without = hashlib.sha256(model_bytes(reader.layout, model, salt)).hexdigest()
        elif model is not None and not same_counterfactuals:
            without = "another model"
        whole = next((row for row in reader.statistics().values() if solve and row.digest == solve["sum"]), None)
        if other is not None and whole is not None:
            those_who_stay = other.sum_of(reader.everyone().between(final, final).clients)
            same = those_who_stay == read_statistics(reader.folder, whole, other.fixed)
            if same or other.must_repeat_bits_of(reader):
                sum_without = whole.digest if same else "other statistics"
        elif solve is not None and whole is None and final == reader.tip and reader.statistics():
            sum_without = "other statistics"  # the sum that the current head was solved from is not stored
        summed = None if whole is None else whole.digest
        release = ExactAudit(request.request, subject.names, digests[final], without, summed, sum_without)
        _say_what_is_false(audited, release, same_counterfactuals)
        yield release


def _say_what_is_false(audited: Audited, release: ExactAudit, same_counterfactuals: bool) -> None:
    """Say what is wrong with an exact release, or what was not compared.

    `same_counterfactuals` tells whether replays with and without the subject's clients give the same model.
    """
    who = f"request {release.request}, {', '.join(release.clients[:3])}"
    if not release.same_sum:
        audited.say(True, f"{who}: its head was not solved from the sum over the remaining clients")
    if release.without is not None and not same_counterfactuals:
        audited.say(True, f"{who}: its release is called exact, but training without the clients gives another model")
    elif not same_counterfactuals:
        audited.notes.append(
            f"{who}: its release was not recomputed without the clients, so it was not audited: no engine without "
            "their data can be built, or models that the release depends on are gone"
        )
    elif release.without is not None and not release.same_model:
        audited.notes.append(
            f"{who}: training with and without the client gives the same model here, but its bits differ from the "
            "released model, as on another machine or device"
        )


def _model_without(
    audited: Audited, other: EngineWithout, subject: Watched, final: int, evidence: Evidence
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

    only, counterfactuals = made_of(audited, final), {subject.subject: subject.clients}
    for replayed in replay_counterfactuals(other, audited.reader, counterfactuals, noised, only):
        if replayed.node.node == final:
            return replayed.without[subject.subject]
    return None
