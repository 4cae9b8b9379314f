"""Figure of Psi against the true distance that it bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sifu.plots.style import BRANCH_COLOURS, FAINT, GREY, INK, only_ticks, styled
from sifu_paper.plots.courses import Results
from sifu_paper.plots.panels import figure_title, footnote, nothing_yet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = "osD^vP"


@styled
def draw_psi_alpha(results: Results) -> Figure:
    """Draw a dot for each measurement, by both accountings; below the line the bound is violated."""
    from matplotlib.figure import Figure

    measured = [row for row in results.rows if row["distance"] and row["psi_round"] and row["psi_population"]]
    if not measured:
        return nothing_yet("nothing has been measured yet")
    present = {row["dataset"] for row in measured}
    titles = {dataset: title for dataset, title in results.titles.items() if dataset in present}
    figure = Figure(figsize=(8.4, 4.9), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    values = [row[key] for row in measured for key in ("distance", "psi_round", "psi_population")]
    low, high = min(values) / 1.6, max(values) * 1.6
    broken = {}
    for axes, (accounting, words) in zip(
        panels,
        (("psi_round", "Weights of the round (ours)"), ("psi_population", "Population weights (the paper's code)")),
        strict=True,
    ):
        axes.set_xscale("log")
        axes.set_yscale("log")
        only_ticks(axes, grid="both")
        axes.tick_params(which="both", length=0)
        axes.fill_between([low, high], [low, low], [low, high], color=FAINT, alpha=0.55, linewidth=0, zorder=0)
        axes.plot([low, high], [low, high], color=INK, linewidth=1.2, zorder=2)
        for number, (dataset, title) in enumerate(titles.items()):
            here = [row for row in measured if row["dataset"] == dataset]
            axes.plot(
                [row["distance"] for row in here],
                [row[accounting] for row in here],
                MARKERS[number % len(MARKERS)],
                color=BRANCH_COLOURS[number % len(BRANCH_COLOURS)],
                markersize=4,
                alpha=0.6,
                markeredgewidth=0,
                label=title,
                zorder=3,
            )
        broken[accounting] = sum(row["distance"] > row[accounting] for row in measured)
        axes.set_title(words, fontweight="bold", loc="left")
        axes.set_xlabel(r"true distance $\alpha = \|\theta^n - \phi^n\|$")
        axes.annotate(
            f"bound broken: {broken[accounting]:,} of {len(measured):,}",
            (0.97, 0.05),
            xycoords="axes fraction",
            ha="right",
            color=INK if broken[accounting] else GREY,
            fontweight="bold",
        )
        axes.set_xlim(low, high)
        axes.set_ylim(low, high)
    panels[0].set_ylabel(r"bound $\Psi$ with B = 1")
    panels[0].legend(loc="upper left", markerscale=1.4, handletextpad=0.2)
    figure_title(figure, _message(broken, len(measured)))
    footnote(
        figure,
        [
            f"{len({(row['dataset'], row['variant']) for row in measured})} settings, from the paper's "
            "hyper-parameters to ones "
            "that do not converge. The world without a client: the same schedule, the client absent, its slots "
            "not refilled.",
            "The paper: Psi >= alpha in every scenario tried, with B = 1, also for networks.",
        ],
    )
    return figure


def _message(broken: dict[str, int], measured: int) -> str:
    if not broken["psi_round"] and not broken["psi_population"]:
        return "Psi stays above the true distance in every measurement, by both accountings"
    with_population = f"with population weights it was too small in {_share(broken['psi_population'], measured)}"
    if not broken["psi_round"]:
        return f"With the weights of the round Psi held in every measurement; {with_population}"
    return (
        f"With the weights of the round Psi was too small in {_share(broken['psi_round'], measured)}; {with_population}"
    )


def _share(part: int, whole: int) -> str:
    return "none" if part == 0 else f"{100 * part / whole:.1f} %"
