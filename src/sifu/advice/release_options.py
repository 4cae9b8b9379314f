"""Cost of noise on releases for the user's own data: held-out accuracy against protection (docs/release-noise.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sifu.advice.training_options import without_held_out
from sifu.core.closed_form_engine import HasRecords
from sifu.core.engine import Engine, Position, Rejection
from sifu.core.layout import Vector
from sifu.core.round import keyed_generator
from sifu.core.spec import Spec
from sifu.core.spec.sections import ReleaseSpec
from sifu.errors import InputError
from sifu.run.clients_and_engine import HeldOutRows, clients_from_spec, engine_from_spec
from sifu.run.given import as_clients
from sifu.run.recorded_data import available_rows, held_out_figures
from sifu.theory.closed_form import Statistics, total
from sifu.theory.release_noise import Release, noise_for

BUDGETS = ((1.0, 1e-5), (3.0, 1e-5), (10.0, 0.01))
"""Budgets to compare: strong, usual and weak."""
DRAWS = 5
"""Number of noise draws that an accuracy is averaged over."""
WORTH = 0.05
"""Largest loss of held-out accuracy at a weak budget for records before the records count as too few."""


@dataclass(frozen=True)
class ReleaseOption:
    """One budget for records or for clients: the noise it needs, and the held-out accuracy with it.

    `distance` is the largest of any record or client; `noise` hides it in `releases` releases.
    """

    unit: Literal["record", "client"]
    epsilon: float
    delta: float
    distance: float
    releases: int
    noise: float
    accuracy: float


@dataclass(frozen=True)
class ReleaseAdvice:
    """Cost of protection against observers of all releases, by unit and budget."""

    accuracy: float
    rows: int
    records: int
    options: tuple[ReleaseOption, ...]

    @property
    def verdict(self) -> str:
        """Sentence on whether there are enough records."""
        weakest = next(option for option in reversed(self.options) if option.unit == "record")
        lost = self.accuracy - weakest.accuracy
        if lost <= WORTH:
            return (
                f"Noise on releases can hide a record: at epsilon {weakest.epsilon:g} it costs {100 * lost:.1f} points "
                f"of held-out accuracy."
            )
        return (
            f"{self.records} records are too few to hide one by noise on releases: even at epsilon "
            f"{weakest.epsilon:g} it costs {100 * lost:.1f} points of held-out accuracy. More records or a larger "
            "ridge.regularisation help."
        )


def advise_releases(spec: Spec, data_folder: str | Path | None, clients: Any) -> ReleaseAdvice:
    """Solve the head without held-out rows, and try the noise of a few budgets on it.

    The distances are those of the user's own data. Noise chosen by them depends on the data, so this is only a study:
    choose the noise of a federation from similar federations.

    Args:
        spec: Spec of the training.
        data_folder: As for `train`.
        clients: As for `train`.

    Raises:
        InputError: If there are no rows to hold out, or no accuracy to measure.
    """
    data = as_clients(clients if clients is not None else clients_from_spec(spec, data_folder), spec)
    held = available_rows(spec, data_folder, clients)
    if held is None:
        data, held = without_held_out(data)
    relative = spec.ridge.regularisation
    if held is None or relative == "auto":
        raise InputError("advice on noise needs held-out rows and a number for ridge.regularisation")
    engine: Any = engine_from_spec(replace(spec, release=ReleaseSpec()), data)[0]
    parts = list(_statistics(engine))
    release = Release(total(engine.fixed, parts), relative)
    distances = {"record": _of_records(engine, release), "client": max(map(release.distance_without, parts))}
    head = release.head.weights.ravel()
    exact = _accuracy(spec, engine, head, held)
    options = []
    for place, (unit, distance) in enumerate(distances.items()):
        for number, (epsilon, delta) in enumerate(BUDGETS):
            noise = noise_for(epsilon, delta, distance, spec.release.releases)
            draws = [keyed_generator(spec.seed, "release advice", place, number, draw) for draw in range(DRAWS)]
            noisy = [head + noise * draw.standard_normal(head.size) for draw in draws]
            accuracy = float(np.mean([_accuracy(spec, engine, model, held) for model in noisy]))
            option = ReleaseOption(unit, epsilon, delta, distance, spec.release.releases, noise, accuracy)  # type: ignore[arg-type]
            options.append(option)
    return ReleaseAdvice(exact, len(held.y), release.statistics.samples, tuple(options))


def _statistics(engine: Any) -> Sequence[Statistics]:
    """Return the statistics of every client whose samples can be used."""
    everyone = range(len(engine.clients))
    sent = (part for _, part in engine.collect(everyone, Position(0, 0)) if not isinstance(part, Rejection))
    return [total(engine.fixed, [part]) for part in sent]


def _of_records(engine: HasRecords, release: Release) -> float:
    """Return the largest distance of any record."""
    clients: Sequence[Any] = engine.clients  # type: ignore[attr-defined]
    blocks = (block for client in range(len(clients)) for block in engine.records_of(client))
    return float(max(np.max(release.distances_of_records(phi, targets)) for phi, targets in blocks))


def _accuracy(spec: Spec, engine: Engine, model: Vector, rows: HeldOutRows) -> float:
    figures = held_out_figures(spec, engine, model, rows)
    if figures is None or figures.accuracy is None:
        raise InputError("the head has no accuracy to measure on held-out rows: advice on noise needs classes")
    return figures.accuracy
