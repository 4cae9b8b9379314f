"""What an engine of closed-form heads is: its clients send statistics, and a round is a solve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from sifu.core.engine import Rejection
from sifu.core.layout import ModelLayout
from sifu.core.spec import Spec
from sifu.theory.closed_form import FixedPoint, Statistics, Targets


def recorded_fixed_point(spec: Spec, layout: ModelLayout) -> FixedPoint:
    """How the statistics of a run are written, from its spec and the shape of its head."""
    (features, outputs), ridge = layout.shapes[0], spec.ridge
    targets = Targets(ridge.task, outputs, (ridge.shift,), (ridge.scale,))
    return FixedPoint(features, outputs, ridge.feature_bits, ridge.target_bits, spec.features.norm, targets.norm)


@runtime_checkable
class StatisticsEngine(Protocol):
    """An `Engine` whose clients send (G, H, n, q) once instead of models round by round."""

    @property
    def fixed(self) -> FixedPoint:
        """How numbers are written."""
        ...

    @property
    def relative_penalty(self) -> float | None:
        """r of lambda, None for cross-validation."""
        ...

    def collect(self, clients: Sequence[int]) -> Iterator[tuple[int, Statistics | Rejection]]:
        """The statistics of each of `clients` in their order, checked; or why they were refused."""
        ...
