"""All settings of training and accounting compared with the paper's 52 %, with the control and with our accounting.

A setting is a preset with the paper's promises. Its control is Noisy Scratch, a fresh model plus the same noise; its
counterpart is SIFU by our rules on the same training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sifu_paper.comparisons import by_dataset, complete, mean_fewer, titles
from sifu_paper.plots.courses import Line
from sifu_paper.plots.speed import SpeedUp
from sifu_paper.reading import honest_presets, population_presets, trained_like
from sifu_paper.table import Row
from sifu_paper.trained_to import below_target

PAPER_SAVES = 0.52
"""Share of Scratch's rounds that SIFU saves in the paper, on average over its data sets."""
HELD_AGAINST = ("sequential", "letter")
"""Experiments with the same three requests."""
ENOUGH = 2
"""Least number of data sets for an average over them; with fewer it may reflect only the easiest one."""


@dataclass(frozen=True)
class LetterSetting:
    """A preset with the paper's promises on the data sets where all its runs of SIFU reached the target.

    Shares refer to Scratch's rounds and are means over data sets. `control` and `honest` are comparisons on those of
    these data sets on which all runs of the other method also reached the target.
    """

    preset: str
    saved: float | None
    reached: tuple[str, ...]
    runs: int
    missed: int
    untrained: tuple[str, ...]
    control: Compared | None
    honest: Compared | None

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key: closest to the paper's 52 % first, averages over too few data sets and missing ones last."""
        distance = float("inf") if self.saved is None else abs(self.saved - PAPER_SAVES)
        return len(self.reached) < ENOUGH, distance


@dataclass(frozen=True)
class Compared:
    """Rounds saved by something other than SIFU, and by SIFU, on the data sets where both always reached the target."""

    name: str
    saved: float
    sifu: float
    datasets: tuple[str, ...]

    @property
    def left(self) -> float:
        """Savings of SIFU in excess of `saved`."""
        return self.sifu - self.saved


def letter_settings(tables: Mapping[str, Sequence[Row]]) -> list[LetterSetting]:
    """Return the settings of the tables, in the order of the presets."""
    settings = []
    for name in HELD_AGAINST:
        rows = tables.get(name) or ()
        for preset in population_presets(rows):
            settings.append(_setting(rows, preset))
    return [setting for setting in settings if setting.runs or setting.untrained]


def _setting(rows: Sequence[Row], preset: str) -> LetterSetting:
    speeds = by_dataset(rows, Line("sifu", preset))
    sure = complete(speeds)
    own = [name for name in honest_presets(rows) if trained_like(name) == trained_like(preset)]
    honest = _compared(f"`{own[0]}`", sure, by_dataset(rows, Line("sifu", own[0]))) if own else None
    control = _compared("Noisy Scratch", sure, by_dataset(rows, Line("noisy_scratch", preset)))
    return LetterSetting(
        preset,
        mean_fewer(sure),
        tuple(sure),
        sum(speed.runs for speed in speeds.values()),
        sum(speed.missed for speed in speeds.values()),
        tuple(below_target(rows, preset)),
        control,
        honest,
    )


def _compared(name: str, ours: Mapping[str, SpeedUp], other: Mapping[str, SpeedUp]) -> Compared | None:
    both = [dataset for dataset in ours if dataset in complete(other)]
    own = mean_fewer({dataset: ours[dataset] for dataset in both})
    saved = mean_fewer({dataset: other[dataset] for dataset in both})
    return None if own is None or saved is None else Compared(name, saved, own, tuple(both))


def _where(compared: Compared, setting: LetterSetting) -> str:
    return "" if compared.datasets == setting.reached else f" on {titles(compared.datasets)}"


def settings_rows(tables: Mapping[str, Sequence[Row]]) -> list[dict[str, Any]]:
    """Return a line for each setting, the closest to the paper's 52 % first."""
    ordered = sorted(letter_settings(tables), key=lambda setting: setting.rank)
    return [
        {
            "setting": f"`{setting.preset}`",
            "averaged over": titles(setting.reached) or None,
            "SIFU saves": _percent(setting.saved),
            "control saves": _compared_words(setting.control, setting),
            "left": None if setting.control is None else f"{100 * setting.control.left:.0f} points",
            "honest saves": _compared_words(setting.honest, setting),
            "missed": f"{setting.missed} of {setting.runs} runs" if setting.runs else None,
            "not trained": ", ".join(setting.untrained) or None,
        }
        for setting in ordered
    ]


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.0f} %"


def _compared_words(compared: Compared | None, setting: LetterSetting) -> str | None:
    return None if compared is None else f"{100 * compared.saved:.0f} %{_where(compared, setting)}"
