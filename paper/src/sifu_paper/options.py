"""Options of `sifu-bench run` and their parsers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sifu import InputError
from sifu_paper.settings import Experiment, Scale
from sifu_paper.work import variant_text

TRIAL_KEYS: dict[str, Any] = {"partition": "", "participation": "all", "clients": 100, "model": "own"}
"""Keys that select trials of the experiment `groups`, with their default values."""


@dataclass(frozen=True)
class Options:
    """Options of `sifu-bench run`; an empty list stands for the experiment's own values."""

    name: str
    out: Path
    seeds: tuple[int, ...]
    scale: Scale = "paper"
    datasets: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    presets: tuple[str, ...] = ()
    max_rounds: int | None = None
    data: Path | None = None
    device: str = "auto"
    lanes: int | None = None
    precision: str = "float32"
    engine: str = "embedded"
    keep_runs: bool = False
    where: tuple[str, ...] = ()
    """Selected parts of the experiment's grid or trials: `clients=50,1000`."""
    command: tuple[str, ...] = ()


def narrowed(experiment: Experiment, where: Sequence[str]) -> Experiment:
    """Return the experiment with only these values of its grid or trials (`KEY=VALUE,VALUE`)."""
    for text in where:
        key, _, values = text.partition("=")
        wanted = parse_names(values)
        offered = _values(experiment, key)
        if not offered or not wanted:
            keys = [*(experiment.grid or {}), *(TRIAL_KEYS if experiment.trials else ())]
            raise InputError(
                f"--where {text!r} is not understood: write KEY=VALUE,VALUE with KEY one of {', '.join(keys) or 'none'}"
            )
        strange = [value for value in wanted if value not in offered]
        if strange:
            raise InputError(
                f"--where {key}={strange[0]} is not part of {experiment.name}: known are {', '.join(offered)}"
            )
        if experiment.trials:
            chosen = tuple(trial for trial in experiment.trials if _text(trial.get(key, TRIAL_KEYS[key])) in wanted)
            experiment = replace(experiment, trials=chosen)
        else:
            grid = dict(experiment.grid or {}) | {key: tuple(offered[value] for value in wanted)}
            experiment = replace(experiment, grid=grid)
    return experiment


def _values(experiment: Experiment, key: str) -> dict[str, Any]:
    """Return the values of a key of the grid or the trials, by their text; none for an unknown key."""
    if experiment.trials:
        values = [trial.get(key, TRIAL_KEYS[key]) for trial in experiment.trials] if key in TRIAL_KEYS else []
    else:
        values = list((experiment.grid or {}).get(key, ()))
    return {_text(value): value for value in values}


def _text(value: Any) -> str:
    return variant_text({"": value})[1:]


def parse_seeds(text: str) -> tuple[int, ...]:
    """Parse seeds: `3` means seeds 1, 2, 3; `4,7` means seeds 4 and 7.

    >>> parse_seeds("3"), parse_seeds("4,7"), parse_seeds("5,")
    ((1, 2, 3), (4, 7), (5,))

    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise InputError(f"--seeds {text!r} is not understood: write how many (3), or which ones (4,7)")
    if "," not in text:
        count = int(parts[0])
        if not 1 <= count <= 1000:
            raise InputError(
                f"--seeds {count}: 1 to 1000 seeds can be run; write a list to name them, for example 2024,"
            )
        return tuple(range(1, count + 1))
    return tuple(dict.fromkeys(map(int, parts)))


def parse_names(text: str | None) -> tuple[str, ...]:
    """Parse names separated by commas."""
    return tuple(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))


def default_seeds(scale: Scale) -> Sequence[int]:
    """Return three seeds at paper scale, one for a smoke run."""
    return (1, 2, 3) if scale == "paper" else (1,)
