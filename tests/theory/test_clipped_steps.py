"""Theory of clipped local steps (docs/theory.md, section 5.9), on random losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Gradient = Callable[[Vector], Vector]
SLACK = 1.0 + 1e-9


@dataclass(frozen=True)
class ClippedTraining:
    """K steps of SGD whose gradients are clipped to `clip` before weight decay is added."""

    gradients: Sequence[Gradient]
    smoothness: float
    rate: float
    clip: float
    momentum: float
    decay: float
    nesterov: bool

    def run(self, model: Vector) -> Vector:
        velocity = np.zeros_like(model)
        for gradient in self.gradients:
            direction = clipped(gradient(model), self.clip) + self.decay * model
            velocity = self.momentum * velocity + direction
            model = model - self.rate * (direction + self.momentum * velocity if self.nesterov else velocity)
        return model

    def lengths(self, start: float, of_gradient: Callable[[float], float]) -> float:
        """Return the length after the same steps if all point the worst way; `of_gradient` bounds a
        step's direction.
        """
        length, velocity = start, 0.0
        for _ in self.gradients:
            direction = of_gradient(length)
            velocity = self.momentum * velocity + direction
            length += self.rate * (direction + self.momentum * velocity if self.nesterov else velocity)
        return length

    def reach(self, start_norm: float) -> float:
        return self.lengths(0.0, lambda moved: self.clip + self.decay * (start_norm + moved))

    def separate(self, distance: float) -> float:
        return self.lengths(distance, lambda a: min(2.0 * self.clip, self.smoothness * a) + self.decay * a)


def clipped(gradient: Vector, clip: float) -> Vector:
    length = float(np.linalg.norm(gradient))
    return gradient if length <= clip else gradient * (clip / length)


def random_training(generator: np.random.Generator) -> tuple[ClippedTraining, Vector, Vector]:
    """Draw smooth convex losses sum log cosh(A x - b), a new one for each step, and two starting models."""
    size, steps = int(generator.integers(1, 5)), int(generator.integers(1, 8))
    matrices = generator.normal(size=(steps, size, size)) * 3.0
    shifts = generator.normal(size=(steps, size))
    momentum = float(generator.choice((0.0, 0.5, 0.9)))
    training = ClippedTraining(
        [lambda x, A=A, b=b: A.T @ np.tanh(A @ x - b) for A, b in zip(matrices, shifts, strict=True)],
        smoothness=max(float(np.linalg.norm(A, 2)) ** 2 for A in matrices),
        rate=float(generator.choice((0.05, 0.3, 0.9))),
        clip=float(generator.choice((0.1, 1.0))),
        momentum=momentum,
        decay=float(generator.choice((0.0, 0.1, 1.0))),
        nesterov=momentum > 0.0 and bool(generator.random() < 0.5),
    )
    here = generator.normal(size=size)
    return training, here, here + generator.normal(size=size) * float(generator.choice((1e-3, 0.1, 1.0)))


@pytest.mark.parametrize("seed", range(300))
def test_reach_and_divergence_are_bounded(seed: int) -> None:
    training, here, there = random_training(np.random.default_rng(seed))
    moved = float(np.linalg.norm(training.run(here) - here))
    reach = training.reach(float(np.linalg.norm(here)))
    assert moved <= reach * SLACK
    separate = float(np.linalg.norm(training.run(here) - training.run(there)))
    assert separate <= training.separate(float(np.linalg.norm(here - there))) * SLACK
    steps, rho = len(training.gradients), training.momentum
    if training.decay == 0.0:
        terms = range(2, steps + 2) if training.nesterov else range(1, steps + 1)
        closed = training.rate * training.clip * sum((1.0 - rho**j) / (1.0 - rho) for j in terms)
        assert reach == pytest.approx(closed)
    elif rho == 0.0:
        kept = 1.0 - training.rate * training.decay
        pull = training.clip + training.decay * float(np.linalg.norm(here))
        assert moved <= training.rate * pull * sum(kept**j for j in range(steps)) * SLACK


@pytest.mark.parametrize("seed", range(50))
def test_drifts_within_twice_the_reach(seed: int) -> None:
    generator = np.random.default_rng(seed)
    weights = generator.dirichlet(np.ones(int(generator.integers(2, 6))))
    moves = np.array([clipped(row, 1.0) for row in generator.normal(size=(weights.size, 3)) * 3.0])
    drifts = np.linalg.norm(moves - weights @ moves, axis=1)
    assert np.all(drifts <= 2.0 * (1.0 - weights) * SLACK)


@pytest.mark.parametrize("rate", [1e-3, 0.01, 0.1, 0.2])
def test_control_a_clipped_step_on_a_convex_loss_expands(rate: float) -> None:
    """Negative control: an unclipped step with eta <= 2/beta = 0.222 never expands, but a clipped one does at every
    rate.
    """
    curvature, here = np.array([1.0, 9.0]), np.array([9.0, 1.0])
    there = here + 1e-4 * np.array([0.901, 0.434])
    plain = (here - rate * curvature * here) - (there - rate * curvature * there)
    assert np.linalg.norm(plain) <= np.linalg.norm(here - there)
    step = [model - rate * clipped(curvature * model, 1.0) for model in (here, there)]
    assert np.linalg.norm(step[0] - step[1]) > np.linalg.norm(here - there)
