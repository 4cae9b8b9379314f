"""A model's outputs sample by sample: what attacks look at, where the engine only counts and sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils import vector_to_parameters

from sifu.core.engine import Engine
from sifu.core.layout import Vector
from sifu.engines.sim.embedded_heads import ClosedFormFederation
from sifu.engines.sim.models import set_to_evaluate
from sifu.errors import InputError
from sifu.theory.arrays import Array, Floats, Integers

CHUNK = 4096


@dataclass(frozen=True)
class Samples:
    """Model inputs and their targets."""

    x: Array
    y: Array

    @property
    def count(self) -> int:
        """How many there are."""
        return int(self.x.shape[0])


class Scorer:
    """Losses and predictions of flat models on samples; `model` is a `sifu.engines.sim` model."""

    def __init__(self, model: Any, dtype: str) -> None:
        self._model, self._dtype = model, dtype
        self._module = model.build(dtype)
        set_to_evaluate(self._module)

    @property
    def labels(self) -> bool:
        """Whether targets are classes."""
        return bool(self._model.objective.labels)

    def outputs(self, vector: Vector, x: Array) -> Floats:
        """The model's scores of each sample, one row each."""
        # The parameters are a flat vector of `dtype`; numpy may hand over a read-only one.
        vector_to_parameters(torch.tensor(np.array(vector, dtype=self._dtype)), self._module.parameters())
        inputs = torch.tensor(np.ascontiguousarray(x, dtype=self._dtype))
        with torch.no_grad():
            parts = [self._module(part).reshape(part.shape[0], -1) for part in torch.split(inputs, CHUNK)]
        return np.asarray(torch.cat(parts).double().numpy())

    def losses(self, vector: Vector, samples: Samples) -> Floats:
        """The loss of each sample."""
        scores, encoded = self._encoded(vector, samples)
        return np.asarray(self._model.objective.row_loss(scores, encoded).numpy())

    def accuracy(self, vector: Vector, samples: Samples) -> float:
        """Share of samples that are predicted correctly; NaN for real targets."""
        if not self.labels or samples.count == 0:
            return float("nan")
        scores, encoded = self._encoded(vector, samples)
        return float(self._model.objective.hits(scores, encoded).double().mean())

    def confidences(self, vector: Vector, samples: Samples) -> Floats:
        """ln(p / (1 - p)) of the right class (Carlini et al. 2022); minus the loss where targets are real."""
        losses = self.losses(vector, samples)
        if not self.labels:
            return -losses
        right = -losses  # ln p
        return right - np.log(-np.expm1(np.minimum(right, -1e-15)))

    def predictions(self, vector: Vector, x: Array) -> Integers:
        """The predicted class of each sample."""
        scores = self.outputs(vector, x)
        if scores.shape[1] == 1:
            return (scores[:, 0] > 0).astype(np.int64)
        return np.asarray(scores.argmax(axis=1))

    def probabilities(self, vector: Vector, x: Array) -> Floats | None:
        """The probability of each class, one row for each sample; None where the model gives none."""
        if not self.labels:
            return None
        scores = self.outputs(vector, x)
        if scores.shape[1] == 1:
            scores = np.concatenate([np.zeros_like(scores), scores], axis=1)
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))

    def squared_error(self, vector: Vector, samples: Samples) -> float:
        """The mean squared error of real targets, in squares of their unit."""
        predicted = self._values(vector, samples.x)
        return float(np.mean((predicted - np.asarray(samples.y, dtype=np.float64).reshape(predicted.shape)) ** 2))

    def _values(self, vector: Vector, x: Array) -> Floats:
        """The predicted real targets of each sample, in their unit."""
        return self.outputs(vector, x)

    def _encoded(self, vector: Vector, samples: Samples) -> tuple[Any, Any]:
        scores = torch.from_numpy(self.outputs(vector, samples.x))
        targets = torch.from_numpy(np.ascontiguousarray(samples.y))
        if (
            self.labels
            and samples.count
            and not 0 <= int(samples.y.min()) <= int(samples.y.max()) < max(2, scores.shape[1])
        ):
            raise InputError(f"labels must lie in 0..{max(2, scores.shape[1]) - 1}, found {int(samples.y.max())}")
        return scores, self._model.objective.encode(targets, scores.shape[1], torch.float64)


class HeadScorer(Scorer):
    """The same of a head in closed form, whose inputs are samples before the feature map."""

    def __init__(self, engine: ClosedFormFederation) -> None:
        self._engine = engine

    @property
    def labels(self) -> bool:
        """Whether targets are classes."""
        return self._engine.targets.task == "classification"

    def outputs(self, vector: Vector, x: Array) -> Floats:
        """The predicted targets of each sample, one row each."""
        return self._engine.predict(vector, x)

    def losses(self, vector: Vector, samples: Samples) -> Floats:
        """The squared error of each sample."""
        wrong = self.outputs(vector, samples.x) - self._engine.targets.encode(np.asarray(samples.y))
        return np.asarray(np.sum(wrong * wrong, axis=1))

    def accuracy(self, vector: Vector, samples: Samples) -> float:
        """Share of samples that are predicted correctly; NaN for other tasks than classification."""
        if not self.labels or samples.count == 0:
            return float("nan")
        return float(np.mean(self.predictions(vector, samples.x) == np.asarray(samples.y)))

    def confidences(self, vector: Vector, samples: Samples) -> Floats:
        """Minus the loss: a ridge head has no probabilities."""
        return -self.losses(vector, samples)

    def predictions(self, vector: Vector, x: Array) -> Integers:
        """The predicted class of each sample."""
        return np.asarray(self._engine.targets.decode(self.outputs(vector, x)))

    def probabilities(self, vector: Vector, x: Array) -> Floats | None:
        """A ridge head has none."""
        return None

    def _values(self, vector: Vector, x: Array) -> Floats:
        return np.asarray(self._engine.targets.decode(self.outputs(vector, x)), dtype=np.float64)


def scorer_of(engine: Engine) -> Scorer | None:
    """What scores samples with models of an engine; None for an engine that does not show its model."""
    if isinstance(engine, ClosedFormFederation):
        return HeadScorer(engine)
    model = getattr(engine, "model", None)
    return None if model is None else Scorer(model, engine.layout.dtype)


def stacked(clients: Any, chosen: Integers | list[int]) -> Samples:
    """The samples of some clients, one after the other."""
    return Samples(
        np.concatenate([np.asarray(clients[int(k)].x) for k in chosen]),
        np.concatenate([np.asarray(clients[int(k)].y) for k in chosen]),
    )
