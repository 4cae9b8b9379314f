"""Scores, losses and predictions of single samples; engines return only counts and sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sifu.core.engine import Engine
from sifu.core.layout import Vector
from sifu.engines.sim.embedded_heads import ClosedFormFederation
from sifu.engines.sim.models import Model, load_state
from sifu.theory.arrays import Array, Floats, Integers

CHUNK = 4096


@dataclass(frozen=True)
class Samples:
    """Model inputs and their targets."""

    x: Array
    y: Array

    @property
    def count(self) -> int:
        """Number of samples."""
        return int(self.x.shape[0])


class Scorer:
    """Scorer of single samples; every method takes the flat vector of a model's parameters."""

    def __init__(self, model: Model, dtype: str) -> None:
        self._model, self._dtype = model, dtype
        self._module = model.build(dtype).eval()

    def outputs(self, vector: Vector, x: Array) -> Floats:
        """Return the model's scores, one row per sample."""
        inputs = torch.tensor(np.ascontiguousarray(x, dtype=self._dtype))
        load_state(self._module, torch.tensor(np.array(vector, dtype=self._dtype)))  # copy: it may be read-only
        with torch.no_grad():
            parts = [self._module(part).reshape(part.shape[0], -1) for part in torch.split(inputs, CHUNK)]
        return torch.cat(parts).double().numpy()

    def losses(self, vector: Vector, samples: Samples) -> Floats:
        """Return the loss of each sample."""
        scores = torch.from_numpy(self.outputs(vector, samples.x))
        objective, targets = self._model.objective, torch.from_numpy(np.ascontiguousarray(samples.y))
        encoded = objective.encode(targets, scores.shape[1], torch.float64)
        return np.asarray(objective.row_loss(scores, encoded).numpy())

    def predictions(self, vector: Vector, x: Array) -> Integers:
        """Return the predicted class of each sample."""
        scores = self.outputs(vector, x)
        if scores.shape[1] == 1:
            return (scores[:, 0] > 0).astype(np.int64)
        return np.asarray(scores.argmax(axis=1))

    def probabilities(self, vector: Vector, x: Array) -> Floats | None:
        """Return the class probabilities, one row per sample, or None if the model gives none."""
        if not self._model.objective.labels:
            return None
        scores = self.outputs(vector, x)
        if scores.shape[1] == 1:
            scores = np.concatenate([np.zeros_like(scores), scores], axis=1)
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))

    def squared_error(self, vector: Vector, samples: Samples) -> float:
        """Return the mean squared error of real-valued targets, in the squared unit of the targets."""
        predicted = self._values(vector, samples.x)
        return float(np.mean((predicted - np.asarray(samples.y, dtype=np.float64).reshape(predicted.shape)) ** 2))

    def _values(self, vector: Vector, x: Array) -> Floats:
        """Return the predictions of real-valued targets, one row per sample, in the unit of the targets."""
        return self.outputs(vector, x)


class HeadScorer(Scorer):
    """Scorer of a closed-form head; its inputs are samples before the feature map."""

    def __init__(self, engine: ClosedFormFederation) -> None:
        self._engine = engine

    def outputs(self, vector: Vector, x: Array) -> Floats:
        """Return the predicted targets, one row per sample."""
        return self._engine.predict(vector, x)

    def losses(self, vector: Vector, samples: Samples) -> Floats:
        """Return the squared error of each sample."""
        wrong = self.outputs(vector, samples.x) - self._engine.targets.encode(np.asarray(samples.y))
        return np.asarray(np.sum(wrong * wrong, axis=1))

    def predictions(self, vector: Vector, x: Array) -> Integers:
        """Return the predicted class of each sample."""
        return np.asarray(self._engine.targets.decode(self.outputs(vector, x)))

    def probabilities(self, vector: Vector, x: Array) -> Floats | None:
        """Return None: a ridge head has no probabilities."""
        return None

    def _values(self, vector: Vector, x: Array) -> Floats:
        return np.asarray(self._engine.targets.decode(self.outputs(vector, x)), dtype=np.float64)


def scorer_of(engine: Engine) -> Scorer | None:
    """Return a scorer for an engine's models, or None if the engine does not expose its model."""
    if isinstance(engine, ClosedFormFederation):
        return HeadScorer(engine)
    model = getattr(engine, "model", None)
    return None if model is None else Scorer(model, engine.layout.dtype)


def stacked(clients: Any, chosen: Integers | list[int]) -> Samples:
    """Return the samples of the `chosen` clients, concatenated in this order."""
    return Samples(
        np.concatenate([np.asarray(clients[int(k)].x) for k in chosen]),
        np.concatenate([np.asarray(clients[int(k)].y) for k in chosen]),
    )
