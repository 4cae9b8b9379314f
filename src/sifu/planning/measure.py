"""What a forecast follows until it falls to its goal, and what noise adds to it.

Where the end of training rehearsed rounds with noise, wrong predictions are followed and their harm is what was
measured (`planning.noise_healing`). A run without such rounds (a training below 12 rounds, noise in training, clients
that did not answer alike, regression) is followed by its loss, more roughly:

    harm(sigma, k) = 1.8 rise(sigma) F(k),

with F(k) the share of a disturbance that k rounds of the first training leave (`LearningCurve.left`), and rise the
rehearsed rise of the loss; past T, on a model of c rounds, T / c times that, as margins grow. Where nothing was
rehearsed there is no prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sifu.planning.learning_curve import FirstTraining
from sifu.planning.noise_healing import Healing
from sifu.run.rehearsal import healed_noise
from sifu.theory.arrays import Floats

HARM_OF_LOSS = 1.8
"""Noise heals more slowly than the distance of theta_0, by this factor."""
SPREAD_OF_LUCK, LARGEST_SPREAD = 0.53, 1.5
"""The standard deviation of luck for noise of the rehearsed size; it falls like 1 / sigma, up from the largest."""
SPREAD_OF_LAW = 0.3
"""How far the harm of a run's own noise lies off the law, whatever the size: added to that of luck in squares."""
SPREAD_UNREHEARSED = 0.7
"""The same, whatever the size, where no rounds were rehearsed."""


@dataclass(frozen=True)
class Measure:
    """What must fall to `goal`: the share of wrong predictions (`of_errors`), or the loss.

    `harm` is what noise of a size still adds to it after some rounds, at a position on the path; `spread` is the
    standard deviation of its luck, and `scatter` how far single evaluations lie around the curve.
    """

    of_errors: bool
    scatter: float
    curve: Callable[[Floats | float], Floats]
    goal: float
    harm: Callable[[float, Floats, Floats], Floats]
    spread: Callable[[float], float]


def measure_of(first: FirstTraining, target: float, linear: bool) -> Measure | None:
    """Wrong predictions where rounds were rehearsed, else the loss; None where neither tells anything."""
    if first.losses is None:
        return None
    return _measure_of_errors(first, target, linear) or _measure_of_loss(first)


def _measure_of_errors(first: FirstTraining, target: float, linear: bool) -> Measure | None:
    errors, healing = first.errors, _healing(first, linear)
    if errors is None or healing is None:
        return None
    goal = errors.at_end
    if first.rounds_to_target is not None:
        # The round that came first to the target was lucky, and so will be the one that comes to it again.
        goal += (1.0 - target) - errors.last

    def spread(noise_std: float) -> float:
        """Luck along the slope grows like sigma, the mean harm like sigma^2."""
        if noise_std == 0.0:
            return 0.0
        return min(LARGEST_SPREAD, math.hypot(SPREAD_OF_LUCK * healing.noise_std / noise_std, SPREAD_OF_LAW))

    return Measure(True, errors.scatter, errors.errors, goal, healing.errors, spread)


def _healing(first: FirstTraining, linear: bool) -> Healing | None:
    """How noise heals, where rounds were rehearsed."""
    if first.losses is None:
        return None
    rises = {
        noise_std: (noised.loss - plain.loss, plain.accuracy - noised.accuracy)
        for noise_std, (noised, plain) in first.rehearsed.items()
    }
    samples = max((plain.samples for _, plain in first.rehearsed.values()), default=1)
    return Healing.of(healed_noise(first.evaluations), rises, samples, first.losses, linear)


def _measure_of_loss(first: FirstTraining) -> Measure | None:
    curve, rises = first.losses, rises_of_loss(first)
    if curve is None or not rises:
        return None

    def harm(noise_std: float, rounds: Floats, position: Floats) -> Floats:
        past_end = np.minimum(1.0, first.length / np.maximum(position - rounds, 1.0))
        return rise_of_loss(rises, noise_std) * HARM_OF_LOSS * curve.left(rounds) * past_end

    return Measure(False, 0.0, curve.loss, float(curve.loss(first.length)), harm, lambda _: SPREAD_UNREHEARSED)


def rises_of_loss(first: FirstTraining) -> dict[float, float]:
    """How much noise of each rehearsed size raised the loss before anything healed, where it did."""
    rises = {size: noised.loss - plain.loss for size, (noised, plain) in first.rehearsed.items()}
    return {size: rise for size, rise in sorted(rises.items()) if rise > 0.0}


def rise_of_loss(rises: dict[float, float], noise_std: float) -> float:
    """The rise of the loss at any size: between the rehearsed ones by its ratio to sigma^2, in logarithms."""
    if noise_std == 0.0:
        return 0.0
    sizes = [math.log(size) for size in rises]
    ratios = [math.log(rise / size**2) for size, rise in rises.items()]
    return float(np.exp(np.interp(math.log(noise_std), sizes, ratios))) * noise_std**2
