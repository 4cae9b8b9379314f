"""Figure of the federation sizes at which certified unlearning is worthwhile: speed-up over Scratch by size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sifu.plots.style import BLUE, GREEN, INK, VERMILLION, note, only_ticks, styled
from sifu_paper.plots.courses import Results, shape_words
from sifu_paper.plots.growing import Setting, settings_of
from sifu_paper.plots.panels import SCRATCH, figure_title, footnote, nothing_yet
from sifu_paper.plots.speed import SpeedUp, times

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS = {"1": (VERMILLION, "o"), "5": (GREEN, "s"), "10": (BLUE, "D")}


@styled
def draw_scale(results: Results) -> Figure:
    """Draw the automatic sigma, which a user gets, and the best one in hindsight, as separate lines."""
    from matplotlib.figure import Figure

    settings = settings_of(results.courses)
    if not settings:
        return nothing_yet()
    shapes = list(dict.fromkeys(setting.requests for setting in settings))
    figure = Figure(figsize=(max(7.6, 4.6 * len(shapes)), 4.9), layout="constrained")
    panels = figure.subplots(1, len(shapes), squeeze=False, sharey=True)[0]
    for axes, shape in zip(panels, shapes, strict=True):
        only_ticks(axes, grid="y")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.axhline(1.0, color=SCRATCH, linewidth=1.4, linestyle=(0, (4, 2)), zorder=1)
        axes.set_title(shape_words(shape), fontweight="bold", loc="left", fontsize=10.5)
        axes.set_xlabel("clients", fontsize=9.5)
        axes.tick_params(labelsize=9.5)
        here = [setting for setting in settings if setting.requests == shape]
        for epsilon in sorted({setting.epsilon for setting in here}, key=float):
            _lines(axes, [setting for setting in here if setting.epsilon == epsilon], epsilon, shape == shapes[0])
        _client_ticks(axes, sorted({setting.clients for setting in here}))
    panels[0].set_ylabel("speed-up over Scratch", fontsize=9.5)
    panels[0].set_ylim(bottom=min(0.75, panels[0].get_ylim()[0]))
    _times_ticks(panels)
    note(panels[0], "as Scratch", (panels[0].get_xlim()[1], 1.0), (-4, 4), ha="right", fontsize=9)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize=9.5)
    figure_title(figure, scale_message(settings))
    draws = sorted({speed.runs for setting in settings for speed in (setting.automatic, setting.hindsight) if speed})
    counted = f"{draws[0]}" if len(draws) == 1 else f"{draws[0]} to {draws[-1]}"
    levels = sorted({level for setting in settings for level in setting.levels})
    footnote(
        figure,
        [
            f"Convex, everyone takes part, every request certified ({', '.join(levels)}). Draws of the noise behind a "
            f"point: {counted}{'; whiskers: least and largest' if draws[-1] > 1 else ', so points vary'}. In "
            "hindsight: the best of the sigmas tried, chosen after all were run.",
        ],
    )
    return figure


def scale_message(settings: Sequence[Setting]) -> str:
    """Report the automatic choice in the largest federation, not the luckiest point, because single draws vary."""
    automatic = [setting for setting in settings if setting.automatic and setting.automatic.median is not None]
    if not automatic:
        return "Speed-up of SIFU over Scratch"
    size = max(setting.clients for setting in automatic)
    parts = [
        f"{times(setting.automatic.median or 0.0)}x at epsilon {setting.epsilon}"
        for setting in automatic
        if setting.clients == size and setting.automatic
    ]
    return f"With {size:,} clients and the automatic sigma SIFU is quicker than Scratch: {', '.join(parts)}"


def _lines(axes: Axes, settings: Sequence[Setting], epsilon: str, labelled: bool) -> None:
    colour, marker = LOOKS.get(epsilon, (INK, "^"))
    for automatic in (True, False):
        points: list[tuple[int, SpeedUp]] = [
            (setting.clients, speed)
            for setting in settings
            if (speed := setting.automatic if automatic else setting.hindsight) is not None and speed.ratios
        ]
        if not points:
            continue
        sizes = [size for size, _ in points]
        medians = [speed.median or 0.0 for _, speed in points]
        words = rf"$\epsilon$ = {epsilon}, {'automatic' if automatic else 'in hindsight'}"
        axes.errorbar(
            sizes,
            medians,
            [
                [median - min(speed.ratios) for median, (_, speed) in zip(medians, points, strict=True)],
                [max(speed.ratios) - median for median, (_, speed) in zip(medians, points, strict=True)],
            ],
            fmt=marker,
            linestyle="-" if automatic else ":",
            color=colour,
            markerfacecolor=colour if automatic else "white",
            markersize=6.5 if automatic else 5.5,
            linewidth=2.0 if automatic else 1.2,
            elinewidth=1.0,
            capsize=2.5,
            zorder=5 if automatic else 4,
            label=words if labelled else None,
        )


def _client_ticks(axes: Axes, sizes: Sequence[int]) -> None:
    labelled: list[int] = []
    for size in sizes:
        if not labelled or size >= 1.7 * labelled[-1]:
            labelled.append(size)
    axes.set_xticks(labelled, [f"{size:,}" for size in labelled])
    axes.minorticks_off()


def _times_ticks(panels: Sequence[Axes]) -> None:
    low, high = panels[0].get_ylim()
    ticks = [tick for tick in (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200) if low <= tick <= high]
    for axes in panels:
        axes.set_yticks(ticks, [f"{tick:g}x" for tick in ticks])
        axes.minorticks_off()
