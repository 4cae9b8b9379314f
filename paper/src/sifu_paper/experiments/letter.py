"""Experiments trained as the authors' code trains: with its networks, constants and schedule, clipped and not.

A training that ends at its limit of rounds below the target is reported, and no request is made on it.
"""

from __future__ import annotations

from dataclasses import replace

from sifu_paper.experiment import LETTER, Experiment
from sifu_paper.experiments import request_sets, sequential, sigma, time_limited, watermark

FEW = ("sifu", "scratch", "noisy_scratch")


def to_the_letter(experiment: Experiment, *methods: str, ours: bool = False) -> Experiment:
    """Return an experiment with the training of the authors' code."""
    presets = (*LETTER, *(f"{name}_ours" for name in LETTER if ours))
    title = f"{experiment.title}, to the letter"
    return replace(experiment, title=title, methods=methods or experiment.methods, presets=presets, only_reached=True)


EXPERIMENTS = {
    "letter": to_the_letter(sequential.EXPERIMENT, ours=True),
    "letter-watermark": to_the_letter(watermark.EXPERIMENT, *FEW, "fine_tuning"),
    "letter-time": to_the_letter(time_limited.EXPERIMENT, *FEW, "fine_tuning"),
    "letter-sigma": to_the_letter(sigma.EXPERIMENT),
    "letter-sets": to_the_letter(request_sets.EXPERIMENT, *FEW),
}
