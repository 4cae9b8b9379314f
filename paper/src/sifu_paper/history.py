"""Way that led to the current model: Psi of every client after every round, the models that were kept, and the noise.

Psi(n, c) bounds how far client c has moved the model by round n (the paper's theorem 1), with the paper's B = 1 for a
round's expansion. A model is kept when the next round makes some client's Psi cross a level, so that a request finds
the latest model at which its noise suffices.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import numpy as np

from sifu.theory.rollback import crosses_a_level, thin
from sifu_paper.settings import Rules
from sifu_paper.training import Round

MOST_MODELS = 110


@dataclass
class History:
    """Path from an initial model to the current one.

    The depth of a model is the number of steps that led to it; a step is a round or added noise.

    Attributes:
        psi: Psi of every client at each depth.
        kept: Models by depth.
        levels: Levels of Psi; the latest model below each of them is kept for every client.
        covers: Pairs (depth, request): from this depth on, noise of this request hides whoever asked by then.
        noises: Pairs (depth, sigma) of all noise on the path.
        updates: Participants and updates of the rounds that are kept for FedEraser and FedAccum.
        rounds: Rounds since the last request.
        accuracy: Accuracy at the latest evaluation since then.
    """

    model: np.ndarray
    psi: list[np.ndarray]
    levels: np.ndarray
    kept: dict[int, np.ndarray] = field(default_factory=dict)
    covers: list[tuple[int, int]] = field(default_factory=list)
    noises: list[tuple[int, float]] = field(default_factory=list)
    updates: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    rounds: int = 0
    accuracy: float | None = None

    @classmethod
    def from_model(cls, model: np.ndarray, clients: int, levels: np.ndarray) -> History:
        """Return the history of an initial model."""
        return cls(model, [np.zeros(clients)], levels, {0: model})

    @property
    def depth(self) -> int:
        """Depth of the current model."""
        return len(self.psi) - 1

    def rounds_until(self, depth: int) -> int:
        """Return the number of rounds on the path to a depth."""
        return depth - sum(here <= depth for here, _ in self.noises)

    def model_at(self, depth: int) -> np.ndarray:
        """Return a kept model, or the current one."""
        return self.model if depth == self.depth else self.kept[depth]

    def candidates(self) -> list[int]:
        """Return the depths whose models are there, latest first."""
        return sorted({*self.kept, self.depth}, reverse=True)

    def copy(self) -> History:
        """Return a copy that grows separately."""
        result = copy.copy(self)
        for name in ("psi", "kept", "covers", "noises", "updates"):
            setattr(result, name, copy.copy(getattr(self, name)))
        return result

    def add_round(self, done: Round, samples: np.ndarray, rules: Rules) -> None:
        """Go on to a round's model; keep the one before if somebody's Psi crosses a level.

        Args:
            done: Result of the round.
            samples: Number of samples of every client of the federation.
            rules: Weights of the increments.
        """
        before, after = self.psi[-1], self.psi[-1].copy()
        shift = float(np.linalg.norm(done.model - self.model.astype(np.float64)))
        after[done.participants] += increments(done, samples, rules, shift)
        if crosses_a_level(self.levels, before[done.participants], after[done.participants]):
            self.kept[self.depth] = self.model
            for depth in thin(list(self.kept), {0}, MOST_MODELS):
                del self.kept[depth]
        self.psi.append(after)
        self.model = done.model

    def roll_back(self, depth: int) -> None:
        """Make the model at this depth the current one, and cut everything after it."""
        self.model = self.model_at(depth)
        del self.psi[depth + 1 :]
        self.kept = {here: model for here, model in self.kept.items() if here <= depth}
        self.covers = [(here, request) for here, request in self.covers if here <= depth]
        self.noises = [(here, sigma) for here, sigma in self.noises if here <= depth]

    def add_noise(self, sigma: float, generator: np.random.Generator, request: int) -> None:
        """Add Gaussian noise to the current model; from here on it hides whoever asked up to this request."""
        noise = sigma * generator.standard_normal(self.model.size)
        self.model = (self.model + noise).astype(np.float32)
        self.psi.append(self.psi[-1])
        self.covers.append((self.depth, request))
        self.noises.append((self.depth, sigma))


def increments(done: Round, samples: np.ndarray, rules: Rules, shift: float) -> np.ndarray:
    """Return what a round adds to the Psi of each participant: n_c / (N - n_c) drift_c (eq. 13 of the paper).

    N counts the participants' samples, or all clients' under accounting `population`. If a participant is alone,
    without it the model would not have moved: then it is the whole `shift` of the model.
    """
    own = samples[done.participants]
    everyone = samples if rules.accounting == "population" else own
    rest = everyone.sum() - own
    return np.asarray(np.where(rest > 0, own / np.maximum(rest, 1) * done.drifts, shift))
