"""Experiments as data: the TOML files in `specs`, and the run specs derived from them.

`paper.toml` holds what all experiments share (the paper's settings table, the presets, the settings that `--scale
smoke` shrinks); each other file is one experiment. A run spec merges these layers, later ones on top: shared, data set,
the preset's training, experiment, smoke, the preset's promises.
"""

from __future__ import annotations

import difflib
import re
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any, Literal

from sifu import InputError, Spec
from sifu.core.spec import ModelSpec
from sifu.theory.calibration import noise_multiplier

Scale = Literal["smoke", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "paper")
SHARED = "paper"


@dataclass(frozen=True)
class Requests:
    """Requests to make: `count` requests of `clients` clients each, by class if clients have one, or at random."""

    count: int = 1
    clients: int = 10
    choose: Literal["class", "random"] = "random"


@dataclass(frozen=True)
class DistanceRuns:
    """Plan of a `distance` experiment: number of rounds, number of removed clients, rounds between measurements."""

    rounds: int = 60
    clients: int = 3
    every: int = 5


@dataclass(frozen=True)
class Experiment:
    """One figure: its data sets, methods and requests, and the grid of varied settings.

    `spec` overrides the shared settings; every combination of `grid` is a variant. `unlimited` methods are also
    executed without a time limit.
    """

    name: str
    title: str
    question: str
    draw: str
    datasets: tuple[str, ...]
    methods: tuple[str, ...]
    paper_figure: str = ""
    kind: Literal["requests", "distance", "groups", "metrics"] = "requests"
    presets: tuple[str, ...] = ("paper", "ours")
    unlimited: tuple[str, ...] = ()
    set_apart: tuple[str, ...] = ()
    """Methods in a separate table, which may have fewer seeds without reducing those of the others."""
    only_reached: bool = False
    """True if requests are skipped on trainings that ended at their limit of rounds below the target."""
    requests: Requests = Requests()
    distance: DistanceRuns = DistanceRuns()
    spec: Mapping[str, Any] | None = None
    grid: Mapping[str, tuple[Any, ...]] | None = None
    method_spec: Mapping[str, Mapping[str, Any]] | None = None
    """Overrides of the spec for a method that trains another kind of model than the others."""
    method_grid: Mapping[str, Mapping[str, Sequence[Any]]] | None = None
    """Values of the grid to which a method is limited, if all of them would take too long."""
    trials: tuple[Mapping[str, Any], ...] = ()
    """Tasks of a `groups` experiment (`sifu_paper.group_trials`)."""


@dataclass(frozen=True)
class DatasetSettings:
    """Row of the paper's settings table."""

    name: str
    title: str
    sigma: float
    clip: float
    updates_every: int
    spec: Mapping[str, Any]


@dataclass(frozen=True)
class TrainingSettings:
    """Training other than in the paper's table: overrides for all data sets and for some."""

    spec: Mapping[str, Any]
    datasets: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Settings:
    """Settings shared by all experiments. A preset has promises (`privacy`) and the name of its `training`."""

    spec: Mapping[str, Any]
    datasets: Mapping[str, DatasetSettings]
    trainings: Mapping[str, TrainingSettings]
    presets: Mapping[str, Mapping[str, Any]]
    smoke: Mapping[str, Any]

    def dataset(self, name: str) -> DatasetSettings:
        """Return the row of a data set; an unknown name is refused with a list of the known ones."""
        return self.datasets[_known("data set", name, self.datasets)]

    def preset(self, name: str) -> Mapping[str, Any]:
        """Return a preset; an unknown name is refused with a list of the known ones."""
        return self.presets[_known("preset", name, self.presets)]

    def training_of(self, preset: str, dataset: str) -> Mapping[str, Any]:
        """Return a preset's overrides of the paper's table for a data set; empty if it trains as in the table."""
        name = self.preset(preset).get("training")
        if name is None:
            return {}
        training = self.trainings[name]
        return merged(training.spec, training.datasets.get(dataset, {}))


@cache
def shared_settings() -> Settings:
    """Return the content of `paper.toml`."""
    content = _read(SHARED)
    rows = {name: DatasetSettings(name=name, **row) for name, row in content["datasets"].items()}
    trainings = {name: TrainingSettings(**training) for name, training in content["trainings"].items()}
    return Settings(content["spec"], rows, trainings, content["presets"], content["smoke"])


def experiment_names() -> list[str]:
    """Return the names of all experiments."""
    folder = resources.files("sifu_paper") / "specs"
    names = sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))
    return [name for name in names if name != SHARED]


