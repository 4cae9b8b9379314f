"""Targets t of a head, computed from labels or real numbers by constants from the spec.

None of these constants is fitted to clients' data: a mean or a scale computed from the data would contain information
about a client that leaves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sifu.errors import InputError
from sifu.theory.arrays import Array, Floats

Task = Literal["classification", "multi_label", "regression"]

REACH = 8.0
"""Largest distance of a regression target from its shift, in units of its scale."""


@dataclass(frozen=True)
class Targets:
    """Rule that turns labels into targets: one-hot minus 1/`outputs`, 0/1 minus `shift`, or (y - shift) / scale.

    `shift` and `scale` hold one number for all outputs or one number per output; classification ignores them.

    >>> Targets("classification", 4).encode(np.array([2]))
    array([[-0.25, -0.25,  0.75, -0.25]])
    >>> Targets("regression", 1, shift=(50.0,), scale=(10.0,)).encode(np.array([65.0]))
    array([[1.5]])
    """

    task: Task
    outputs: int
    shift: tuple[float, ...] = (0.5,)
    scale: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if self.task not in ("classification", "multi_label", "regression"):
            raise InputError(f"task {self.task!r} is unknown: write classification, multi_label or regression")
        if self.outputs < 1 or (self.task == "classification" and self.outputs < 2):
            raise InputError(
                f"{self.task} with {self.outputs} outputs is not possible: classification needs at least two"
            )
        for name, values in (("shift", self.shift), ("scale", self.scale)):
            if len(values) not in (1, self.outputs) or not all(math.isfinite(value) for value in values):
                raise InputError(f"{name} must be one number or {self.outputs}, found {values}")
        if min(self.scale) <= 0.0:
            raise InputError(f"every scale must be positive, found {self.scale}")
        if self.task == "multi_label" and not all(0.0 <= value <= 1.0 for value in self.shift):
            raise InputError(f"the shift of labels 0 and 1 must lie between them, found {self.shift}")

    @property
    def norm(self) -> float:
        """Largest possible length of a target: `target_norm` of the fixed point."""
        if self.task == "classification":
            return 1.0
        return math.sqrt(self.outputs) * (1.0 if self.task == "multi_label" else REACH)

    def encode(self, labels: Array) -> Floats:
        """Return the target of each label.

        Args:
            labels: For each sample a class number, a row of 0 and 1, or one real number per output.

        Raises:
            InputError: If the labels do not fit the task, or a regression target is too far from the shift.
        """
        if self.task == "classification":
            return self._one_hot(np.asarray(labels))
        rows = np.asarray(labels, dtype=np.float64)
        if rows.ndim == 1 and self.outputs == 1:
            rows = rows[:, None]
        if rows.ndim != 2 or rows.shape[1] != self.outputs:
            raise InputError(f"labels have shape {rows.shape}; {self.outputs} for each sample were expected")
        if self.task == "multi_label":
            if not np.all((rows == 0.0) | (rows == 1.0)):
                raise InputError("labels of a multi-label task must be 0 or 1")
            return np.subtract(rows, self.shift)
        targets: Floats = (rows - np.asarray(self.shift)) / np.asarray(self.scale)
        if not np.all(np.abs(targets) <= REACH):  # NaN fails as well
            worst = float(np.max(np.abs(targets)))
            raise InputError(
                f"a regression target lies {worst:.3g} scales from the shift, where {REACH:g} is the limit: choose "
                "shift and scale in the spec so that every plausible value fits"
            )
        return targets

    def _one_hot(self, labels: Array) -> Floats:
        if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
            raise InputError(f"class numbers were expected, one for each sample; found {labels.dtype} {labels.shape}")
        if labels.size and not (labels.min() >= 0 and labels.max() < self.outputs):
            raise InputError(
                f"class numbers run from {labels.min()} to {labels.max()}; 0 to {self.outputs - 1} were expected"
            )
        targets = np.full((labels.size, self.outputs), -1.0 / self.outputs)
        targets[np.arange(labels.size), labels] += 1.0
        return targets

    def decode(self, predictions: Floats) -> Array:
        """Return labels for predicted targets: the class with the largest value, a row of 0 and 1, or real numbers.

        >>> Targets("multi_label", 2).decode(np.array([[0.1, -0.2]]))
        array([[1, 0]])
        """
        if self.task == "classification":
            return np.asarray(np.argmax(predictions, axis=1))
        if self.task == "multi_label":
            return np.asarray(predictions + np.asarray(self.shift) > 0.5, dtype=np.int64)
        return np.asarray(predictions * np.asarray(self.scale) + np.asarray(self.shift))
