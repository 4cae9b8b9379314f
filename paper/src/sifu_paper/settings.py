"""Settings of a training, and the rules by which influence is counted: the paper's, the authors' code's and ours."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources
from typing import Any, Literal

from sifu.errors import InputError
from sifu.theory.calibration import exact_multiplier

Scale = Literal["paper", "smoke"]
LARGEST_SMOKE_ROUND = 4


@dataclass(frozen=True)
class Settings:
    """Settings of one federation and its training; settings.toml has their values.

    Attributes:
        alpha: Concentration of the `dirichlet` partition.
        watermark: Number of pixels of every client's mark, or 0.
        constants: Constants that images are scaled by: published ones, or those of the authors' code.
        steps: Local steps K of a round.
        clip: Bound on the norm of every local gradient, or 0.
        participants: Number of clients that a round draws.
        target: Accuracy on the remaining clients' data at which training ends.
        evaluate_every: Rounds between evaluations; 0 is the schedule of the authors' code.
        sigma: Noise of the paper.
        dp_clip: Bound on every update in trainings with differential privacy.
        kept_every: Interval at which FedEraser and FedAccum keep the clients' updates.
    """

    dataset: str
    title: str
    clients: int
    samples: int
    partition: str
    network: str
    steps: int
    batch: int
    rate: float
    momentum: float
    participants: int
    target: float
    min_rounds: int
    max_rounds: int
    evaluate_every: int
    sigma: float
    epsilon: float
    delta: float
    dp_clip: float
    kept_every: int
    alpha: float = 1.0
    watermark: int = 0
    constants: Literal["published", "authors"] = "published"
    clip: float = 0.0

    def limited(self, rounds: int | None) -> Settings:
        """Return the settings with at most this many rounds."""
        most = self.max_rounds if rounds is None else rounds
        return replace(self, max_rounds=most, min_rounds=min(self.min_rounds, most))


@dataclass(frozen=True)
class Rules:
    """Rules of accounting.

    Attributes:
        accounting: Weights of an increment: `round` counts the samples of the round's participants, `population` those
            of the whole federation, as in the authors' code. Only the first bounds anything.
        calibration: `exact` is the Gaussian mechanism's own equation, `classical` the paper's theorem 2, which is
            proven for epsilon below 1 only.
        scope: `all` counts every release, `latest` only the last one, as in the paper.
        sigma: `table` is the paper's sigma, `auto` is chosen at each request.
    """

    accounting: Literal["round", "population"]
    calibration: Literal["exact", "classical"]
    scope: Literal["all", "latest"]
    sigma: Literal["table", "auto"]

    def multiplier(self, epsilon: float, delta: float) -> float:
        """Return s, the noise that hides a sensitivity of 1.

        >>> round(PAPERS.multiplier(10.0, 0.01), 5), round(OURS.multiplier(10.0, 0.01), 5)
        (0.31075, 0.3501)
        """
        if self.calibration == "exact":
            return exact_multiplier(epsilon, delta)
        return math.sqrt(2.0 * math.log(1.25 / delta)) / epsilon


PAPERS = Rules("population", "classical", "latest", "table")
OURS = Rules("round", "exact", "all", "auto")


@dataclass(frozen=True)
class Preset:
    """A training and the rules that it is counted by."""

    name: str
    training: str
    rules: Rules


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("paper", "table", PAPERS),
        Preset("ours", "table", OURS),
        Preset("authors", "authors", PAPERS),
        Preset("authors_unclipped", "authors_unclipped", PAPERS),
        Preset("authors_ours", "authors", OURS),
        Preset("authors_unclipped_ours", "authors_unclipped", OURS),
    )
}


def preset_named(name: str) -> Preset:
    """Return a preset; an unknown name is refused."""
    if name not in PRESETS:
        raise InputError(f"preset {name!r} is unknown: write some of {', '.join(PRESETS)}")
    return PRESETS[name]


@cache
def _content() -> dict[str, Any]:
    text = (resources.files("sifu_paper") / "settings.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def dataset_names() -> list[str]:
    """Return the names of all data sets, in the paper's order."""
    return list(_content()["datasets"])


def dataset_title(name: str) -> str:
    """Return the name of a data set for people."""
    row = _content()["datasets"].get(name)
    return name if row is None else str(row["title"])


def settings_of(dataset: str, training: str, scale: Scale = "paper", over: Mapping[str, Any] | None = None) -> Settings:
    """Return the settings of a data set; `over` is what an experiment changes.

    >>> settings_of("cifar10", "table").network, settings_of("cifar10", "authors").network
    ('cnn_cifar10', 'authors_cifar10')
    """
    content = _content()
    if dataset not in content["datasets"]:
        raise InputError(f"data set {dataset!r} is unknown: write some of {', '.join(content['datasets'])}")
    values = content["shared"] | content["datasets"][dataset] | content["trainings"][training] | dict(over or {})
    if values.get("constants") == "authors":
        values["network"] = content["authors_networks"].get(values["network"], values["network"])
    if scale == "smoke":
        few = min(values["participants"], LARGEST_SMOKE_ROUND)
        values |= content["smoke"] | {"participants": few}
    known = {field.name for field in fields(Settings)}
    return Settings(dataset=dataset, **{key: value for key, value in values.items() if key in known})
