"""What the figure of an audit shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sifu.audit.audit_report import AuditReport
from sifu.plots import audit as plots
from sifu.plots.style import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_audit(report: AuditReport) -> Figure:
    """True distances beside Psi, and the epsilon that attacks show beside the certified one."""
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
