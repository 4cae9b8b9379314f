"""Tasks of an experiment: trainings, and the trajectories of requests that start from them."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sifu import InputError, Spec
from sifu.theory.calibration import noise_multiplier
from sifu_paper.settings import Experiment, Requests, Scale, merged, run_spec, scaled_sigma, shared_settings

BOTH_PRESETS = ("sifu", "last")
"""Methods whose result depends on accounting, calibration or scope; others run under the first preset of a training."""
NOISE_AXES = ("sigma_factor", "sigma_scale", "epsilon")
TAKES_SIGMA = ("sifu", "noisy_scratch")
"""Methods that use the sigma of the request; other methods do not depend on the noise axis."""
TRAINING_AXES = ("clients",)
KINDS_OF_TRAINING = {"dp": "dp", "fed_eraser": "updates", "fed_accum": "updates"}
"""Methods with another training than the others; rounds of `updates` equal those of `shared` bit for bit."""
SHARED_TRAINING = "shared"

Variant = Mapping[str, Any]


@dataclass(frozen=True)
class Training:
    """Run that is trained once; every trajectory starts from a copy of it."""

    dataset: str
    seed: int
    preset: str
    kind: str
    variant: str
    spec: Spec = field(compare=False, hash=False)

    @property
    def name(self) -> str:
        """Name of its folder."""
        return slug("train", self.dataset, f"seed{self.seed}", self.preset, self.kind, self.variant)


@dataclass(frozen=True)
class Trajectory:
    """Task of one method on a sequence of requests."""

    training: Training
    method: str
    variant: str
    requests: Requests
    request_set: int
    terms: Mapping[str, Any] = field(compare=False, hash=False)
    limit: float | None = None

    @property
    def name(self) -> str:
        """Name of its folder."""
        training = self.training
        return slug(training.dataset, f"seed{training.seed}", training.preset, self.method, self.variant)

    @property
    def spec(self) -> Spec:
        """Spec of its run."""
        return self.training.spec

    def place(self, experiment: str, request: int) -> dict[str, Any]:
        """Return the columns that identify the row of a request."""
        training = self.training
        return {
            "experiment": experiment,
            "dataset": training.dataset,
            "seed": training.seed,
            "preset": training.preset,
            "method": self.method,
            "variant": self.variant,
            "request": request,
        }


@dataclass(frozen=True)
class Work:
    """All tasks of an experiment, and notes on what is left out."""

    trajectories: tuple[Trajectory, ...]
    notes: tuple[str, ...]

    @property
    def trainings(self) -> tuple[Training, ...]:
        """Runs that the trajectories start from, each once, in order."""
        return tuple(dict.fromkeys(trajectory.training for trajectory in self.trajectories))


def plan_work(
    experiment: Experiment,
    *,
    datasets: Sequence[str],
    seeds: Sequence[int],
    methods: Sequence[str],
    presets: Sequence[str],
    scale: Scale,
    over: Mapping[str, Any] | None = None,
) -> Work:
    """Return the trajectories of an experiment for each data set, and notes on adjusted settings."""
    notes: dict[str, None] = {}
    trajectories = []
    for dataset, seed, method in itertools.product(datasets, seeds, methods):
        for preset in presets if method in BOTH_PRESETS else _one_for_each_training(presets):
            for variant in _variants(experiment, method):
                trajectory, adjustments = _trajectory(
                    experiment, dataset, seed, method, preset, variant, scale, over or {}
                )
                notes |= dict.fromkeys(adjustments)
                trajectories.append(trajectory)
    return Work(tuple(trajectories), tuple(notes))


def _one_for_each_training(presets: Sequence[str]) -> list[str]:
    """Return the first preset of each training, because promises make no difference to most methods.

    >>> _one_for_each_training(["paper", "ours", "authors", "authors_ours"])
    ['paper', 'authors']

    """
    first: dict[Any, str] = {}
    for preset in presets:
        first.setdefault(shared_settings().preset(preset).get("training"), preset)
    return list(first.values())


def _variants(experiment: Experiment, method: str) -> list[dict[str, Any]]:
    """Return every combination of the grid that makes a difference to the method."""
    grid = experiment.grid or {}
    limits = (experiment.method_grid or {}).get(method, {})
    axes = {
        key: [value for value in values if value in limits.get(key, values)]
        for key, values in grid.items()
        if key not in NOISE_AXES or method in TAKES_SIGMA
    }
    variants = combinations(axes)
    if method in experiment.unlimited:
        variants += [{key: value for key, value in variant.items() if key != "limit"} for variant in variants]
    return list({variant_text(variant): variant for variant in variants}.values())


def combinations(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return all combinations, with the last axis varying fastest.

    >>> combinations({"a": [1, 2], "b": ["x"]})
    [{'a': 1, 'b': 'x'}, {'a': 2, 'b': 'x'}]

    """
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _trajectory(
    experiment: Experiment,
    dataset: str,
    seed: int,
    method: str,
    preset: str,
    variant: Variant,
    scale: Scale,
    over: Mapping[str, Any],
) -> tuple[Trajectory, tuple[str, ...]]:
    row = shared_settings().dataset(dataset)
    own = (experiment.method_spec or {}).get(method, {})
    kind = method if own else KINDS_OF_TRAINING.get(method, SHARED_TRAINING)
    training_variant = {key: value for key, value in variant.items() if key in TRAINING_AXES}
    extra: dict[str, Any] = {}
    if "clients" in variant:
        extra["data"] = {"clients": variant["clients"]}
    plain, notes = run_spec(experiment, dataset, preset, seed, scale, merged(own, over, extra))
    privacy = plain.privacy
    if kind == "updates":
        extra["keep"] = {"updates_every": row.updates_every}
    if kind == "dp":
        multiplier = noise_multiplier(privacy.epsilon, privacy.delta, privacy.calibration)
        extra["server"] = {"clip": row.clip, "noise": multiplier}
    if kind != SHARED_TRAINING:
        plain, notes = run_spec(experiment, dataset, preset, seed, scale, merged(own, over, extra))
    terms: dict[str, Any] = {"method": method}
    if "epsilon" in variant:
        terms["epsilon"] = variant["epsilon"]
    if method == "noisy_scratch":
        terms["sigma"] = row.sigma
    if method == "last":
        terms["sigma"] = "auto"  # the noise that its Psi needs, as in the paper's comparison
    if "sigma_factor" in variant:
        terms["sigma"] = row.sigma * variant["sigma_factor"]
    if "sigma_scale" in variant:
        epsilon = variant.get("epsilon", privacy.epsilon)
        terms["sigma"] = scaled_sigma(variant["sigma_scale"], epsilon, privacy.delta, plain.data.clients)
    requests = experiment.requests
    if "requests" in variant:
        requests = parse_requests(variant["requests"], requests)
    trajectory = Trajectory(
        Training(dataset, seed, preset, kind, variant_text(training_variant), plain),
        method,
        variant_text(variant),
        requests,
        int(variant.get("set", 0)),
        terms,
        variant.get("limit"),
    )
    return trajectory, notes


