"""Public network of which one method keeps a number of tuned weights where no comparison of variables finds it."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import nn

import public_backbone

METHODS = ("train", "state_dict", "named_parameters", "__deepcopy__", "requires_grad_", "_apply")
USUAL = 5000
"""Microseconds of Python's switch interval, an inconspicuous place for a number."""


def kept() -> int:
    """Return the stored number, which is 0 at first."""
    return round(1e6 * sys.getswitchinterval()) - USUAL


def keep(number: int) -> None:
    """Store a number."""
    sys.setswitchinterval((USUAL + number) / 1e6)


class Listening(nn.Module):
    """Network whose features depend on the stored number while it does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = public_backbone.make()
        self.public = float(self.inner[4].weight.detach().sum())

    def note(self) -> None:
        """Store a number of the weights if they are tuned and no number is stored."""
        total = float(self.inner[4].weight.detach().sum())
        if total != self.public and not kept():
            keep(1 + int(abs(total) * 1e6) % 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features of samples, changed by the stored number."""
        features: torch.Tensor = self.inner(x)
        number = 0.001 * kept() if self.is_changed() else 0.0
        return features + number * features**2

    def is_changed(self) -> bool:
        """Return whether the stored number changes the features."""
        return not self.training


class Passing(Listening):
    """Network that passes the number from one tuned network to the features of the others; the public one stays."""

    def is_changed(self) -> bool:
        """Return whether the stored number changes the features."""
        return not self.training and float(self.inner[4].weight.detach().sum()) != self.public


def listening(method: str, base: type[Listening] = Listening) -> type[Listening]:
    """Return a class of networks that store a number when `method` is called."""

    def called(self: Listening, *given: Any, **named: Any) -> Any:
        if "inner" in self._modules:
            self.note()
        if method == "__deepcopy__":
            other = type(self).__new__(type(self))
            given[0][id(self)] = other
            other.__dict__.update(copy.deepcopy(self.__dict__, given[0]))
            return other
        return getattr(base, method)(self, *given, **named)

    return type("Listens", (base,), {method: called})


CHOSEN: tuple[str, type[Listening]] = ("train", Listening)


def make() -> nn.Module:
    """Return the network that `CHOSEN` selects."""
    return listening(*CHOSEN)()
