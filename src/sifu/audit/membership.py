"""Attacks on released models: membership inference, watermarks, relearning, and the resemblance to Scratch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sifu.core.engine import Engine, Position
from sifu.core.layout import Vector
from sifu.core.round import NormalSource, add_noise
from sifu.theory.arrays import Floats
from sifu.theory.calibration import true_positive_rate
from sifu.theory.participation import ClientIndices

if TYPE_CHECKING:
    from sifu.engines.sim.models import Samples, Scorer

LOW_RATES = (0.01, 0.10)


@dataclass(frozen=True)
class AttackRates:
    """What an attack reaches: true-positive rates at false-positive rates of 1 % and 10 %, and the area below all."""

    at_1_percent: float
    at_10_percent: float
    area: float


@dataclass(frozen=True)
class MembershipAudit:
    """Attacks on the forgotten clients' samples.

    `loss` holds the loss threshold on each model by name (before, released, scratch), None without held-out
    samples. `lira` attacks shadows of the release; `lira_released` and `lira_scratch` are the shares of the samples
    that the same attack calls members in the released model and in Scratch, at 10 % false alarms.
    """

    samples: int
    held_out: int
    loss: dict[str, AttackRates] | None
    bound: AttackRates | None
    shadow_rounds: int
    lira_client: str = ""
    lira: AttackRates | None = None
    lira_released: float | None = None
    lira_scratch: float | None = None
    shadows: int = 0


def attack_rates(members: Floats, others: Floats) -> AttackRates:
    """Rates of "large is a member"; ties count against the attack.

    >>> attack_rates(np.array([2.0, 3.0]), np.array([0.0, 1.0])).area
    1.0
    """
    ordered = np.sort(others)
    rates = []
    for rate in LOW_RATES:
        allowed = int(np.floor(rate * ordered.size))
        rates.append(float(np.mean(members > ordered[ordered.size - 1 - allowed])))
    below = np.searchsorted(ordered, members, side="left")
    ties = np.searchsorted(ordered, members, side="right") - below
    area = float(np.mean((below + 0.5 * ties) / ordered.size))
    return AttackRates(rates[0], rates[1], area)


def bound_rates(multiplier: float) -> AttackRates:
    """The best any test can reach against a fully used budget: the Gaussian trade-off curve of mu = 1/s."""
    from scipy.special import ndtr

    mu = 1.0 / multiplier
    return AttackRates(
        true_positive_rate(mu, LOW_RATES[0]), true_positive_rate(mu, LOW_RATES[1]), float(ndtr(mu / np.sqrt(2.0)))
    )


RecordedRounds = Sequence[tuple[Position, ClientIndices]]
"""The retraining of a request as it was recorded: who took part in the round from each position."""


@dataclass(frozen=True)
class ShadowScores:
    """Confidence of every sample (columns) in every shadow (rows), in both worlds."""

    with_client: Floats
    without_client: Floats


def shadow_scores(
    engine: Engine,
    scorer: Scorer,
    worlds: tuple[Vector, Vector],
    noise_std: float,
    rounds: RecordedRounds,
    samples: Samples,
    shadows: int,
    normals: NormalSource,
    progress: Callable[[int, int], None] | None = None,
) -> ShadowScores:
    """Shadow federations: the request carried out again from each world, with fresh noise, to its recorded end."""
    by_world: list[list[Floats]] = [[], []]
    for shadow in range(shadows):
        for scores, source in zip(by_world, worlds, strict=True):
            model = add_noise(source, noise_std, normals)
            for position, participants in rounds:
                model = engine.run_round(model, position, participants).model
            scores.append(scorer.confidences(model, samples))
        if progress:
            progress(shadow + 1, shadows)
    return ShadowScores(np.stack(by_world[0]), np.stack(by_world[1]))


def lira(scores: ShadowScores, targets: Sequence[Floats]) -> tuple[AttackRates, list[float]]:
    """Rates over the second half of the shadows with laws fitted on the first, and the shares of `targets` called
    members.

    `targets` are confidences of the same samples in other models; their threshold is that of 10 % false alarms.
    """
    half = scores.with_client.shape[0] // 2
    fits = [_fit(world[:half]) for world in (scores.with_client, scores.without_client)]

    def ratios(values: Floats) -> Floats:
        (mean_in, std_in), (mean_out, std_out) = fits
        inside = -0.5 * ((values - mean_in) / std_in) ** 2 - np.log(std_in)
        outside = -0.5 * ((values - mean_out) / std_out) ** 2 - np.log(std_out)
        return inside - outside

    members, others = ratios(scores.with_client[half:]).ravel(), ratios(scores.without_client[half:]).ravel()
    threshold = np.sort(others)[others.size - 1 - int(0.1 * others.size)]
    return attack_rates(members, others), [float(np.mean(ratios(target) > threshold)) for target in targets]


def _fit(values: Floats) -> tuple[Floats, Floats]:
    """Mean of each sample, one spread for all: few shadows allow no more (Carlini et al. 2022, section VI.A)."""
    spread = float(np.sqrt(np.mean(values.var(axis=0, ddof=1))))
    return values.mean(axis=0), np.full(values.shape[1], max(spread, 1e-12))


RELEARN_BRANCH = 1 << 40
"""Positions that no run uses, so that relearning draws its own participants and batches."""


@dataclass(frozen=True)
class WatermarkSuccess:
    """Accuracy on the clients' marked samples, with their own marks and with marks no one trained with.

    What the own marks give beyond fresh ones is owed to remembering the mark.
    """

    own: float
    fresh: float

    @property
    def success(self) -> float:
        """Own less fresh."""
        return self.own - self.fresh


@dataclass(frozen=True)
class ForgettingAudit:
    """The released model next to the one before the request and next to Scratch; dictionaries are by model.

    Accuracy and loss before the request are the recorded ones.

    `relearn` counts rounds with the clients back until the model is as good on their data as before (None: not within
    `relearn_limit`). `disagreement` is the share of samples on which released model and Scratch predict otherwise.
    """

    accuracy: dict[str, float]
    loss: dict[str, float]
    scratch_rounds: int
    relearn: dict[str, int | None]
    relearn_limit: int
    distance_to_scratch: float
    distance_from_start: float
    disagreement: dict[str, float]
    watermark: dict[str, WatermarkSuccess] | None


def relearn_rounds(
    engine: Engine,
    model: Vector,
    goal: tuple[float, float],
    forgotten: ClientIndices,
    everyone: ClientIndices,
    order: int,
    limit: int,
) -> int | None:
    """Rounds with the forgotten back among `everyone` until their accuracy (without labels: loss) is what it was."""
    accuracy, loss = goal
    for rounds in range(limit + 1):
        evaluation = engine.evaluate(model, forgotten)
        if evaluation.accuracy >= accuracy if accuracy > 0.0 else evaluation.loss <= loss * (1.0 + 1e-9):
            return rounds
        model = engine.run_round(model, Position(RELEARN_BRANCH + order, rounds), everyone).model
    return None