def load_experiment(name: str, scale: Scale = "paper") -> Experiment:
    """Return the experiment of this name, shrunk if `scale` is smoke."""
    if scale not in SCALES:
        raise InputError(f"the scale is {' or '.join(SCALES)}, found {scale!r}")
    content = _read(_known("experiment", name, experiment_names()))
    if "like" in content:  # overrides another experiment
        content = merged(_read(content.pop("like")), content)
    smoke = content.pop("smoke", {})
    requests = Requests(**content.pop("requests", {}))
    distance = DistanceRuns(**content.pop("distance", {}))
    spec, grid = content.pop("spec", {}), content.pop("grid", {})
    if scale == "smoke":
        general = shared_settings().smoke
        spec = merged(spec, general["spec"], smoke.get("spec", {}))
        grid = smoke.get("grid", {key: values[:2] for key, values in grid.items()})
        few = smoke.get("request_clients", general["request_clients"])
        requests = Requests(requests.count, min(requests.clients, few), requests.choose)
        distance = DistanceRuns(10, 1, 5)
        content["only_reached"] = False  # a few rounds reach no target
        if "dataset" in smoke:
            content["datasets"] = [smoke["dataset"]]
        if "trials" in smoke:
            content["trials"] = smoke["trials"]
    lists = {key: tuple(value) for key, value in content.items() if isinstance(value, list)}
    unknown = sorted(set(content) - {field.name for field in fields(Experiment)})
    if unknown:
        raise InputError(f"experiment {name!r} has the unknown key {unknown[0]!r}; see paper/README.md")
    return Experiment(
        name=name,
        requests=requests,
        distance=distance,
        spec=spec,
        grid={key: tuple(values) for key, values in grid.items()},
        **(content | lists),
    )


def run_spec(
    experiment: Experiment,
    dataset: str,
    preset: str,
    seed: int,
    scale: Scale,
    over: Mapping[str, Any] | None = None,
) -> tuple[Spec, tuple[str, ...]]:
    """Return the spec of a run, and notes on replaced settings."""
    settings = shared_settings()
    row = settings.dataset(dataset)
    own = experiment.spec or {}
    noise: dict[str, Any] = {"sigma": row.sigma} | dict(settings.preset(preset)["privacy"])
    if "sigma" in own.get("privacy", {}):
        noise["sigma"] = own["privacy"]["sigma"]
    training = settings.training_of(preset, dataset)
    mapping = merged(settings.spec, row.spec, training, own, {"privacy": noise}, over or {}, {"seed": seed})
    notes = []
    mapping["stop"]["min_rounds"] = min(mapping["stop"]["min_rounds"], mapping["stop"]["max_rounds"])
    if scale == "smoke":
        mapping["server"]["participation"] = _at_most(
            mapping["server"]["participation"], settings.smoke["largest_participation"]
        )
    if "groups" in mapping:
        mapping["server"]["participation"] = drawn_apart(mapping["server"]["participation"], mapping["data"]["clients"])
    kind = mapping["model"]["kind"]
    if kind not in typing.get_args(typing.get_type_hints(ModelSpec)["kind"]):
        mapping["model"]["kind"] = "cnn"
        notes.append(f"model {kind} is not part of this version: cnn stands in for it")
    return Spec.from_mapping(mapping), tuple(notes)


def scaled_sigma(scale: float | str, epsilon: float, delta: float, clients: int) -> float | str:
    """Return the sigma that hides Psi = 20 scale / clients.

    Psi of one of M clients falls like 1/M (docs/theory.md, section 13).

    >>> round(scaled_sigma(1.0, 10.0, 0.01, 1000), 4), scaled_sigma("auto", 1.0, 0.01, 50)
    (0.007, 'auto')
    """
    if isinstance(scale, str):
        return scale
    return 20.0 * scale * noise_multiplier(epsilon, delta, "exact") / clients


def merged(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """Merge tables, later ones on top; nested tables are merged, other values are replaced.

    >>> merged({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}, "b": 4})
    {'a': {'x': 1, 'y': 3}, 'b': 4}

    """
    result: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            below = result.get(key)
            if isinstance(value, Mapping):
                result[key] = merged(below if isinstance(below, Mapping) else {}, value)
            else:
                result[key] = value
    return result


def drawn_apart(participation: str, clients: int) -> str:
    """Return the same share of the clients with independent draws, because groups cannot share a fixed number.

    >>> drawn_apart("fixed(10)", 100), drawn_apart("all", 100)
    ('poisson(0.1)', 'all')

    """
    match = re.fullmatch(r"fixed\((\d+)\)", participation)
    return f"poisson({int(match[1]) / clients:g})" if match else participation


def _at_most(participation: str, count: int) -> str:
    match = re.fullmatch(r"fixed\((\d+)\)", participation)
    return f"fixed({min(int(match[1]), count)})" if match else participation


def _read(name: str) -> dict[str, Any]:
    path = resources.files("sifu_paper") / "specs" / f"{name}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _known(what: str, name: str, names: Sequence[str] | Mapping[str, Any]) -> str:
    if name in names:
        return name
    near = difflib.get_close_matches(name, list(names), n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise InputError(f"{what} {name!r} is not known: {hint}Known are {', '.join(names)}")
