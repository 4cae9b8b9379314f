"""Interface of engines for closed-form heads: clients send statistics, and a round is a solve."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from sifu.core.engine import Position, Rejection
from sifu.core.layout import ModelLayout
from sifu.core.spec import Spec
from sifu.core.spec.sections import RidgeSpec
from sifu.theory.arrays import Floats
from sifu.theory.closed_form import FixedPoint, Rows, Statistics, Targets
from sifu.theory.facts import DRAWN_FROM_SEED, ClientProfile, TrainingFacts
from sifu.theory.participation import Participation


def targets_of(ridge: RidgeSpec, outputs: int) -> Targets:
    """Return the rule that turns labels into targets of a head with `outputs` outputs."""
    return Targets(ridge.task, outputs, (ridge.shift,), (ridge.scale,))


def recorded_fixed_point(spec: Spec, layout: ModelLayout) -> FixedPoint:
    """Return the fixed-point format of a run's statistics, from its spec and the shape of its head."""
    features, outputs = layout.shapes[0]
    return FixedPoint(features, outputs, norm=spec.features.norm, target_norm=targets_of(spec.ridge, outputs).norm)


def head_layout(fixed: FixedPoint) -> ModelLayout:
    """Return the layout of weight and bias, which all linear models share."""
    return ModelLayout(("weight", "bias"), ((fixed.features, fixed.outputs), (fixed.outputs,)), "float64")


def head_profile(name: str, samples: int) -> ClientProfile:
    """Return the profile of a client; a solve depends on no earlier model, so it expands no distance."""
    return ClientProfile(name, samples, 1, 1.0)


def head_facts(
    features: str, *, declared: bool, module: str, from_labels: bool, preprocessing: str, identity: str
) -> TrainingFacts:
    """Return the facts about a head that a certificate's premises need.

    `from_labels` is True if the number of outputs was counted from the clients' labels; the other arguments are fields
    of `TrainingFacts`.
    """
    return TrainingFacts(
        local_rate=None,
        momentum=0.0,
        weight_decay=0.0,
        batch_size=None,
        participation=Participation("all"),
        dtype="float64",
        smooth_model=True,
        rounding_bounded=False,
        preprocessing=preprocessing,
        shape_from_labels=from_labels,
        features=features,
        features_declared=declared,
        module=module,
        identity=identity,
        initial=DRAWN_FROM_SEED,
    )


class StatisticsEngine(Protocol):
    """Engine whose clients send their statistics (G, H, n, q) once instead of a model in every round."""

    @property
    def fixed(self) -> FixedPoint:
        """Fixed-point format of the statistics."""
        ...

    def reachable(self, clients: Sequence[int]) -> list[int]:
        """Return the clients in `clients` that can be asked for statistics now."""
        ...

    def collect(
        self, clients: Sequence[int], position: Position
    ) -> Iterator[tuple[int, Statistics | Rows | Rejection | None]]:
        """Yield each client with its checked statistics or rows, in the order of `clients`.

        The value is a rejection for a refused client, and None for a client that does not answer.
        """
        ...


@dataclass(frozen=True)
class MaskedSum:
    """Sum of the statistics of `clients`, which reveals no single client's statistics.

    `rejections` name clients that were refused before they sent anything. `sent` counts the messages with masked
    statistics, including messages of dropped attempts.
    """

    statistics: Statistics
    clients: tuple[int, ...]
    rejections: tuple[Rejection, ...]
    sent: int


class MaskedStatisticsEngine(ABC):
    """Capability of a `StatisticsEngine` that never sees one client's statistics."""

    @abstractmethod
    def collect_sum(self, clients: Sequence[int], position: Position) -> MaskedSum:
        """Return the sum over all participating clients; if a client fails, the whole attempt is discarded."""


class HasRecords(ABC):
    """Capability of a `StatisticsEngine` that can read the records of clients."""

    @abstractmethod
    def records_of(self, client: int) -> Iterator[tuple[Floats, Floats]]:
        """Yield the features and targets of a client's records, one block at a time."""
