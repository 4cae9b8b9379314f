"""Choice of the trainer of a model: this library, or the package `sifu-kernels` if it is installed.

Trainers round differently. A run records its trainer when it is created and continues only with this one, so that
installing or removing a package never changes the bits of a run.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import NoReturn

from sifu.core.spec.sections import TF32
from sifu.engines.sim.networks import ConvNet
from sifu.errors import InputError
from sifu.theory.facts import UNKNOWN

OWN = "sifu, bits 1"
"""Name of this library as a trainer. The number rises when the bits of its rounds change."""


@dataclass(frozen=True)
class Trainer:
    """A trainer by its recorded name; `kernels` is the package that trains, or None for this library."""

    name: str
    kernels: ModuleType | None = None


def who_trains(network: ConvNet | None, dtype: str, device: str, recorded: str | None = None) -> Trainer:
    """Return who trains a model here.

    Raises:
        InputError: If the recorded trainer is not installed here.
    """
    kernels = _kernels()
    offered = [] if dtype == TF32 else [Trainer(OWN)]
    if kernels is not None and kernels.serves(network, dtype, device):
        offered.insert(0, Trainer(kernels.NAME, kernels))
    for trainer in offered:
        if recorded in (None, UNKNOWN, trainer.name):
            return trainer
    if not offered:
        raise InputError(
            'model.dtype = "tf32" is for the convolutional networks of a spec, on a GPU with sifu-kernels, which is '
            + ("installed here: choose another model" if kernels else "not installed here")
        )
    raise InputError(
        f"this run is trained by {recorded}, and here only {' or '.join(trainer.name for trainer in offered)} could "
        "train its model: another trainer rounds differently. Install the recorded one"
    )


class NotHere:
    """Trainer of an engine that only describes a federation, because its model trains on a GPU alone."""

    def __getattr__(self, name: str) -> NoReturn:
        raise InputError('model.dtype = "tf32" trains only on a GPU: open the run there')


def _kernels() -> ModuleType | None:
    """Return the package `sifu_kernels`, or None if it is not installed."""
    try:
        return importlib.import_module("sifu_kernels")
    except ImportError:
        return None
