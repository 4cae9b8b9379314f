"""Networks with state outside their parameters, for tests of leaks between clients.

`Stateful` combines three choices: where its state is, when it changes, and its effect. `make` is the function that a
spec refers to; it builds the network that `CHOSEN` names.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Kind:
    """Kind of stateful network: `place` of its state, `moment` of change, `effect`, and the number of changes before it
    acts.
    """

    place: str
    moment: str
    effect: str
    after: int = 0
    file: str = ""


CHOSEN = Kind("nowhere", "forward", "scale")
PLACES = ("nowhere", "attribute", "closure", "class", "global", "file")
MOMENTS = ("forward", "training", "gradients on", "backward")
EFFECTS = ("scale", "gradient", "unfreeze", "bank")
BANK: list[float] = []
"""State of kind "global"."""


def remembers(on: bool) -> bool:
    """Return whether the state of kind "global" was ever set; set it if `on`. For networks in other files."""
    BANK.extend([1.0] * on)
    return bool(BANK)


class Bank:
    """State of kind "class"."""

    held: ClassVar[list[float]] = []


def _closure() -> tuple[Callable[[float], None], Callable[[], list[float]]]:
    held: list[float] = []

    def put(value: float) -> None:
        nonlocal held
        held = [*held, value]

    return put, lambda: held


class Stateful(nn.Module):
    """Network with twelve features of an 8 x 8 image that depend on earlier inputs."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(64, 16), nn.Linear(16, 12)
        self.kind, self.own = kind, []
        self.put, self.get = _closure()

    def note(self, value: float) -> None:
        """Store a number in the state."""
        kind = self.kind
        if kind.place == "attribute":
            self.own.append(value)
        elif kind.place == "closure":
            self.put(value)
        elif kind.place == "class":
            Bank.held.append(value)
        elif kind.place == "global":
            BANK.append(value)
        elif kind.place == "file":
            with Path(kind.file).open("a") as file:
                file.write(f"{value!r}\n")

    def noted(self) -> list[float]:
        """Return the content of the state."""
        kind = self.kind
        if kind.place == "file":
            path = Path(kind.file)
            return [float(line) for line in path.read_text().split()] if path.exists() else []
        held = {"attribute": self.own, "closure": self.get(), "class": Bank.held, "global": BANK}
        return held.get(kind.place, [])

    def forward(self, x: Tensor) -> Tensor:
        """Return features, modified by the state."""
        kind, rows = self.kind, x.flatten(1)
        now = {
            "forward": True,
            "training": self.training,
            "gradients on": torch.is_grad_enabled(),
            "backward": False,
        }[kind.moment]
        held = self.noted()
        acts = len(held) > kind.after
        hidden = torch.tanh(self.first(rows))
        if kind.effect == "unfreeze" and not acts:
            hidden = hidden.detach()
        if now:
            self.note(float(rows.detach().mean()))
        if hidden.requires_grad and (kind.moment == "backward" or kind.effect == "gradient"):
            hidden.register_hook(lambda gradient: self.changed(gradient, held if acts else []))
        features = torch.tanh(self.second(hidden))
        if kind.effect == "scale" and acts and self.training:
            features = features * (1.0 + 0.1 * np.tanh(sum(held)))
        if kind.effect == "bank" and acts and self.training:
            features = features + 0.01 * float(np.mean(held[-8:]))
        return features

    def changed(self, gradient: Tensor, held: list[float]) -> Tensor:
        """Return the gradient, divided by the largest one seen if the state acts on gradients."""
        if self.kind.moment == "backward":
            self.note(float(gradient.abs().max()))
        if self.kind.effect == "gradient" and held:
            gradient = gradient / (1.0 + max(held))
        return gradient


class Remembers(torch.autograd.Function):
    """Autograd function whose gradient is divided by the largest one it ever saw."""

    largest = 0.0

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        """Return the input unchanged."""
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        """Return the gradient divided by the largest."""
        Remembers.largest = max(Remembers.largest, float(gradient.abs().max()))
        return gradient / (1.0 + 1000.0 * Remembers.largest)


class WithFunction(nn.Module):
    """Network with an autograd function that has memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(64, 16), nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features."""
        hidden: Tensor = Remembers.apply(torch.tanh(self.first(x.flatten(1))))
        return torch.tanh(self.second(hidden))


class WithHook(nn.Module):
    """Network with a hook that divides gradients by their running maximum, kept in the hook's closure."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(64, 16), nn.Linear(16, 12)
        largest = 0.0

        def hook(module: nn.Module, into: Any, out: Any) -> tuple[Tensor]:
            nonlocal largest
            largest = max(largest, float(out[0].abs().max()))
            return (into[0] / (1.0 + 1000.0 * largest),)

        self.second.register_full_backward_hook(hook)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features."""
        return torch.tanh(self.second(torch.tanh(self.first(x.flatten(1)))))


class Draws(nn.Module):
    """Network that draws from a generator outside torch: noise on gradients, or a mixture of samples."""

    def __init__(self, what: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second, self.what = nn.Linear(64, 16), nn.Linear(16, 12), what

    def forward(self, x: Tensor) -> Tensor:
        """Return the features."""
        rows = x.flatten(1)
        if self.training and self.what == "mixup":
            share = float(np.random.beta(0.4, 0.4))  # noqa: NPY002
            rows = share * rows + (1.0 - share) * rows[np.random.permutation(len(rows))]  # noqa: NPY002
        if self.training and self.what == "python":
            rows = rows * random.uniform(0.5, 1.5)
        if self.training and self.what == "entropy":
            rows = rows * float(np.random.default_rng().uniform(0.5, 1.5))
        hidden = torch.tanh(self.first(rows))
        if hidden.requires_grad and self.what == "noise":
            hidden.register_hook(lambda g: g + torch.tensor(np.random.normal(size=g.shape)).to(g))  # noqa: NPY002
        return torch.tanh(self.second(hidden))


CLASSES: dict[str, Callable[[], nn.Module]] = {
    "function": WithFunction,
    "hook": WithHook,
    "noise": lambda: Draws("noise"),
    "mixup": lambda: Draws("mixup"),
    "python": lambda: Draws("python"),
    "entropy": lambda: Draws("entropy"),
}


def make() -> nn.Module:
    """Return the chosen network."""
    named = CLASSES.get(CHOSEN.place)
    return named() if named else Stateful(CHOSEN)


def choose(kind: Kind) -> None:
    """Make `make` build this kind from now on, with an empty state."""
    global CHOSEN
    CHOSEN = kind
    BANK.clear()
    Bank.held.clear()
    Remembers.largest = 0.0


def drawn_kind(seed: int, folder: Path) -> Kind:
    """Return a random kind of stateful network for a seed."""
    draw = random.Random(seed)
    place = draw.choice(PLACES[1:])
    return Kind(place, draw.choice(MOMENTS), draw.choice(EFFECTS), draw.choice((0, 0, 1, 5, 20)), str(folder / "state"))
