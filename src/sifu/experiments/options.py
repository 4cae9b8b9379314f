"""What `sifu bench run` was asked for, and how its options are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sifu.errors import InputError
from sifu.experiments.settings import Experiment, Scale
from sifu.experiments.work import variant_text


@dataclass(frozen=True)
class Options:
    """What `sifu bench run` was asked for; empty lists take what the experiment says."""

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
    """Parts of the experiment's grid: `clients=50,1000`."""
    command: tuple[str, ...] = ()


def narrowed(experiment: Experiment, where: Sequence[str]) -> Experiment:
    """The experiment with only some values of its grid, each given as KEY=VALUE,VALUE."""
    grid = dict(experiment.grid or {})
    for text in where:
        key, _, values = text.partition("=")
        wanted = parse_names(values)
        if key not in grid or not wanted:
            raise InputError(
                f"--where {text!r} is not understood: write KEY=VALUE,VALUE with KEY one of {', '.join(grid) or 'none'}"
            )
        by_text = {variant_text({"": value})[1:]: value for value in grid[key]}
        strange = [value for value in wanted if value not in by_text]
        if strange:
            raise InputError(
                f"--where {key}={strange[0]} is not part of {experiment.name}: known are {', '.join(by_text)}"
            )
        grid[key] = tuple(by_text[value] for value in wanted)
    return replace(experiment, grid=grid) if where else experiment


def parse_seeds(text: str) -> tuple[int, ...]:
    """`3` is seeds 1, 2, 3; `4,7` is these.

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
    """Names separated by commas."""
    return tuple(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))


def default_seeds(scale: Scale) -> Sequence[int]:
    """Three seeds at paper scale, one for a smoke run."""
    return (1, 2, 3) if scale == "paper" else (1,)
