"""Membership attack on a released model: samples with a small loss are called members.

It informs, but contradicts no certificate: one model is one sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from sifu.audit.audited import Audited
from sifu.audit.replay_evidence import Evidence
from sifu.choices import Level
from sifu.core.method_info import attacker_rate
from sifu.core.round import keyed_generator
from sifu.errors import InputError
from sifu.requests.outcome import node_before
from sifu.store.projection import RequestRow
from sifu.store.reader import RunReader, joined_remainders, plain_names
from sifu.theory.arrays import Floats

if TYPE_CHECKING:
    from sifu.engines.sim.scorers import Samples

MOST_HELD_OUT = 2000
FALSE_ALARMS = 0.01
"""Share of held-out samples that the attack may call members."""


@dataclass(frozen=True)
class MembershipAudit:
    """Success of the attack on the models before and after a request.

    `before` and `released` are the shares of the forgotten samples that are called members, at 1 % false alarms on the
    `held_out` samples; `bound` is what the certificate allows for the release.
    """

    request: str
    clients: tuple[str, ...]
    samples: int
    held_out: int
    before: float | None
    released: float
    bound: float | None


def attacked_request(audited: Audited) -> RequestRow | None:
    """Return the request whose release is attacked, or None if there is nothing to attack."""
    reader, wanted = audited.reader, audited.options.request
    done = {row.request: row for row in reader.requests() if row.status == "done"}
    if wanted is not None and wanted not in done:
        raise InputError(f"there is no finished request {wanted!r} in this run; it has {', '.join(done) or 'none'}")
    if not audited.options.attacks or not done:
        return None
    return done[wanted] if wanted is not None else max(done.values(), key=lambda row: row.request_order or 0)


def models_wanted(reader: RunReader, row: RequestRow | None) -> set[int]:
    """Return the nodes whose models the attacks need."""
    if row is None:
        return set()
    return {node for node in (node_before(reader, row), row.final_node) if node is not None}


def attack_rate(members: Floats, others: Floats, alarms: float = FALSE_ALARMS) -> float:
    """Return the share of members above the threshold that at most this share of the others exceed.

    >>> attack_rate(np.array([0.5, 2.0, 3.0]), np.array([0.0, 1.0]))
    0.6666666666666666
    """
    ordered = np.sort(others)
    return float(np.mean(members > ordered[ordered.size - 1 - int(alarms * ordered.size)]))


def attack_release(audited: Audited, row: RequestRow, evidence: Evidence) -> MembershipAudit | None:
    """Attack the models before and after a request, or return None and add a note if data or models are missing."""
    from sifu.engines.sim.scorers import Samples, scorer_of

    reader, on_disk = audited.reader, audited.reader.models()
    data, scorer, held = audited.data(), scorer_of(audited.engine), audited.held_out()
    if data is None or scorer is None or held is None:
        audited.notes.append("membership was not attacked: the audit has no samples, or none that were held out")
        return None

    def rate(node: int | None) -> float | None:
        model = evidence.models.get(node) if node is not None else None
        if model is None and node in on_disk:
            model = reader.load_model(node)
        if model is None:
            return None
        released = audited.as_released(model, node)
        return attack_rate(-scorer.losses(released, forgotten), -scorer.losses(released, others))

    forgotten = _forgotten(audited, row, data)
    rows = keyed_generator(audited.spec.seed, "audit held out").permutation(len(held[0]))[:MOST_HELD_OUT]
    others = Samples(held[0][rows], held[1][rows])
    after = rate(row.final_node)
    if after is None:
        audited.notes.append(f"the model that request {row.request} released is gone: it was not attacked")
        return None
    names, before = plain_names(reader, row.clients), rate(node_before(reader, row))
    level = cast("Level", row.level or "none")
    bound = attacker_rate(level, row.multiplier) if row.multiplier else None
    return MembershipAudit(row.request, names, forgotten.count, others.count, before, after, bound)


def _forgotten(audited: Audited, row: RequestRow, data: object) -> Samples:
    from sifu.engines.sim.scorers import Samples, stacked

    if row.records:  # the client's remaining records are not forgotten
        turns = {item.request: item for item in joined_remainders(audited.reader)}
        first, gone = data[turns[row.request].first], list(row.records)  # type: ignore[index]
        return Samples(np.asarray(first.x)[gone], np.asarray(first.y)[gone])
    return stacked(data, [audited.view.index_of[name] for name in row.clients])
