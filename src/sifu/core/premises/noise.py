"""Where noise came from, and what decided its size."""

from __future__ import annotations

from sifu.core.premises.premise import Premise


def noise_premise(noise: str) -> Premise:
    """Whether nobody can draw the noise again; noise of an unknown source may be noise that somebody knows."""
    if noise == "system":
        statement = "The noise was drawn from the operating system's entropy and added in float64."
        return Premise("noise", "met", statement)
    if noise == "seeded":
        statement = "The noise came from a seeded generator, so whoever has the seed can remove it."
        return Premise("noise", "failed", statement)
    return Premise("noise", "failed", "Where the noise came from is not known.")


def chosen_noise_premise(chosen: bool) -> Premise:
    """Whether noise on a fresh model was sized by what the forgotten clients had done to another one."""
    if chosen:
        return Premise(
            "noise size",
            "assumed",
            "The size of the noise was chosen from the influence of the forgotten clients (sigma auto); what it "
            "reveals of them is assumed not to matter.",
        )
    return Premise(
        "noise size",
        "trusted",
        "The size of the noise was given; that it was not found from the data of the forgotten clients, as a plan with "
        "sigma auto finds it, is trusted.",
    )


def training_noise_size_premise(counted_rounds: int) -> Premise:
    """Without a client the average of a round would have noise of another size (docs/theory.md, section 10)."""
    if counted_rounds == 0:
        return Premise("training noise", "met", "The clients took part in no round, so no noise depends on them.")
    return Premise(
        "training noise",
        "failed",
        "The noise of an average depends on who took part: without the client it would have another size, which the "
        "models themselves show. What that tells is not bounded.",
    )
