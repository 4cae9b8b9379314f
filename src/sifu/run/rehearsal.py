"""Rehearsal of noise at the end of training: the accuracy that noise costs, and how fast rounds regain it.

Noise of a few sizes is added to copies of the model, which are evaluated on the active clients and discarded. Two
further copies, and the model itself, are trained for up to two rounds and evaluated after each. Nothing is released;
only loss and accuracy are recorded, as for every other evaluation. From these figures, plans predict how loss and
errors rise with sigma and fall in later rounds (`sifu.planning.forecast`), even when the data no longer exist.

Each draw of noise is used with both signs, and evaluations with the same sigma are averaged. The slope of the loss
along the noise then cancels; sigma^2 tr(H)/2, with the Hessian H of the loss, and higher even orders remain. Each size
is drawn several times, because the effect of one draw is up to twice that of another. Most draws have a size that is
common in requests. For the rounds, one pair is enough: draws differ mainly in a few directions of large curvature,
which one round recovers.

The rounds cost at most a quarter of the training. They are skipped if a round has a privacy cost (noise in training),
and end early if different clients take part in the copies' rounds. Nothing is rehearsed if different clients may
evaluate different models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from sifu.core.engine import Engine, Evaluation, MayNotEvaluate, Position, evaluate_each
from sifu.core.layout import Vector
from sifu.core.round import keyed_generator
from sifu.errors import NoClientResponseError, RoundRejectedError
from sifu.store.projection import EvaluationRow
from sifu.theory.participation import ClientIndices

REHEARSED = "noise:"
"""Prefix of the subset of evaluations of noised copies; sigma follows."""
RECOVERED = "healing:"
"""Prefix of the subset of evaluations after rounds; the number of rounds, a colon and sigma follow (0.0: no noise)."""
RATIOS = {0.25: 4, 0.75: 3, 2.0: 1}
"""Number of draws, by ratio of noise to distance travelled: sigma sqrt(d) / ||theta - theta_0|| for d parameters."""
RECOVERED_RATIO = 0.75
"""Ratio of the noise whose recovery by rounds is rehearsed."""
MOST_ROUNDS, LEAST_TRAINING = 2, 12
"""Largest number of rehearsed rounds, and training rounds needed for each; a rehearsed round costs three rounds."""


def rehearse(
    engine: Engine, model: Vector, distance: float, node: int, active: ClientIndices, seed: int, position: Position
) -> list[EvaluationRow]:
    """Return evaluations of noised copies of the model at `node`, on the clients `active`.

    Args:
        engine: Engine of the run.
        model: The trained model.
        distance: Distance of the model from the initial model.
        node: Node of the model.
        active: Clients to evaluate on.
        seed: Seed of the run.
        position: Branch and number of the next round.
    """
    if distance <= 0.0 or active.size == 0:
        return []
    if isinstance(engine, MayNotEvaluate) and not (engine.evaluates and engine.same_evaluators):
        return []
    sizes = {ratio * distance / math.sqrt(model.size): draws for ratio, draws in RATIOS.items()}
    recovered_size = RECOVERED_RATIO * distance / math.sqrt(model.size)
    recovered = _recovered_copies(engine, model, recovered_size, position, active, seed)
    noised = _noised_copies(model, sizes, keyed_generator(seed, "rehearsal"))
    models = chain(noised, (copy for copies in recovered.values() for copy in copies))
    results = iter(evaluate_each(engine, models, active))
    rows = [
        _averaged(node, f"{REHEARSED}{noise_std!r}", list(islice(results, 2 * draws)))
        for noise_std, draws in sizes.items()
    ]
    after = [_averaged(node, subset, list(islice(results, len(copies)))) for subset, copies in recovered.items()]
    if None in after or len({row.samples for row in after if row}) > 1:
        after = []  # a forecast of the recovery would need all evaluations
    return [row for row in rows + after if row is not None]


def _averaged(node: int, subset: str, evaluations: Sequence[Evaluation]) -> EvaluationRow | None:
    """Return the mean of the evaluations, or None if their samples differ, because the slope would then not cancel."""
    samples = evaluations[0].samples
    if not samples.any() or any(not np.array_equal(evaluation.samples, samples) for evaluation in evaluations):
        return None
    loss = float(np.mean([evaluation.loss for evaluation in evaluations]))
    accuracy = float(np.mean([evaluation.accuracy for evaluation in evaluations]))
    return EvaluationRow(node, subset, int(samples.sum()), accuracy, loss) if math.isfinite(loss) else None


def _noised_copies(model: Vector, sizes: Mapping[float, int], generator: np.random.Generator) -> Iterator[Vector]:
    """Yield copies with the given number of draws of each noise size, each with both signs."""
    for noise_std, draws in sizes.items():
        for _ in range(draws):
            noise = noise_std * generator.standard_normal(model.size)
            for sign in (1.0, -1.0):
                yield (model + sign * noise).astype(model.dtype)


def _recovered_copies(
    engine: Engine, model: Vector, noise_std: float, position: Position, active: ClientIndices, seed: int
) -> dict[str, list[Vector]]:
    """Return the models after each rehearsed round, by subset: without noise, and two copies with opposite noise."""
    wanted = min(MOST_ROUNDS, position.round // LEAST_TRAINING)
    if wanted == 0 or engine.facts.noise > 0.0:
        return {}
    noise = noise_std * keyed_generator(seed, "rehearsed rounds").standard_normal(model.size)
    copies = [model, (model + noise).astype(model.dtype), (model - noise).astype(model.dtype)]
    recovered: dict[str, list[Vector]] = {}
    for rounds in range(1, wanted + 1):
        place = Position(position.branch, position.round + rounds - 1)
        try:
            done = [engine.run_round(copy, place, active) for copy in copies]
        except (RoundRejectedError, NoClientResponseError):
            break  # a rehearsal may fail: the training itself is already done
        who = done[0].participants
        if who.size == 0 or any(not np.array_equal(result.participants, who) for result in done):
            break
        copies = [result.model for result in done]
        recovered[f"{RECOVERED}{rounds}:{0.0!r}"] = copies[:1]
        recovered[f"{RECOVERED}{rounds}:{noise_std!r}"] = copies[1:]
    return recovered


def rehearsed_noises(rows: list[EvaluationRow]) -> dict[int, list[tuple[float, EvaluationRow]]]:
    """Return (sigma, evaluation) of every rehearsal, by node."""
    by_node: dict[int, list[tuple[float, EvaluationRow]]] = {}
    for row in rows:
        if row.subset.startswith(REHEARSED):
            by_node.setdefault(row.node, []).append((float(row.subset.removeprefix(REHEARSED)), row))
    return by_node


@dataclass(frozen=True)
class RecoveredNoise:
    """Loss and share of errors that noise of `noise_std` still adds after 1, 2, ... rounds."""

    noise_std: float
    losses: tuple[float, ...]
    errors: tuple[float, ...]


def recovered_noise(rows: list[EvaluationRow]) -> RecoveredNoise | None:
    """Return the result of the latest rehearsed rounds, or None if there are none or noise added no loss after one."""
    by_round: dict[tuple[int, int], dict[float, EvaluationRow]] = {}
    for row in rows:
        if row.subset.startswith(RECOVERED):
            rounds, size = row.subset.removeprefix(RECOVERED).split(":")
            by_round.setdefault((row.node, int(rounds)), {})[float(size)] = row
    if not by_round:
        return None
    last = max(node for node, _ in by_round)
    pairs = [by_round[key] for key in sorted(by_round) if key[0] == last]
    (noise_std,) = {noise for pair in pairs for noise in pair if noise > 0.0}
    losses = tuple(pair[noise_std].loss - pair[0.0].loss for pair in pairs)
    errors = tuple(pair[0.0].accuracy - pair[noise_std].accuracy for pair in pairs)
    return RecoveredNoise(noise_std, losses, errors) if min(losses) > 0.0 else None
