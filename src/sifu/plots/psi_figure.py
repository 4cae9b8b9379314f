"""Psi against Psi*: why each request went back to where it did, and what each noise would do in a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sifu.plots.run_data import PsiPanel, ReportData
from sifu.plots.style import (
    BLUE,
    FAINT,
    GREY,
    INK,
    ORANGE,
    VERMILLION,
    empty_figure,
    headline,
    new_figure,
    note,
    only_ticks,
    plain,
    say_instead,
    styled,
    whole_numbers,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINEAR_UP_TO = 8.0  # Psi beyond this many Psi* is drawn on a logarithmic axis


@styled
def draw_psi(data: ReportData) -> Figure:
    """A small panel for each of the latest requests."""
    panels = data.psi_panels
    if not panels:
        return empty_figure(psi_message(data), "no request has gone back along the history yet")
    columns = 1 if len(panels) == 1 else 2
    rows = -(-len(panels) // columns)
    figure = new_figure(0.9 + 2.25 * rows)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw_panel(axes, panel)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    for axes in grid[:, 0]:
        axes.set_ylabel("Sensitivity Ψ")
    for column in range(columns):
        lowest = max(index for index in range(len(panels)) if index % columns == column)
        grid.flat[lowest].set_xlabel("Rounds along the path before the request")
    _legend(figure, panels, empty=grid.flat[-1] if len(panels) < rows * columns else None)
    headline(figure, psi_message(data))
    return figure


def psi_message(data: ReportData) -> str:
    """What the panels show, in one sentence."""
    panels = data.psi_panels
    if not panels:
        return "Sensitivity of the clients to be forgotten"
    stayed = sum(1 for panel in panels if panel.source_x == panel.tip_x)
    if stayed == len(panels):
        return "Noise hides the forgotten clients at the current model: nothing had to be undone"
    return "Training went back to where the noise hides what each client had left in the model"


def _draw_panel(axes: Axes, panel: PsiPanel) -> None:
    curves = np.where(np.isfinite(panel.curves), panel.curves, np.nan)
    top = float(np.nanmax(curves, initial=0.0))
    logarithmic = panel.psi_star > 0.0 and top > LINEAR_UP_TO * panel.psi_star
    if logarithmic:
        curves = np.where(curves > 0.0, curves, np.nan)
        axes.set_yscale("log")
    before = panel.x <= panel.source_x
    for index in reversed(range(len(curves))):
        strong = index == 0
        style: dict[str, Any] = {"color": BLUE, "linewidth": 2.0 if strong else 0.8, "zorder": 4 if strong else 3}
        # The last model before the cut belongs to both parts, so that the line has no gap.
        after = panel.x >= panel.source_x
        axes.plot(panel.x[before], curves[index][before], alpha=1.0 if strong else 0.45, **style)
        axes.plot(
            panel.x[after], curves[index][after], alpha=0.55 if strong else 0.25, linestyle=(0, (2.5, 2.0)), **style
        )
    if panel.tip_x > panel.source_x:
        axes.axvspan(panel.source_x, panel.tip_x, color=FAINT, alpha=0.45, linewidth=0, zorder=0)
        if panel.tip_x - panel.source_x > 0.2 * panel.tip_x:
            middle = (panel.source_x + panel.tip_x) / 2
            note(axes, "cut off", (middle, 0.02), (0, 0), xycoords=("data", "axes fraction"), ha="center", va="bottom")
    for x in panel.noise_edges:
        axes.axvline(x, color=GREY, linewidth=0.8, linestyle=(0, (1.2, 1.2)), zorder=1)
    if panel.psi_star > 0.0:
        axes.axhline(panel.psi_star, color=VERMILLION, linewidth=1.6, zorder=2)
    if panel.limit < panel.psi_star:
        axes.axhline(panel.limit, color=VERMILLION, linewidth=1.0, linestyle=(0, (4, 2)), zorder=2)
    chosen = panel.source_psi if panel.source_psi > 0.0 or not logarithmic else np.nan
    axes.plot([panel.source_x], [chosen], "o", markersize=8, mfc="white", mec=INK, mew=1.8, zorder=6, clip_on=False)
    axes.plot([panel.source_x], [chosen], "o", markersize=3.2, color=INK, mew=0, zorder=7, clip_on=False)
    if not logarithmic:
        axes.set_ylim(0.0, max(top, panel.psi_star, 1e-300) * 1.12)
    axes.set_xlim(0, max(panel.tip_x, 1) * 1.02)
    whole_numbers(axes, most=6)
    only_ticks(axes, grid="y")
    axes.set_title(plain(panel.request, 30), loc="left", fontweight="bold", parse_math=False, pad=19)
    axes.text(
        0.0, 1.035, _subtitle(panel), transform=axes.transAxes, fontsize=8, color=GREY, va="bottom", parse_math=False
    )


def _subtitle(panel: PsiPanel) -> str:
    if panel.source_x == panel.tip_x:
        where = f"stays at round {panel.tip_x:,}"
    else:
        where = f"back to round {panel.source_x:,} of {panel.tip_x:,}"
    if panel.held_back:
        return f"{where}: {panel.held_back}"
    if panel.noise_std == 0.0:
        return f"{where}: never touched, no noise needed"
    if panel.joint:
        return f"{where}, {panel.clients:,} clients as one"
    return f"{where}, largest Ψ: {plain(panel.largest)}"


def _legend(figure: Figure, panels: tuple[PsiPanel, ...], empty: Axes | None) -> None:
    """In the empty place of the grid where there is one, below it otherwise."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=BLUE, linewidth=2.0, label="Ψ, largest and others"),
        Line2D([], [], color=VERMILLION, linewidth=1.6, label="Ψ* = σ/s: what the noise hides"),
        Line2D([], [], linestyle="", marker="o", mfc="white", mec=INK, mew=1.8, ms=8, label="model gone back to"),
    ]
    if any(panel.limit < panel.psi_star for panel in panels):
        handles.append(Line2D([], [], color=VERMILLION, lw=1.0, linestyle=(0, (4, 2)), label="less the reserve"))
    if any(panel.noise_edges for panel in panels):
        handles.append(Line2D([], [], color=GREY, lw=0.8, linestyle=(0, (1.2, 1.2)), label="earlier noise"))
    if empty is not None:
        empty.legend(handles=handles, loc="center left", handlelength=1.8, labelspacing=0.9)
    else:
        figure.legend(handles=handles, loc="outside lower left", ncols=4, handlelength=1.8, columnspacing=1.5)


