"""Results of an audit."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from sifu.audit.before_after import BeforeAfterAttack
from sifu.audit.exact_releases import ExactAudit
from sifu.audit.membership import MembershipAudit
from sifu.audit.releases import ReleaseAudit
from sifu.audit.replay_evidence import NodeDistance, NoiseDrawn


@dataclass(frozen=True)
class SubjectAudit:
    """Results for one subject: the true distance and Psi at every node, and the leakage of its releases."""

    subject: int
    clients: tuple[str, ...]
    request: str | None
    level: str
    budget: float
    source: int | None
    nodes: tuple[NodeDistance, ...]
    releases: ReleaseAudit | None
    findings: tuple[str, ...]

    @property
    def at_source(self) -> NodeDistance | None:
        """True distance at the node that the subject's request rolled back to, or None."""
        return next((node for node in self.nodes if node.node == self.source), None)

    @property
    def closest(self) -> float:
        """Largest ratio of true distance to Psi: at 1 the bound is tight, above 1 it is violated."""
        shares = [node.distance / node.psi for node in self.nodes if node.psi > 0.0 and math.isfinite(node.psi)]
        broken = any(node.distance > 0.0 and node.psi == 0.0 for node in self.nodes)
        return math.inf if broken else max(shares, default=0.0)


@dataclass(frozen=True)
class AuditReport:
    """All results of an audit.

    `exact` compares digests of exact releases. `before_after` is the attack of an observer who kept an earlier
    release, which certificates do not cover. `contradictions` lists certified claims that are false, `observations`
    lists uncertified statements that are false, and `notes` lists what could not be tested.
    """

    run: str
    subjects: tuple[SubjectAudit, ...]
    noise: tuple[NoiseDrawn, ...]
    nodes_replayed: int
    nodes_missed: int
    membership: MembershipAudit | None
    before_after: tuple[BeforeAfterAttack, ...]
    exact: tuple[ExactAudit, ...]
    contradictions: tuple[str, ...]
    observations: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """True if no certified claim is contradicted."""
        return not self.contradictions

    def values(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        content = asdict(self)
        for mapping, subject in zip(content["subjects"], self.subjects, strict=True):
            mapping["largest_share_of_psi"] = subject.closest
            if subject.releases is not None:
                mapping["releases"]["epsilon_shown"] = subject.releases.epsilon_shown
        for mapping, release in zip(content["exact"], self.exact, strict=True):
            mapping |= {"same_model": release.same_model, "same_sum": release.same_sum}
        return {"holds": self.holds, **content}
