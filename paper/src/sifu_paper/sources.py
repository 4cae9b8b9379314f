"""Sources of results: folders of `sifu-bench run`, or the tables that a page keeps next to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sifu_paper.provenance import FILE, read_record, read_record_file
from sifu_paper.settings import Experiment, experiment_names, load_experiment
from sifu_paper.table import Row, read_table

TABLE = "results.csv"
LETTERS = ("letter", "letter-watermark", "letter-time", "letter-sigma", "letter-sets")
"""Experiments that train like the authors' code."""
PAPERS = ("sequential", *LETTERS, "watermark", "time-limited", "sigma", "request-sets", "psi-alpha")
ORDER = (*PAPERS, "scale", "groups", "exact", "metrics")
"""Order of experiments on a page: the paper's, then ours, then unlisted ones."""


@dataclass(frozen=True)
class Source:
    """Table of one experiment, and the file with its provenance."""

    table: Path
    origin: Path

    @cached_property
    def record(self) -> dict[str, Any]:
        """Record of the settings, machine and time."""
        return read_record_file(self.origin)

    @cached_property
    def experiment(self) -> Experiment:
        """Experiment as it was run."""
        return load_experiment(self.record["asked"]["experiment"], self.record["asked"]["scale"])

    @cached_property
    def rows(self) -> list[Row]:
        """Rows of the table."""
        return read_table(self.table)

    @property
    def smoke(self) -> bool:
        """True if the experiment was shrunk."""
        return bool(self.record["asked"]["scale"] == "smoke")


def sources_in(folders: Sequence[Path]) -> list[Source]:
    """Return the results in these folders in the page's order; a later folder replaces an
    experiment of an earlier one.
    """
    by_name: dict[str, Source] = {}
    for folder in folders:
        for source in _of_folder(folder):
            by_name[source.experiment.name] = source
    order = {name: place for place, name in enumerate(ORDER)}
    return sorted(by_name.values(), key=lambda source: order.get(source.experiment.name, len(order)))


def _of_folder(folder: Path) -> list[Source]:
    if not (folder / FILE).exists():
        pairs = [(folder / f"{name}.csv", folder / f"{name}.json") for name in experiment_names()]
        kept = [Source(table, origin) for table, origin in pairs if table.exists() and origin.exists()]
        if kept:
            return kept
    read_record(folder)  # raises if something is missing
    return [Source(folder / TABLE, folder / FILE)]
