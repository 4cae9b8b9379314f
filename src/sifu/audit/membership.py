"""Membership attack on a released model: samples with a small loss are called members.

It informs, but contradicts no certificate: one model is one sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from sifu.audit.audited import Audited
from sifu.choices import Level
from sifu.core.method_info import attacker_rate
from sifu.core.round import keyed_generator
from sifu.theory.arrays import Floats

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


def attack_rate(members: Floats, others: Floats, alarms: float = FALSE_ALARMS) -> float:
    """Return the share of members above the threshold that at most this share of the others exceed.

    >>> attack_rate(np.array([0.5, 2.0, 3.0]), np.array([0.0, 1.0]))
    0.6666666666666666
    """
    ordered = np.sort(others)
    return float(np.mean(members > ordered[ordered.size - 1 - int(alarms * ordered.size)]))


def attack_release(audited: Audited) -> MembershipAudit | None:
    """Attack the models before and after a request; return None, with a note if data or models are missing."""
    from sifu.engines.sim.scorers import Samples, scorer_of, stacked

    row, joined = audited.attacked, audited.remainder
    if row is None:
        return None
    scorer, held = scorer_of(audited.engine), audited.held_out
    if audited.data is None or scorer is None or held is None:
        audited.notes.append("membership was not attacked: the audit has no samples, or none that were held out")
        return None

    def rate(node: int | None) -> float | None:
        model = audited.model_of(node)
        if model is None:
            return None
        released = audited.as_released(model, node)
        return attack_rate(-scorer.losses(released, forgotten), -scorer.losses(released, others))

    if joined is None:
        forgotten = stacked(audited.data, [audited.view.index_of[name] for name in row.clients])
    else:  # the client's remaining records are not forgotten
        first, gone = audited.data[joined.first], list(row.records)
        forgotten = Samples(np.asarray(first.x)[gone], np.asarray(first.y)[gone])
    rows = keyed_generator(audited.spec.seed, "audit held out").permutation(len(held[0]))[:MOST_HELD_OUT]
    others = Samples(held[0][rows], held[1][rows])
    after = rate(row.final_node)
    if after is None:
        audited.notes.append(f"the model that request {row.request} released is gone: it was not attacked")
        return None
    names, before = audited.names(row.clients), rate(audited.before)
    level = cast("Level", row.level or "none")
    bound = attacker_rate(level, row.multiplier) if row.multiplier else None
    return MembershipAudit(row.request, names, forgotten.count, others.count, before, after, bound)
