"""An experiment: its methods, requests and grid of settings, and how it is run and drawn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sifu_paper.settings import Scale
from sifu_paper.table import Row, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

THE_PAPERS = ("mnist", "fashion_mnist", "cifar10", "cifar100", "celeba")
LETTER = ("authors", "authors_unclipped")
"""Presets with the training of the authors' code, and the paper's rules."""
BASELINES = ("scratch", "fine_tuning", "last", "dp", "fed_eraser", "fed_accum", "noisy_scratch")
SMOKE_CLIENTS = 2


@dataclass(frozen=True)
class Options:
    """Choices of the user; empty tuples take everything that the experiment has.

    Attributes:
        out: Folder of the results.
        data: Folder of the data sets' files, or None for the default folders.
        max_rounds: Limit of rounds of trainings and requests, or None for that of the settings.
        where: Values of the grid to keep, by key.
    """

    name: str
    out: Path
    seeds: tuple[int, ...]
    scale: Scale = "paper"
    datasets: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    presets: tuple[str, ...] = ()
    max_rounds: int | None = None
    where: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    data: Path | None = None
    device: str = "cpu"


Run = Callable[["Experiment", Options, str, int, Table, Callable[[str], None]], None]
"""Function (experiment, options, data set, seed, table, say) that does what is missing of one data set and seed."""
Draw = Callable[["Experiment", Sequence[Row]], "Figure"]


@dataclass(frozen=True)
class Experiment:
    """One figure.

    Attributes:
        title: Title for people.
        question: What it asks.
        paper_figure: The figure of the paper that it repeats, or an empty string.
        run: Function that measures one data set and seed.
        draw: Function that draws the figure.
        settings: Settings of the table that it changes.
        requests: Number of requests in a row.
        clients: Number of clients of a request.
        by_class: True if requests are of one class where clients have one class.
        grid: Settings that vary.
        fine_models: True if requests choose sigma, so that models are kept for any of them.
        only_reached: True if no request is made on a training that ended below its target.
        unlimited: Methods that are also run without the grid's `limit`, to compare with.
    """

    title: str
    question: str
    run: Run
    draw: Draw
    paper_figure: str = ""
    datasets: tuple[str, ...] = THE_PAPERS
    methods: tuple[str, ...] = ("sifu", *BASELINES)
    presets: tuple[str, ...] = ("paper", "ours")
    settings: Mapping[str, Any] = field(default_factory=dict)
    requests: int = 1
    clients: int = 10
    by_class: bool = True
    grid: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    fine_models: bool = False
    only_reached: bool = False
    unlimited: tuple[str, ...] = ()

    def variants(self, options: Options, method: str = "") -> list[dict[str, float]]:
        """Return the combinations of the grid that make a difference to a method; the last axis varies fastest."""
        axes: dict[str, Sequence[float]] = {}
        for key, values in self.grid.items():
            if key == "sigma_factor" and method not in ("sifu", "noisy_scratch"):
                continue
            wanted = options.where.get(key, values[:2] if options.scale == "smoke" else values)
            axes[key] = [value for value in values if value in wanted]
        result = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
        return [*result, {}] if method in self.unlimited else result


def variant_text(variant: Mapping[str, float]) -> str:
    """Return a variant as text for the table.

    >>> variant_text({"limit": 0.25, "set": 3})
    'limit=0.25 set=3'
    """
    return " ".join(f"{key}={value:g}" for key, value in variant.items())


def parse_variant(text: str) -> dict[str, float]:
    """Return the values in a text from `variant_text`."""
    return {key: float(value) for key, value in (part.split("=") for part in text.split())}
