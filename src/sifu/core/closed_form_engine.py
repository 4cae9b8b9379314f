"""Interface of engines for closed-form heads: clients send statistics, and a round is a solve."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from sifu.core.engine import Engine, Position, Rejection
from sifu.core.layout import ModelLayout, Vector
from sifu.core.spec import Spec
from sifu.core.spec.sections import RidgeSpec
from sifu.theory.arrays import Floats, Integers
from sifu.theory.closed_form import FixedPoint, Rows, Statistics, Targets
from sifu.theory.closed_form.blocks import Blocks
from sifu.theory.facts import DRAWN_FROM_SEED, FRESH_COPIES, NO_NOISE, ClientProfile, TrainingFacts
from sifu.theory.participation import Participation


def targets_of(ridge: RidgeSpec, outputs: int) -> Targets:
    """Return the rule that turns labels into targets of a head with `outputs` outputs."""
    return Targets(ridge.task, outputs, (ridge.shift,), (ridge.scale,))


def recorded_fixed_point(spec: Spec, layout: ModelLayout) -> FixedPoint:
    """Return the fixed-point format of a run's statistics, from its spec and the shape of its head."""
    (features, outputs), ridge = layout.shapes[0], spec.ridge
    target_norm = targets_of(ridge, outputs).norm
    norm = recorded_blocks(spec, layout).norm(spec.features.norm)
    return FixedPoint(features, outputs, ridge.feature_bits, ridge.target_bits, norm, target_norm)


def recorded_blocks(spec: Spec, layout: ModelLayout) -> Blocks:
    """Return the layout of the groups' blocks in a run's features: one block for a merge, none if no group tunes.

    A block has the width given in the spec. For a merge, for a width of 0, and for a network with fewer outputs, it has
    as many columns as the network has outputs.

    >>> spec = Spec.from_mapping({"features": {"block": 4}, "groups": {"count": 2, "rounds": 1}})
    >>> head = [ModelLayout(("weight", "bias"), ((features, 3), (3,))) for features in (18, 9)]
    >>> recorded_blocks(spec, head[0]), recorded_blocks(spec, head[1])
    (Blocks(frozen=10, block=4, count=2), Blocks(frozen=3, block=3, count=2))
    """
    features, block, is_merge = layout.shapes[0][0], spec.features.block, spec.features.tune == "merge"
    count = 1 if is_merge else spec.groups.count
    frozen = features - count * block
    if 0 < block < frozen and not is_merge:
        return Blocks(frozen, block, count)
    return Blocks(features // (count + 1), features // (count + 1), count)


def places_of_head(spec: Spec, layout: ModelLayout, groups: Collection[int]) -> Integers:
    """Return the indices of the head's features and of the constant, given the groups that have a network."""
    blocks = recorded_blocks(spec, layout)
    return blocks.left(groups if spec.features.tune == "blocks" else range(1 if groups else 0))


def head_layout(fixed: FixedPoint) -> ModelLayout:
    """Return the layout of weight and bias, which all linear models share."""
    return ModelLayout(("weight", "bias"), ((fixed.features, fixed.outputs), (fixed.outputs,)), "float64")


def head_profile(name: str, samples: int) -> ClientProfile:
    """Return the profile of a client; both curvature bounds are 0, because a solve depends on no earlier model."""
    return ClientProfile(name, samples, 1, 0.0, 0.0)


def head_facts(
    features: str, *, declared: bool, users: bool, from_labels: bool, preprocessing: str, identity: str
) -> TrainingFacts:
    """Return the facts about a head that a certificate's premises need.

    Args:
        features: Digest of the feature map.
        declared: True if the operator declares the map to be public.
        users: True if the operator's own module computes the map.
        from_labels: True if the number of outputs was counted from the clients' labels.
        preprocessing: Origin of preprocessing constants (`TrainingFacts.preprocessing`).
        identity: Method of identifying clients (`TrainingFacts.identity`).
    """
    return TrainingFacts(
        local_rate=0.0,
        momentum=0.0,
        nesterov=False,
        weight_decay=0.0,
        batch_size=None,
        server_rate=1.0,
        participation=Participation("all"),
        dtype="float64",
        smooth_model=True,
        rounding_bounded=False,
        preprocessing=preprocessing,
        shape_from_labels=from_labels,
        features=features,
        features_declared=declared,
        module=FRESH_COPIES if users else "",
        noise_source=NO_NOISE,
        identity=identity,
        initial=DRAWN_FROM_SEED,
    )


class StatisticsEngine(Protocol):
    """Engine whose clients send their statistics (G, H, n, q) once instead of a model in every round."""

    @property
    def fixed(self) -> FixedPoint:
        """Fixed-point format of the statistics."""
        ...

    @property
    def relative_penalty(self) -> float | None:
        """Relative penalty r, or None for cross-validation."""
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


@dataclass(frozen=True)
class GroupNetwork:
    """Network that a group tuned: the group, the number of its members' samples, and the tuned parameters."""

    group: int
    samples: int
    vector: Vector


class TunedEngine(ABC):
    """Capability of a `StatisticsEngine` whose features are computed by networks that groups tune.

    See docs/theory.md, section 15.5.
    """

    tuning: Engine
    """Engine of the rounds in which groups tune the network separately."""

    @abstractmethod
    def use_backbones(self, backbones: Sequence[GroupNetwork]) -> None:
        """Compute features with these networks from now on; the features of all other groups are zero."""
