"""The options of an audit, its results, and what its figure shows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from sifu.audit.membership import ForgettingAudit, MembershipAudit
from sifu.audit.releases import ExactAudit, ReleaseAudit, Replays
from sifu.audit.replay_evidence import NodeDistance, NoiseDrawn
from sifu.plots import audit_figure as plots
from sifu.plots.style import counted

AuditProgress = Callable[[str, int, int], None]
"""(what is being done, how much of it is done, of how much)."""


@dataclass(frozen=True)
class AuditOptions:
    """How hard to try.

    `subjects` is how many of the forgotten are replayed; `shadows` how many shadow federations each world gets (0:
    none), `shadow_rounds` and `relearn_rounds` bound their length. `attacks` turns membership inference, Scratch and
    relearning on; they need retraining. `request` names the request they look at (the last one). `seed` makes the
    audit's own draws repeatable; without it they come from the operating system, as certified noise does.
    `as_if_certified` treats requests of level `none` as if they had claimed their budget: for controls that must be
    caught.
    """

    subjects: int = 16
    replays: Replays = field(default_factory=Replays)
    attacks: bool = True
    shadows: int = 16
    shadow_rounds: int = 100
    relearn_rounds: int = 50
    request: str | None = None
    seed: int | None = None
    as_if_certified: bool = False

    def claims(self, level: str | None) -> bool:
        """Whether a request of this level is held to its budget."""
        return self.as_if_certified or level not in (None, "none")


@dataclass(frozen=True)
class SubjectAudit:
    """One subject: every node's truth next to Psi, and what its releases give away."""

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
        """The truth at the node its request went back to."""
        return next((node for node in self.nodes if node.node == self.source), None)

    @property
    def closest(self) -> float:
        """The largest share of its bound that the truth reached: 1 is a tight bound, more breaks it."""
        shares = [node.distance / node.psi for node in self.nodes if node.psi > 0.0 and math.isfinite(node.psi)]
        broken = any(node.distance > 0.0 and node.psi == 0.0 for node in self.nodes)
        return math.inf if broken else max(shares, default=0.0)


@dataclass(frozen=True)
class AttackAudit:
    """Attacks on the model that a request released."""

    request: str
    clients: tuple[str, ...]
    membership: MembershipAudit | None
    forgetting: ForgettingAudit


@dataclass(frozen=True)
class AuditReport:
    """Everything that was tried.

    `exact` compares digests of exact releases. `contradictions` are claims that turned out false; `observations` would
    be, had they been claimed; `notes` say what could not be tried.
    """

    run: str
    subjects: tuple[SubjectAudit, ...]
    noise: tuple[NoiseDrawn, ...]
    nodes_replayed: int
    nodes_missed: int
    attacks: AttackAudit | None
    exact: tuple[ExactAudit, ...]
    contradictions: tuple[str, ...]
    observations: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether no certified claim was contradicted."""
        return not self.contradictions

    def values(self) -> dict[str, Any]:
        """As plain values."""
        content = asdict(self)
        for mapping, subject in zip(content["subjects"], self.subjects, strict=True):
            mapping["largest_share_of_psi"] = subject.closest
            if subject.releases is not None:
                mapping["releases"]["epsilon_shown"] = subject.releases.epsilon_shown
        for mapping, release in zip(content["exact"], self.exact, strict=True):
            mapping |= {"same_model": release.same_model, "same_sum": release.same_sum}
        return {"holds": self.holds, **content}


if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_audit(report: AuditReport) -> Figure:
    """True distances next to Psi, and the epsilon that attacks show next to the certified one."""
    points = [(node.psi, node.distance) for subject in report.subjects for node in subject.nodes]
    bars = [
        plots.EpsilonBar(
            subject.request or "",
            subject.clients[0] + (f" +{len(subject.clients) - 1}" if len(subject.clients) > 1 else ""),
            subject.releases.epsilon_certified,
            subject.releases.epsilon_shown,
            subject.releases.epsilon_true,
        )
        for subject in report.subjects
        if subject.releases is not None and subject.releases.gaussian_mu > 0.0
    ]
    return plots.draw_audit(audit_message(report), points, bars)


def audit_message(report: AuditReport) -> str:
    """What the figure shows, in one sentence."""
    if report.contradictions:
        return f"The audit contradicts {counted(len(report.contradictions), 'certified statement')} of this run"
    if report.observations:
        return "No certified claim is contradicted; what was not certified does not hold"
    return "Nothing the audit tried contradicts what was certified"
