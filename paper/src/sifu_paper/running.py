"""State of a federation between requests, and the loop of rounds until the target is reached."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from sifu.theory.rollback import level_ladder
from sifu_paper.draws import keyed
from sifu_paper.history import History
from sifu_paper.settings import Rules, Settings
from sifu_paper.training import Trainer, draw

AUTHORS_INTERVALS = ((0.005, 1), (0.01, 2), (0.025, 5), (0.05, 10), (math.inf, 20))
"""Rule in the authors' code: (largest distance to the target, rounds between evaluations)."""
LOWEST_SIGMA, HIGHEST_SIGMA, LADDER_RATIO = 1e-4, 20.0, 1.12
"""Sizes of noise for which models are kept where sigma is not known in advance."""


@dataclass
class Subject:
    """Forgotten client: the number of the request that asked for it, and the share of its budget that was used."""

    client: int
    request: int
    used: float = 0.0


@dataclass
class State:
    """A federation with its history, and everyone who was forgotten.

    Attributes:
        sigma: Size of the noise, or None where each request chooses it.
        requests: Number of requests so far.
        training_rounds: Rounds of the first training.
        errors: Share of errors at its end.
    """

    trainer: Trainer
    settings: Settings
    rules: Rules
    seed: int
    sigma: float | None
    history: History
    subjects: list[Subject] = field(default_factory=list)
    requests: int = 0
    training_rounds: int = 0
    errors: float = 0.0

    @property
    def multiplier(self) -> float:
        """Noise that hides a sensitivity of 1 within the budget."""
        return self.rules.multiplier(self.settings.epsilon, self.settings.delta)

    @property
    def forgotten(self) -> np.ndarray:
        """Forgotten clients."""
        return np.array(sorted(subject.client for subject in self.subjects), dtype=np.int64)

    @property
    def active(self) -> np.ndarray:
        """Clients that are not forgotten."""
        return np.setdiff1d(np.arange(len(self.trainer.federation.y)), self.forgotten)

    def copy(self) -> State:
        """Return a copy whose requests do not touch this one."""
        return replace(self, history=self.history.copy(), subjects=[replace(one) for one in self.subjects])

    def fresh(self) -> None:
        """Start from a new initial model, which no client has ever moved."""
        model = self.trainer.federation.network.initial(self.seed, self.requests)
        self.history = History.from_model(model, len(self.trainer.federation.y), self.history.levels)

    def noise(self) -> np.random.Generator:
        """Return the generator of the current request's noise, keyed by the seed so that results can be repeated."""
        return keyed(self.seed, "seeded noise", self.requests)


def initial_state(trainer: Trainer, settings: Settings, rules: Rules, seed: int, *, fine: bool = False) -> State:
    """Return the state before training; `fine` keeps models for any sigma of later requests."""
    multiplier = rules.multiplier(settings.epsilon, settings.delta)
    sigma = settings.sigma if rules.sigma == "table" else None
    if fine or sigma is None:
        levels = level_ladder(LOWEST_SIGMA, HIGHEST_SIGMA, LADDER_RATIO) / multiplier
    else:
        levels = np.array([sigma / multiplier])
    clients = len(trainer.federation.y)
    history = History.from_model(trainer.federation.network.initial(seed, 0), clients, levels)
    return State(trainer, settings, rules, seed, sigma, history)


def run_rounds(
    state: State, most: int, after_round: Callable[[State], None] = lambda state: None, kept_every: int = 0
) -> None:
    """Run rounds with the remaining clients until their accuracy reaches the target, and `most` rounds at most.

    Args:
        state: State to go on from.
        most: Largest number of rounds since the last request.
        after_round: Called after each round.
        kept_every: Interval at which the participants' updates are kept, or 0.
    """
    settings, history, active = state.settings, state.history, state.active
    samples = state.trainer.federation.samples
    while True:
        latest = None
        if history.rounds % interval(settings, history.accuracy) == 0 or history.rounds >= most:
            latest = history.accuracy = state.trainer.accuracy(history.model, active)
        after_round(state)
        enough = latest is not None and latest >= settings.target and history.rounds >= settings.min_rounds
        if enough or history.rounds >= most:
            return
        place = (state.requests, history.rounds)
        done = state.trainer.round(history.model, place, draw(settings, state.seed, place, active))
        history.add_round(done, samples, state.rules)
        if kept_every and history.rounds % kept_every == 0 and done.updates is not None:
            history.updates.append((done.participants, done.updates.astype(np.float32)))
        history.rounds += 1


def interval(settings: Settings, accuracy: float | None) -> int:
    """Return the number of rounds between evaluations, given the latest accuracy.

    >>> from sifu_paper.settings import settings_of
    >>> rule = settings_of("cifar10", "authors")
    >>> [interval(rule, accuracy) for accuracy in (None, 0.5, 0.86, 0.88, 0.892, 0.897, 0.95)]
    [20, 20, 10, 5, 2, 1, 1]
    """
    if settings.evaluate_every:
        return settings.evaluate_every
    missing = math.inf if accuracy is None else round(settings.target - accuracy, 12)
    return next(rounds for within, rounds in AUTHORS_INTERVALS if missing <= within)
