"""Cost of noise on releases for the user's own data: held-out accuracy against protection (docs/release-noise.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sifu.advice.training_options import clients_and_rows
from sifu.core.engine import Position, Rejection
from sifu.core.round import keyed_generator
from sifu.core.spec import Spec
from sifu.core.spec.sections import ReleaseSpec
from sifu.errors import InputError
from sifu.run.clients_and_engine import HeldOutRows, engine_from_spec
from sifu.theory.arrays import Floats
from sifu.theory.closed_form import total
from sifu.theory.release_noise import Release, noise_for

BUDGETS = ((1.0, 1e-5), (3.0, 1e-5), (10.0, 0.01))
"""Budgets to compare: strong, usual and weak."""
PENALTY_FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Relative penalties to try, as multiples of the spec's penalty. Protection needs a larger penalty than accuracy."""
DRAWS = 5
"""Number of noise draws that an accuracy is averaged over."""
LARGEST_AFFORDABLE_LOSS = 0.05
"""Largest loss of held-out accuracy that counts as affordable."""

Unit = Literal["record", "client"]


@dataclass(frozen=True)
class ReleaseOption:
    """One budget for records or for clients: the relative penalty r and the noise with the best held-out accuracy.

    Attributes:
        unit: Unit that the noise hides: a record or a client.
        epsilon: Epsilon of the budget.
        delta: Delta of the budget.
        relative_penalty: The tried value of r with the highest accuracy.
        distance: Largest distance of any record or client at this r.
        releases: Number of releases that the noise is for.
        noise: Standard deviation of the noise added to the head.
        accuracy: Held-out accuracy with the noise, averaged over draws.
        without_noise: Held-out accuracy of the same head without noise.
    """

    unit: Unit
    epsilon: float
    delta: float
    relative_penalty: float
    distance: float
    releases: int
    noise: float
    accuracy: float
    without_noise: float


@dataclass(frozen=True)
class ReleaseAdvice:
    """Accuracy lost by noise that hides a record or a client from observers of all releases, for several budgets.

    Attributes:
        accuracy: Held-out accuracy without noise, at `relative_penalty`.
        relative_penalty: The value of r with the highest accuracy without noise.
        rows: Number of held-out rows.
        records: Number of records in the head.
        clients: Number of clients in the head.
        options: One for each unit and budget, the strongest budget first.
    """

    accuracy: float
    relative_penalty: float
    rows: int
    records: int
    clients: int
    options: tuple[ReleaseOption, ...]

    def cost_of(self, option: ReleaseOption) -> float:
        """Return the loss of accuracy against the best head without noise."""
        return self.accuracy - option.accuracy

    @property
    def verdict(self) -> str:
        """Text that states the accuracy lost by hiding a record and by hiding a client."""
        return f"{self._verdict_on('record', self.records)} {self._verdict_on('client', self.clients)}"

    def _verdict_on(self, unit: Unit, count: int) -> str:
        options = [option for option in self.options if option.unit == unit]
        affordable = next((option for option in options if self.cost_of(option) <= LARGEST_AFFORDABLE_LOSS), None)
        if affordable is not None:
            return (
                f"Noise hides a {unit} at epsilon {affordable.epsilon:g} for {100 * self.cost_of(affordable):.1f} "
                f"points of held-out accuracy (ridge.regularisation = {affordable.relative_penalty:.3g})."
            )
        weakest = options[-1]
        return (
            f"{count} {unit}s are too few to hide one: even at epsilon {weakest.epsilon:g} it costs "
            f"{100 * self.cost_of(weakest):.1f} points of held-out accuracy."
        )


def advise_releases(spec: Spec, data_folder: str | Path | None, clients: Any) -> ReleaseAdvice:
    """Solve the head without held-out rows, and try the noise of a few budgets on it.

    The distances are computed on the user's data. Noise or an r chosen from them depends on the data, so the result is
    only a study. For a federation, choose both from similar federations or public data.

    Args:
        spec: Spec of the training.
        data_folder: As for `train`.
        clients: As for `train`.

    Raises:
        InputError: If there are no rows to hold out, or no accuracy to measure.
    """
    data, held = clients_and_rows(spec, data_folder, clients)
    relative = spec.ridge.regularisation
    if held is None or relative == "auto":
        raise InputError("advice on noise needs held-out rows and a number for ridge.regularisation")
    if not spec.regime.has_accuracy:
        raise InputError("advice on noise needs a task with classes: this head has no accuracy on held-out rows")
    engine: Any = engine_from_spec(replace(spec, release=ReleaseSpec()), data)[0]
    usable = _usable(engine)
    release = Release(total(engine.fixed, [engine.sent_by(client) for client in usable]), relative)
    study = _Study(spec, engine, usable, held, engine.features(np.asarray(held.x)))
    tried = [study.at(release.at(relative * factor)) for factor in PENALTY_FACTORS]
    best = max(tried, key=lambda heads: heads.accuracy)
    options = []
    for unit in ("record", "client"):
        for number, budget in enumerate(BUDGETS):
            found = [study.option(heads, unit, budget, number) for heads in tried]
            options.append(max(found, key=lambda option: option.accuracy))
    count = release.statistics.samples
    return ReleaseAdvice(best.accuracy, best.release.relative_penalty, len(held.y), count, len(usable), tuple(options))


def _usable(engine: Any) -> Sequence[int]:
    """Return the clients whose samples can be used."""
    sent = engine.collect(range(len(engine.clients)), Position(0, 0))
    return [client for client, part in sent if part is not None and not isinstance(part, Rejection)]


@dataclass(frozen=True)
class _Heads:
    """Head at one relative penalty r: largest distances of a record and of a client, and accuracy without noise."""

    release: Release
    distances: dict[Unit, float]
    accuracy: float


@dataclass(frozen=True, eq=False)
class _Study:
    """Clients to solve heads from, and held-out rows with their `features` to measure accuracy on."""

    spec: Spec
    engine: Any
    clients: Sequence[int]
    held: HeldOutRows
    features: Floats

    def at(self, release: Release) -> _Heads:
        """Return distances and accuracy of the head of `release`."""
        records, clients = [0.0], [0.0]
        for client in self.clients:
            phi, targets = map(np.concatenate, zip(*self.engine.records_of(client), strict=True))
            records.append(float(np.max(release.distances_of_records(phi, targets))))
            clients.append(release.estimate_without(phi, targets))
        distances: dict[Unit, float] = {"record": max(records), "client": max(clients)}
        return _Heads(release, distances, self._accuracy(release.head.weights))

    def option(self, heads: _Heads, unit: Any, budget: tuple[float, float], number: int) -> ReleaseOption:
        """Return the option of one budget at one r."""
        weights, distance, releases = heads.release.head.weights, heads.distances[unit], self.spec.release.releases
        noise = noise_for(*budget, distance, releases)
        drawn = [keyed_generator(self.spec.seed, f"release advice {unit}", number, draw) for draw in range(DRAWS)]
        noisy = [self._accuracy(weights + noise * draw.standard_normal(weights.shape)) for draw in drawn]
        r, accuracy = heads.release.relative_penalty, float(np.mean(noisy))
        return ReleaseOption(unit, *budget, r, distance, releases, noise, accuracy, heads.accuracy)

    def _accuracy(self, weights: Floats) -> float:
        predicted = self.engine.targets.decode(self.features @ weights[:-1] + weights[-1])
        right = predicted == np.asarray(self.held.y).reshape(predicted.shape)
        return float(np.mean(right if right.ndim == 1 else right.all(axis=1)))
