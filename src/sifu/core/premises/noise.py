"""Where noise came from, and what decided its size."""

from __future__ import annotations

from sifu.core.premises.premise import Premise


def noise_premise(noise: str) -> Premise:
    """Whether nobody can draw the noise again; noise of an unknown source may be noise that somebody knows."""
    if noise == "system":
        return Premise("noise", "met")
    return Premise("noise", "failed", "seeded" if noise == "seeded" else "")


def chosen_noise_premise(chosen: bool) -> Premise:
    """Whether noise on a fresh model was sized by what the forgotten clients had done to another one."""
    return Premise("noise size", "assumed" if chosen else "trusted")


def training_noise_size_premise(counted_rounds: int) -> Premise:
    """Without a client the average of a round would have noise of another size (docs/theory.md, section 10)."""
    return Premise("training noise", "met" if counted_rounds == 0 else "failed")
