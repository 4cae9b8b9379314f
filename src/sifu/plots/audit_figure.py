"""The audit at a glance: true distances next to Psi, and the epsilon that attacks show next to the certified one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sifu.plots.style import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    VERMILLION,
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


@dataclass(frozen=True)
class EpsilonBar:
    """One subject's epsilon: what was certified, what attacks showed, and what the noise truly gives."""

    request: str
    client: str
    certified: float
    shown: float
    true: float


@styled
def draw_audit(message: str, points: Sequence[tuple[float, float]], bars: Sequence[EpsilonBar]) -> Figure:
    """Left: (Psi, true distance) of every node. Right: epsilon by subject, those nearest to their bound."""
    if not points:
        return empty_figure(message, "no node of this run could be replayed")
    drawn = sorted(bars, key=lambda bar: -bar.true / bar.certified)[:MOST_BARS]
    figure = new_figure(max(3.3, 1.5 + 0.34 * len(drawn)))
    left, right = figure.subplots(1, 2, width_ratios=[1.0, 1.15])
    _draw_distances(left, points)
    _draw_epsilons(right, drawn, len(bars))
    headline(figure, message)
    return figure


def _draw_distances(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    psi, distance = (np.array(column) for column in zip(*points, strict=True))
    drawn = np.isfinite(psi) & (psi > 0.0) & (distance > 0.0)
    axes.set_title("True distance to the world without the client", loc="left", pad=8)
    axes.set_xlabel("Ψ, the bound")
    axes.set_ylabel("True distance")
    only_ticks(axes, grid="both")
    if not drawn.any():
        axes.text(0.5, 0.5, "no client touched any node", transform=axes.transAxes, ha="center", color=GREY)
        return
    psi, distance = psi[drawn], distance[drawn]
    broken = distance > psi
    # What is far below its bound, after strong contraction, would squeeze everything else together.
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


def _draw_epsilons(axes: Axes, bars: Sequence[EpsilonBar], total: int) -> None:
    from matplotlib.lines import Line2D

    more = f", {len(bars)} of {total} subjects" if total > len(bars) else ""
    axes.set_title(f"ε of the releases{more}", loc="left", pad=8)
    if not bars:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no release needed noise", transform=axes.transAxes, ha="center", color=GREY)
        return
    rows = np.arange(len(bars))[::-1]
    largest = 0.0
    for row, bar in zip(rows, bars, strict=True):
        axes.plot([0.0, bar.certified], [row, row], color=FAINT, linewidth=7.0, solid_capstyle="butt")
        colour = VERMILLION if bar.shown > bar.certified else GREEN
        axes.plot([0.0, bar.shown], [row, row], color=colour, linewidth=7.0, solid_capstyle="butt")
        axes.plot([bar.certified], [row], "|", color=INK, markersize=13, mew=1.8)
        axes.plot([bar.true], [row], "o", color="white", mec=INK, mew=1.2, markersize=5, zorder=5)
        largest = max(largest, bar.certified, bar.true)
    axes.set_yticks(rows, [f"{plain(bar.request, 12)}  {plain(bar.client, 16)}" for bar in bars])
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