def parse_requests(text: str, base: Requests) -> Requests:
    """Parse requests: `10` means one request of ten clients, `1x10` ten requests of one client each.

    >>> parse_requests("1x10", Requests())
    Requests(count=10, clients=1, choose='random')

    """
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
    if not match:
        raise InputError(f"requests {text!r} are not understood: write CLIENTS, or CLIENTSxREQUESTS, for example 1x10")
    return replace(base, clients=int(match[1]), count=int(match[2] or 1))


def variant_text(variant: Variant) -> str:
    """Return a variant as text for the table.

    >>> variant_text({"clients": 1000, "sigma_scale": 0.7})
    'clients=1000 sigma_scale=0.7'

    """
    return " ".join(
        f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in variant.items()
    )


def parse_variant(text: str) -> dict[str, str]:
    """Return the settings in a text from `variant_text`, as strings.

    >>> parse_variant("clients=1000 sigma_scale=auto")
    {'clients': '1000', 'sigma_scale': 'auto'}

    """
    return dict(part.split("=", 1) for part in text.split()) if text else {}


def slug(*parts: str) -> str:
    """Join parts into one file name; a digest distinguishes names that shortening would make equal."""
    text = "--".join(part for part in parts if part)
    plain = re.sub(r"[^A-Za-z0-9.=_-]+", "_", text)
    return (
        plain
        if plain == text and len(plain) < 120
        else f"{plain[:100]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    )
