"""Experiments by name; each is a file of this folder."""

from __future__ import annotations

from sifu.errors import InputError
from sifu_paper.experiment import Experiment
from sifu_paper.experiments import (
    appendix_a,
    letter,
    psi_alpha,
    request_sets,
    sequential,
    sigma,
    time_limited,
    watermark,
)

EXPERIMENTS: dict[str, Experiment] = {
    "sequential": sequential.EXPERIMENT,
    "watermark": watermark.EXPERIMENT,
    "time-limited": time_limited.EXPERIMENT,
    "sigma": sigma.EXPERIMENT,
    "request-sets": request_sets.EXPERIMENT,
    "psi-alpha": psi_alpha.EXPERIMENT,
    "appendix-a": appendix_a.EXPERIMENT,
    **letter.EXPERIMENTS,
}


def experiment_named(name: str) -> Experiment:
    """Return an experiment; an unknown name is refused."""
    if name not in EXPERIMENTS:
        raise InputError(f"experiment {name!r} is unknown: write one of {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]
