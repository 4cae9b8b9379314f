"""A rehearsal at the end of training: what noise does to the loss of the model just trained.

Noise of a few sizes is added to a copy of the model, which is evaluated on the active clients and thrown away. Nothing
is trained and nothing is released; what is recorded is loss and accuracy, as of every other evaluation. A plan
reads from it how much loss and errors rise with sigma (`sifu.methods.forecast`) long after the data are gone.

Each noise is used with both signs and all of one size are averaged: so the slope of the loss along it cancels, and what
is left is sigma^2 tr(H)/2 and the higher even orders. A few of them, since one noise does up to twice the harm of
another of its size: most where requests that pay lie.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice

import numpy as np

from sifu.core.engine import Engine, evaluate_each
from sifu.core.layout import Vector
from sifu.core.participation import ClientIndices
from sifu.core.randomness import keyed_generator
from sifu.store.reader import EvaluationRow

REHEARSED = "noise:"
"""Evaluations of noised copies have this subset, followed by sigma."""
RATIOS = {0.25: 4, 0.75: 3, 2.0: 1}
"""Noise against the way gone, sigma sqrt(d) / ||theta - theta_0||, and how many of that size are drawn."""


def rehearse(
    engine: Engine, model: Vector, distance: float, node: int, active: ClientIndices, seed: int
) -> list[EvaluationRow]:
    """Evaluations of noised copies of `model`, which has gone `distance` from the initial one."""
    if distance <= 0.0 or active.size == 0:
        return []
    sigmas = {ratio * distance / math.sqrt(model.size): draws for ratio, draws in RATIOS.items()}
    copies = _noised_copies(model, sigmas, keyed_generator(seed, "rehearsal"))
    evaluations = iter(evaluate_each(engine, copies, active))
    rows = []
    for sigma, draws in sigmas.items():
        found = list(islice(evaluations, 2 * draws))
        if not found[0].samples.any() or any(not np.array_equal(one.samples, found[0].samples) for one in found):
            continue  # on other machines: the slope cancels only on the same samples
        loss = float(np.mean([one.loss for one in found]))
        accuracy = float(np.mean([one.accuracy for one in found]))
        if math.isfinite(loss):
            rows.append(EvaluationRow(node, f"{REHEARSED}{sigma!r}", int(found[0].samples.sum()), accuracy, loss))
    return rows


def _noised_copies(model: Vector, sigmas: Mapping[float, int], generator: np.random.Generator) -> Iterator[Vector]:
    """Of each size so many draws, each with both signs."""
    for sigma, draws in sigmas.items():
        for _ in range(draws):
            noise = sigma * generator.standard_normal(model.size)
            for sign in (1.0, -1.0):
                yield (model + sign * noise).astype(model.dtype)


def rehearsed_noises(rows: list[EvaluationRow]) -> dict[int, list[tuple[float, EvaluationRow]]]:
    """(sigma, evaluation) of every rehearsal, by node."""
    found: dict[int, list[tuple[float, EvaluationRow]]] = {}
    for row in rows:
        if row.subset.startswith(REHEARSED):
            found.setdefault(row.node, []).append((float(row.subset.removeprefix(REHEARSED)), row))
    return found
