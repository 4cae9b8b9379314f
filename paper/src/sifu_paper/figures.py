"""Figures of the experiments, drawn only from results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sifu.plots.style import VERMILLION, figure_bytes
from sifu.store.files import write_atomically
from sifu_paper.plots.courses import Results
from sifu_paper.plots.distance import draw_psi_alpha
from sifu_paper.plots.groups import draw_groups
from sifu_paper.plots.methods import draw_request_sets, draw_rounds, draw_time_limited, draw_watermark
from sifu_paper.plots.metrics import draw_metrics
from sifu_paper.plots.noise import draw_sigma
from sifu_paper.plots.scale import draw_scale
from sifu_paper.plots.ways import draw_ways
from sifu_paper.provenance import FILE
from sifu_paper.reading import results_of
from sifu_paper.sources import TABLE, Source

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAW: dict[str, Callable[[Results], Figure]] = {
    "rounds": draw_rounds,
    "watermark": draw_watermark,
    "time_limited": draw_time_limited,
    "request_sets": draw_request_sets,
    "sigma": draw_sigma,
    "scale": draw_scale,
    "psi_alpha": draw_psi_alpha,
    "groups": draw_groups,
    "ways": draw_ways,
    "metrics": draw_metrics,
}
"""Drawing function of each experiment, by the `draw` key of its file."""


def write_figures(folder: Path) -> list[Path]:
    """Draw the figure of the results in a folder, as PNG and SVG."""
    source = Source(folder / TABLE, folder / FILE)
    figure = draw_source(source)
    written = []
    for kind in ("png", "svg"):
        path = folder / f"{source.experiment.name}.{kind}"
        write_atomically(path, figure_bytes(figure, kind))
        written.append(path)
    return written


def draw_source(source: Source) -> Figure:
    """Draw the figure of an experiment's results."""
    figure = DRAW[source.experiment.draw](results_of(source.experiment, source.rows))
    if source.smoke:
        words = "smoke run: everything is shrunk, the numbers mean nothing"
        figure.text(0.5, 0.5, words, ha="center", va="center", rotation=15, alpha=0.35, color=VERMILLION, fontsize=13)
    return figure
