"""Attacks on released models: membership inference, relearning, and their results."""

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
    from sifu.engines.sim.scorers import Samples, Scorer

LOW_RATES = (0.01, 0.10)


@dataclass(frozen=True)
class AttackRates:
    """Success of an attack: true-positive rates at 1 % and 10 % false positives, and the area under the curve."""

    at_1_percent: float
    at_10_percent: float
    area: float


@dataclass(frozen=True)
class MembershipAudit:
    """Membership attacks on the forgotten clients' samples.

    `loss` holds the loss-threshold attack on each model by name (before, released, scratch), or None without held-out
    samples. `lira` attacks shadows of the release; `lira_released` and `lira_scratch` are the shares of samples that
    the same attack calls members in the released model and in Scratch, at 10 % false positives.
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
    """Return the rates of an attack that calls large values members.

    A tie counts as a miss in the true-positive rates, and as half a hit in the area.

    >>> attack_rates(np.array([2.0, 3.0]), np.array([0.0, 1.0])).area
    1.0
    """
    ordered = np.sort(others)
    allowed = (int(np.floor(rate * ordered.size)) for rate in LOW_RATES)
    rates = [float(np.mean(members > ordered[ordered.size - 1 - count])) for count in allowed]
    below = np.searchsorted(ordered, members, side="left")
    ties = np.searchsorted(ordered, members, side="right") - below
    area = float(np.mean((below + 0.5 * ties) / ordered.size))
    return AttackRates(rates[0], rates[1], area)


def bound_rates(multiplier: float) -> AttackRates:
    """Return the best rates of any test against a fully used budget: the Gaussian trade-off curve of mu = 1/s."""
    from scipy.special import ndtr

    mu = 1.0 / multiplier
    low, high = (true_positive_rate(mu, rate) for rate in LOW_RATES)
    return AttackRates(low, high, float(ndtr(mu / np.sqrt(2.0))))


RecordedRounds = Sequence[tuple[Position, ClientIndices]]
"""Recorded rounds of a request's retraining: each position with the clients that took part."""


ShadowScores = tuple[Floats, Floats]
"""Confidence of every sample (columns) in every shadow (rows), with and without the client."""


def shadow_scores(
    engine: Engine,
    scorer: Scorer,
    counterfactuals: tuple[Vector, Vector],
    noise_std: float,
    rounds: RecordedRounds,
    samples: Samples,
    shadows: int,
    normals: NormalSource,
    progress: Callable[[int, int], None],
) -> ShadowScores:
    """Retrain shadow federations and return the confidence of the samples in them.

    Each shadow starts from one of the two source models, adds fresh noise, and repeats the recorded rounds.

    Args:
        engine: Engine of the run.
        scorer: Scorer that computes the confidences.
        counterfactuals: Source models with and without the client.
        noise_std: Standard deviation of the noise that starts each shadow.
        rounds: Recorded rounds of the retraining.
        samples: Samples whose membership is attacked.
        shadows: Number of shadows for each source model.
        normals: Generator of standard normals for the noise.
        progress: Callback that receives the number of shadows done and their total.
    """
    by_counterfactual: list[list[Floats]] = [[], []]
    for shadow in range(shadows):
        for scores, source in zip(by_counterfactual, counterfactuals, strict=True):
            model = add_noise(source, noise_std, normals)
            for position, participants in rounds:
                model = engine.run_round(model, position, participants).model
            scores.append(scorer.confidences(model, samples))
        progress(shadow + 1, shadows)
    return np.stack(by_counterfactual[0]), np.stack(by_counterfactual[1])


def lira(scores: ShadowScores, targets: Sequence[Floats]) -> tuple[AttackRates, list[float]]:
    """Run the likelihood-ratio attack (LiRA) on shadows.

    The distributions are fitted on the first half of the shadows, and the rates are counted on the second half.

    Args:
        scores: Confidences in shadows with and without the client.
        targets: Confidences of the same samples in other models.

    Returns:
        The rates, and for each target the share of samples called members at 10 % false positives.
    """
    half = len(scores[0]) // 2
    fits = [_fit(counterfactual[:half]) for counterfactual in scores]

    def ratios(values: Floats) -> Floats:
        (mean_in, std_in), (mean_out, std_out) = fits
        inside = -0.5 * ((values - mean_in) / std_in) ** 2 - np.log(std_in)
        outside = -0.5 * ((values - mean_out) / std_out) ** 2 - np.log(std_out)
        return inside - outside

    members, others = (ratios(counterfactual[half:]).ravel() for counterfactual in scores)
    threshold = np.sort(others)[others.size - 1 - int(0.1 * others.size)]
    return attack_rates(members, others), [float(np.mean(ratios(target) > threshold)) for target in targets]


def _fit(values: Floats) -> tuple[Floats, Floats]:
    """Return each sample's mean and one common spread, which suits few shadows (Carlini et al. 2022, section VI.A)."""
    spread = float(np.sqrt(np.mean(values.var(axis=0, ddof=1))))
    return values.mean(axis=0), np.full(values.shape[1], max(spread, 1e-12))


RELEARN_BRANCH = 1 << 40
"""Branch number that no run uses, so that relearning draws its own participants and batches."""


@dataclass(frozen=True)
class ForgettingAudit:
    """Comparison of the released model with the earlier model and with Scratch; dictionaries are keyed by model.

    Accuracy and loss before the request are read from the record or, if they are not recorded, measured again.

    `relearn` counts the rounds with the clients until the model is as good on their data as before. None means that
    `relearn_limit` rounds are not enough. `disagreement` is the share of samples for which the released model and
    Scratch predict different labels.
    """

    accuracy: dict[str, float]
    loss: dict[str, float]
    scratch_rounds: int
    relearn: dict[str, int | None]
    relearn_limit: int
    distance_to_scratch: float
    distance_from_start: float
    disagreement: dict[str, float]


def relearn_rounds(
    engine: Engine,
    model: Vector,
    goal: tuple[float, float],
    forgotten: ClientIndices,
    everyone: ClientIndices,
    order: int,
    limit: int,
) -> int | None:
    """Count the rounds with the forgotten clients until the model is as good on their data as before.

    Args:
        engine: Engine of the run.
        model: Model that the first round starts from.
        goal: Accuracy and loss before the request; the loss counts if the accuracy is 0 (regression).
        forgotten: The forgotten clients.
        everyone: Participants of each round, including the forgotten clients.
        order: Order of the request, which selects the random draws.
        limit: Maximum number of rounds.

    Returns:
        The number of rounds, or None if `limit` rounds are not enough.
    """
    accuracy, loss = goal
    for rounds in range(limit + 1):
        evaluation = engine.evaluate(model, forgotten)
        if evaluation.accuracy >= accuracy if accuracy > 0.0 else evaluation.loss <= loss * (1.0 + 1e-9):
            return rounds
        model = engine.run_round(model, Position(RELEARN_BRANCH + order, rounds), everyone).model
    return None