if TYPE_CHECKING:
    from matplotlib.figure import Figure


class NoiseOption(Protocol):
    """What one noise would do."""

    @property
    def noise_std(self) -> float: ...
    @property
    def rounds(self) -> int: ...
    @property
    def predicted_rounds(self) -> int | None: ...
    @property
    def predicted_interval(self) -> tuple[int, int] | None: ...


class PlanCurve(Protocol):
    """What the figure needs of a plan."""

    @property
    def noise_std(self) -> float: ...
    @property
    def source_rounds(self) -> int: ...
    @property
    def predicted_rounds(self) -> int | None: ...
    @property
    def scratch_rounds(self) -> int | None: ...
    @property
    def options(self) -> Sequence[NoiseOption]: ...


def plan_message(plan: PlanCurve) -> str:
    """The plan in a sentence."""
    if plan.predicted_rounds is None or plan.scratch_rounds is None:
        return "No prediction: the first training did not reach its target."
    noise = f"sigma {plan.noise_std:.3g} at round {plan.source_rounds}" if plan.noise_std else "No noise"
    return f"{noise}: perhaps {plan.predicted_rounds} rounds, Scratch {plan.scratch_rounds}."


@styled
def draw_plan(plan: PlanCurve) -> Figure:
    """Predicted rounds against sigma with their interval, Scratch, and the node each sigma goes back to."""
    shown = [option for option in plan.options if option.noise_std > 0.0 and option.predicted_rounds is not None]
    figure = new_figure(3.4)
    headline(figure, plan_message(plan))
    if len(shown) < 2:
        return say_instead(figure, "Nothing to show: fewer than two noises could be predicted.")
    axes = figure.add_subplot()
    sigmas = [option.noise_std for option in shown]
    intervals = [option.predicted_interval or (option.predicted_rounds or 0,) * 2 for option in shown]
    axes.fill_between(
        sigmas, [low for low, _ in intervals], [high for _, high in intervals], color=BLUE, alpha=0.15, lw=0
    )
    axes.plot(
        sigmas, [option.predicted_rounds or 0 for option in shown], "o-", color=BLUE, ms=3.5, label="predicted rounds"
    )
    axes.plot(sigmas, [option.rounds for option in shown], ".:", color=ORANGE, label="round it goes back to")
    if plan.scratch_rounds is not None:
        axes.axhline(plan.scratch_rounds, color=GREY, ls="--", lw=1, label="Scratch")
    if plan.noise_std > 0.0 and plan.predicted_rounds is not None:
        axes.plot([plan.noise_std], [plan.predicted_rounds], "*", color=VERMILLION, ms=13, label="this plan")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set(xlabel="noise sigma", ylabel="rounds")
    only_ticks(axes, grid="y")
    axes.legend()
    return figure
