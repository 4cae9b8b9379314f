"""Options, results and figure of an audit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sifu.audit.before_after import BeforeAfterAttack
from sifu.audit.exact_releases import ExactAudit
from sifu.audit.membership import ForgettingAudit, MembershipAudit
from sifu.audit.releases import ReleaseAudit, Replays
from sifu.audit.replay_evidence import NodeDistance, NoiseDrawn
from sifu.plots.style import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    VERMILLION,
    counted,
    empty_figure,
    headline,
    new_figure,
    only_ticks,
    plain,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_BARS = 12

AuditProgress = Callable[[str, int, int], None]
"""Callback with the name of the current step, the work done, and the total work."""


@dataclass(frozen=True)
class AuditOptions:
    """Options of an audit.

    Attributes:
        subjects: Maximum number of forgotten subjects to replay.
        replays: Number of replays of each statistic.
        shadows: Number of shadow federations with the client; as many are trained without it. 0 trains none.
        shadow_rounds: Maximum number of rounds of a shadow federation.
        relearn_rounds: Maximum number of rounds of relearning.
        attacks: True to attack the released model, which retrains models, and to compare two releases.
        request: Id of the request whose release is attacked, or None for the last one.
        seed: Seed of the audit's own draws; None draws from the operating system, as certified noise does.
        public: File of public samples for the comparison of two releases, or None for the run's held-out rows.
        trials: Number of deletions that the audit makes itself and compares.
        only_before_after: True to run the comparison of two releases only.
        as_if_certified: True to test requests of level `none` against their budget too, as the negative controls do.
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
    public: str | Path | None = None
    trials: int = 50
    only_before_after: bool = False

    def claims(self, level: str | None) -> bool:
        """Return whether the audit tests a request of this level against its budget."""
        return self.as_if_certified or level not in (None, "none")


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
class AttackAudit:
    """Results of the attacks on the model that a request released."""

    request: str
    clients: tuple[str, ...]
    membership: MembershipAudit | None
    forgetting: ForgettingAudit


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
    attacks: AttackAudit | None
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


@styled
def draw_audit(report: AuditReport) -> Figure:
    """Draw true distances against Psi on the left, and empirical against certified epsilon on the right.

    The right panel shows the subjects that are closest to their bound.
    """
    points = [(node.psi, node.distance) for subject in report.subjects for node in subject.nodes]
    if not points:
        return empty_figure(audit_message(report), "no node of this run could be replayed")
    bars = []
    for subject in report.subjects:
        if subject.releases is not None and subject.releases.gaussian_mu > 0.0:
            client = subject.clients[0] + (f" +{len(subject.clients) - 1}" if len(subject.clients) > 1 else "")
            bars.append((f"{plain(subject.request or '', 12)}  {plain(client, 16)}", subject.releases))
    drawn = sorted(bars, key=lambda bar: -bar[1].epsilon_true / bar[1].epsilon_certified)[:MOST_BARS]
    figure = new_figure(max(3.3, 1.5 + 0.34 * len(drawn)))
    left, right = figure.subplots(1, 2, width_ratios=[1.0, 1.15])
    _draw_distances(left, points)
    _draw_epsilons(right, drawn, len(bars))
    headline(figure, audit_message(report))
    return figure


def _draw_distances(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    psi, distance = (np.array(column) for column in zip(*points, strict=True))
    drawn = np.isfinite(psi) & (psi > 0.0) & (distance > 0.0)
    axes.set_title("True distance to the counterfactual without the client", loc="left", pad=8)
    axes.set_xlabel("Ψ, the bound")
    axes.set_ylabel("True distance")
    only_ticks(axes, grid="both")
    if not drawn.any():
        axes.text(0.5, 0.5, "no client touched any node", transform=axes.transAxes, ha="center", color=GREY)
        return
    psi, distance = psi[drawn], distance[drawn]
    broken = distance > psi
    # Points far below their bound, after strong contraction, would compress the rest of the axis.
    low = max(float(min(distance.min(), psi.min())), 1e-6 * float(psi.max())) / 1.6
    high = float(max(psi.max(), distance.max())) * 1.6
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.fill_between([low, high], [low, high], [high, high], color=VERMILLION, alpha=0.08, linewidth=0)
    axes.plot([low, high], [low, high], color=VERMILLION, linewidth=1.4)
    axes.plot(psi[~broken], distance[~broken], "o", color=BLUE, markersize=3.0, alpha=0.5, mew=0)
    axes.plot(psi[broken], distance[broken], "o", color=VERMILLION, markersize=4.0, mew=0)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.annotate(
        "above Ψ: contradicted", (0.04, 0.96), xycoords="axes fraction", va="top", color=VERMILLION, fontsize=8
    )
    below = f"{int((~broken).sum()):,} of {psi.size:,} below"
    axes.annotate(below, (0.96, 0.04), xycoords="axes fraction", ha="right", color=GREY, fontsize=8)


def _draw_epsilons(axes: Axes, bars: Sequence[tuple[str, ReleaseAudit]], total: int) -> None:
    from matplotlib.lines import Line2D

    more = f", {len(bars)} of {total} subjects" if total > len(bars) else ""
    axes.set_title(f"ε of the releases{more}", loc="left", pad=8)
    if not bars:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no release needed noise", transform=axes.transAxes, ha="center", color=GREY)
        return
    rows = np.arange(len(bars))[::-1]
    largest = 0.0
    for row, (_, bar) in zip(rows, bars, strict=True):
        axes.plot([0.0, bar.epsilon_certified], [row, row], color=FAINT, linewidth=7.0, solid_capstyle="butt")
        colour = VERMILLION if bar.epsilon_shown > bar.epsilon_certified else GREEN
        axes.plot([0.0, bar.epsilon_shown], [row, row], color=colour, linewidth=7.0, solid_capstyle="butt")
        axes.plot([bar.epsilon_certified], [row], "|", color=INK, markersize=13, mew=1.8)
        axes.plot([bar.epsilon_true], [row], "o", color="white", mec=INK, mew=1.2, markersize=5, zorder=5)
        largest = max(largest, bar.epsilon_certified, bar.epsilon_true)
    axes.set_yticks(rows, [name for name, _ in bars])
    axes.set_ylim(-0.7, len(bars) - 0.3)
    axes.set_xlim(0.0, largest * 1.08)
    axes.set_xlabel("ε at the request's δ")
    only_ticks(axes, grid="x")
    handles = [
        Line2D([], [], color=GREEN, linewidth=7.0, label="shown by attacks"),
        Line2D([], [], linestyle="", marker="o", mfc="white", mec=INK, ms=5, label="true, over the noise"),
        Line2D([], [], linestyle="", marker="|", color=INK, ms=11, mew=1.8, label="certified"),
    ]
    axes.figure.legend(handles=handles, loc="outside lower right", ncols=3, handlelength=1.4, columnspacing=1.4)


def audit_message(report: AuditReport) -> str:
    """Return the figure's message: whether the audit contradicts the run."""
    if report.contradictions:
        return f"The audit contradicts {counted(len(report.contradictions), 'certified statement')} of this run"
    if report.observations:
        return "No certified claim is contradicted; what was not certified does not hold"
    return "Nothing the audit tried contradicts what was certified"
