"""Psi, with B = 1, against alpha, the true distance between training with a client and without it.

Both trainings start from the same model and make the same draws; the second leaves the client out after each draw, so
its slot is not refilled.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from sifu_paper.draws import keyed
from sifu_paper.experiment import Experiment, Options, variant_text
from sifu_paper.federation import federation_of
from sifu_paper.figures import draw_bound
from sifu_paper.history import increments
from sifu_paper.settings import OURS, PAPERS, Settings, settings_of
from sifu_paper.table import Row, Table
from sifu_paper.training import DivergedError, Trainer, draw, trainer_for

ROUNDS, CLIENTS, EVERY = 40, 2, 5
"""Rounds of training, clients that are removed, one at a time, and rounds between measurements."""


def run_distances(
    experiment: Experiment, options: Options, dataset: str, seed: int, table: Table, say: Callable[[str], None]
) -> None:
    """Measure every setting of the grid, from the paper's hyper-parameters to ones that do not converge."""
    rounds = min(options.max_rounds or ROUNDS, 2 * EVERY if options.scale == "smoke" else ROUNDS)
    for variant in experiment.variants(options):
        place = {"dataset": dataset, "seed": seed, "preset": "paper", "method": "", "variant": variant_text(variant)}
        if table.has(place | {"number": rounds // EVERY * CLIENTS}):
            continue
        base = settings_of(dataset, "table", options.scale)
        settings = replace(
            base,
            rate=base.rate * variant["rate_factor"],
            momentum=variant["momentum"],
            steps=int(variant["steps"]),
        )
        federation = federation_of(base, seed, options.data)
        trainer = trainer_for(federation, settings, seed, options.device)
        chosen = np.sort(keyed(seed, "taken out").choice(len(federation.y), size=CLIENTS, replace=False))
        started = time.monotonic()
        for number, row in enumerate(_rows(trainer, settings, seed, chosen, rounds), start=1):
            table.add(place | {"number": number} | row | {"seconds": round(time.monotonic() - started, 3)})
        say(f"{dataset}, seed {seed}, {place['variant']}: measured")


def _rows(trainer: Trainer, settings: Settings, seed: int, chosen: np.ndarray, rounds: int) -> Iterator[Row]:
    """Yield a row for each client every few rounds; a training that diverged has empty rows from there on."""
    names = ("client", "rounds", "distance", "psi_round", "psi_population", "accuracy")
    measured = measure_distances(trainer, settings, seed, chosen, rounds)
    for number in range(EVERY, rounds + 1, EVERY):
        try:
            model, distances, bounds = next(itertools.islice(measured, EVERY - 1, None))
        except (DivergedError, StopIteration):
            measured = iter(())
            yield from (dict.fromkeys(names) | {"client": int(client), "rounds": number} for client in chosen)
            continue
        accuracy = trainer.accuracy(model, np.arange(len(trainer.federation.y)))
        for place, client in enumerate(chosen):
            values = (int(client), number, distances[place], *(psi[client] for psi in bounds), accuracy)
            yield dict(zip(names, values, strict=True))


def measure_distances(
    trainer: Trainer, settings: Settings, seed: int, chosen: Iterable[int], rounds: int
) -> Iterator[tuple[np.ndarray, list[float], list[np.ndarray]]]:
    """Yield after each round the model, the true distance for each chosen client, and Psi of everyone twice.

    The first Psi is by the weights of the round, the second by the population's, as in the authors' code.
    """
    federation = trainer.federation
    model = federation.network.initial(seed, 0)
    without = {int(client): model for client in chosen}
    bounds = [np.zeros(len(federation.y)) for _ in range(2)]
    for number in range(rounds):
        place = (0, number)
        drawn = draw(settings, seed, place, np.arange(len(federation.y)))
        done = trainer.round(model, place, drawn)
        for client, other in without.items():
            rest = np.setdiff1d(drawn, [client])
            without[client] = trainer.round(other, place, rest).model if rest.size else other
        shift = float(np.linalg.norm(done.model - model.astype(np.float64)))
        for psi, rules in zip(bounds, (OURS, PAPERS), strict=True):
            psi[drawn] += increments(done, federation.samples, rules, shift)
        model = done.model
        distances = [float(np.linalg.norm(model - other.astype(np.float64))) for other in without.values()]
        yield model, distances, [psi.copy() for psi in bounds]


EXPERIMENT = Experiment(
    title="The bound against the truth",
    question="The noise is sized by Psi, a bound on how far a client moved the model. Is it, with B = 1, above alpha, "
    "the true distance between training with a client and without it?",
    paper_figure="appendix, figure on Psi and alpha",
    run=run_distances,
    draw=draw_bound,
    methods=(),
    grid={"rate_factor": (0.2, 1.0, 5.0), "momentum": (0.0, 0.9), "steps": (1, 5, 20)},
)
