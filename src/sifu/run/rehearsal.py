"""A rehearsal at the end of training: what noise does to the model just trained, and how fast rounds heal it.

Noise of a few sizes is added to copies of the model, which are evaluated on the active clients and thrown away. Two
more copies, and the model itself, go through two rounds first: what is left of the noise after each. Nothing is
released; what is recorded is loss and accuracy, as of every other evaluation. A plan reads from it how much loss and
errors rise with sigma and how they fall again (`sifu.planning.forecast`) long after the data are gone.

Each noise is used with both signs and all of one size are averaged: so the slope of the loss along it cancels, and what
is left is sigma^2 tr(H)/2 and the higher even orders. A few of them, since one noise does up to twice the harm of
another of its size: most where requests that pay lie. Of the rounds one pair is enough. What differs from noise to
noise are the few directions of large curvature, and a round heals those; what it leaves is a sum over very many.

The rounds cost at most a quarter of the training. They are left out where rounds are paid for (noise in training), and
where clients do not take part in all of them alike.
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
"""Evaluations of noised copies have this subset, followed by sigma."""
HEALED = "healing:"
"""Those after rounds have this one, followed by the rounds, a colon, and sigma: 0.0 for the model without noise."""
RATIOS = {0.25: 4, 0.75: 3, 2.0: 1}
"""Noise against the distance travelled, sigma sqrt(d) / ||theta - theta_0||, and how many of that size are drawn."""
HEALED_RATIO = 0.75
"""The size of the noise that goes through rounds."""
MOST_ROUNDS, LEAST_TRAINING = 2, 12
"""At most two rounds are rehearsed, one per twelve rounds of training: a rehearsed round costs three."""


def rehearse(
    engine: Engine, model: Vector, distance: float, node: int, active: ClientIndices, seed: int, position: Position
) -> list[EvaluationRow]:
    """Evaluations of noised copies of `model`, which has gone `distance` from the initial one and is at `position`."""
    if distance <= 0.0 or active.size == 0 or (isinstance(engine, MayNotEvaluate) and not engine.evaluates):
        return []
    sizes = {ratio * distance / math.sqrt(model.size): draws for ratio, draws in RATIOS.items()}
    healed_size = HEALED_RATIO * distance / math.sqrt(model.size)
    healed = _healed_copies(engine, model, healed_size, position, active, seed)
    noised = _noised_copies(model, sizes, keyed_generator(seed, "rehearsal"))
    models = chain(noised, (copy for copies in healed.values() for copy in copies))
    results = iter(evaluate_each(engine, models, active))
    rows = [
        _averaged(node, f"{REHEARSED}{noise_std!r}", list(islice(results, 2 * draws)))
        for noise_std, draws in sizes.items()
    ]
    after = [_averaged(node, subset, list(islice(results, len(copies)))) for subset, copies in healed.items()]
    if None in after or len({row.samples for row in after if row}) > 1:
        after = []  # a share that healed is told by all of them together
    return [row for row in rows + after if row is not None]


def _averaged(node: int, subset: str, evaluations: Sequence[Evaluation]) -> EvaluationRow | None:
    """The mean of evaluations on the same samples, else None: on others the slope would not cancel."""
    samples = evaluations[0].samples
    if not samples.any() or any(not np.array_equal(evaluation.samples, samples) for evaluation in evaluations):
        return None
    loss = float(np.mean([evaluation.loss for evaluation in evaluations]))
    accuracy = float(np.mean([evaluation.accuracy for evaluation in evaluations]))
    return EvaluationRow(node, subset, int(samples.sum()), accuracy, loss) if math.isfinite(loss) else None


def _noised_copies(model: Vector, sizes: Mapping[float, int], generator: np.random.Generator) -> Iterator[Vector]:
    """The given number of draws of each size, each with both signs."""
    for noise_std, draws in sizes.items():
        for _ in range(draws):
            noise = noise_std * generator.standard_normal(model.size)
            for sign in (1.0, -1.0):
                yield (model + sign * noise).astype(model.dtype)


def _healed_copies(
    engine: Engine, model: Vector, noise_std: float, position: Position, active: ClientIndices, seed: int
) -> dict[str, list[Vector]]:
    """The model, and copies with a noise and with its opposite, after each of a few rounds; by the subset they get."""
    wanted = min(MOST_ROUNDS, position.round // LEAST_TRAINING)
    if wanted == 0 or engine.facts.noise > 0.0:
        return {}
    noise = noise_std * keyed_generator(seed, "rehearsed rounds").standard_normal(model.size)
    copies = [model, (model + noise).astype(model.dtype), (model - noise).astype(model.dtype)]
    healed: dict[str, list[Vector]] = {}
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
        healed[f"{HEALED}{rounds}:{0.0!r}"], healed[f"{HEALED}{rounds}:{noise_std!r}"] = copies[:1], copies[1:]
    return healed


def rehearsed_noises(rows: list[EvaluationRow]) -> dict[int, list[tuple[float, EvaluationRow]]]:
    """(sigma, evaluation) of every rehearsal, by node."""
    by_node: dict[int, list[tuple[float, EvaluationRow]]] = {}
    for row in rows:
        if row.subset.startswith(REHEARSED):
            by_node.setdefault(row.node, []).append((float(row.subset.removeprefix(REHEARSED)), row))
    return by_node


@dataclass(frozen=True)
class HealedNoise:
    """What noise of `noise_std` still adds to the loss and to the share of errors after 1, 2, ... rounds."""

    noise_std: float
    losses: tuple[float, ...]
    errors: tuple[float, ...]


def healed_noise(rows: list[EvaluationRow]) -> HealedNoise | None:
    """What the rehearsed rounds of a run say; None where there are none, or where noise did no harm that lasted."""
    by_round: dict[tuple[int, int], dict[float, EvaluationRow]] = {}
    for row in rows:
        if row.subset.startswith(HEALED):
            rounds, size = row.subset.removeprefix(HEALED).split(":")
            by_round.setdefault((row.node, int(rounds)), {})[float(size)] = row
    if not by_round:
        return None
    last = max(node for node, _ in by_round)
    pairs = [by_round[key] for key in sorted(by_round) if key[0] == last]
    (noise_std,) = {noise for pair in pairs for noise in pair if noise > 0.0}
    losses = tuple(pair[noise_std].loss - pair[0.0].loss for pair in pairs)
    errors = tuple(pair[0.0].accuracy - pair[noise_std].accuracy for pair in pairs)
    return HealedNoise(noise_std, losses, errors) if min(losses) > 0.0 else None
