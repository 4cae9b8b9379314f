"""Bit-exact digests of a few rounds on the embedded engine and Flower: they show that a refactoring changed no number.

    python tests/house/digests.py            compares this machine with digests.json
    python tests/house/digests.py --record   writes the digests of this machine into it

Floating point depends on the hardware and on the libraries, so digests are kept for each `machine_key`. Record a new
machine at a commit that is known to be good; record a known machine again only after an intended change of numbers, and
say so in the commit.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "engines/flower"))
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # must be set before anything imports triton

import numpy as np
import torch

import sifu
from machine import machine_key, one_thread
from sifu.core.engine import Position
from sifu.engines.sim import ConvNet, Convolution, ModuleModel
from sifu.run.clients_and_engine import engine_from_spec

RECORDED = Path(__file__).resolve().with_name("digests.json")
ROUNDS = 4

Digest = dict[str, str]
"""SHA-256 digests of the last model's bytes and of the scalars of every round."""


@dataclass(frozen=True)
class RandomClient:
    """Client with random data."""

    name: str
    x: np.ndarray
    y: np.ndarray


def random_clients(kind: str, shape: tuple[int, ...], count: int = 6, samples: int = 9) -> tuple[RandomClient, ...]:
    """Return clients of unequal sizes, with labels of three classes or two, or real targets."""
    generator = np.random.default_rng(11)
    clients = []
    for number in range(count):
        size = samples - number % 3
        x = generator.standard_normal((size, *shape))
        y = {
            "softmax": generator.integers(0, 3, size),
            "logistic": generator.integers(0, 2, size),
            "least_squares": generator.standard_normal(size),
        }[kind]
        clients.append(RandomClient(f"client-{number}", x, y))
    return tuple(clients)


class Hasher:
    """Hasher of the exact bytes of numbers."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, *values: Any) -> None:
        """Add integers as int64 and everything else as float64, preceded by their number."""
        for value in values:
            array = np.asarray(value)
            array = array.astype("<i8" if array.dtype.kind in "iub" else "<f8")
            self._hash.update(f"{array.dtype.str}{array.shape}".encode())
            self._hash.update(array.tobytes())

    def hex(self) -> str:
        """Return the digest of everything added so far, as 64 hexadecimal digits."""
        return self._hash.hexdigest()


def digest_of_rounds(engine: Any, rounds: int = ROUNDS) -> Digest:
    """Return digests of a few rounds of two branches; a client leaves before the second branch."""
    scalars, models = Hasher(), Hasher()
    everyone = np.arange(len(engine.clients))
    for branch, active in enumerate((everyone, everyone[1:])):
        model = engine.initial_model(branch)
        for number in range(rounds):
            result = engine.run_round(model, Position(branch, number), active)
            model = result.model
            scalars.add(result.participants, result.samples, result.drifts, result.mean_shift, result.rounding)
        evaluation = engine.evaluate(model, active)
        scalars.add(evaluation.samples, evaluation.correct, evaluation.loss_sum)
        models.add(model)
    return {"model": models.hex(), "scalars": scalars.hex()}


def embedded(
    kind: str = "softmax", shape: tuple[int, ...] = (7,), own: Any = None, **sections: dict[str, Any]
) -> Callable[[], Digest]:
    """Return a case of the embedded engine; `own` makes a user's module, otherwise the spec names the model."""

    def case() -> Digest:
        return digest_of_rounds(_engine(kind, shape, own, sections)[0])

    return case


def _engine(kind: str, shape: tuple[int, ...], own: Any, sections: dict[str, Any]) -> tuple[Any, Any]:
    clients = random_clients(kind, shape)
    mapping = {"seed": 5, **sections, "model": {"kind": kind} | sections.get("model", {})}
    model = None if own is None else ModuleModel(own)
    return engine_from_spec(sifu.Spec.from_mapping(mapping), clients, model)[0], clients


def _own_module() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(5, 3))


NETWORK = ConvNet((2, 6, 6), (Convolution(3, 1), Convolution(4, 1, pool=False)), (5,), 3, dropout=0.2)
BATCHES = {"rate": 0.05, "steps": 4, "batch": 4, "momentum": 0.9}


def flower(*, masked: bool, **sections: dict[str, Any]) -> Callable[[], Digest]:
    """Return a case of the Flower engine over a grid in memory."""

    def case() -> Digest:
        from flower_federation import both_engines, small_spec

        _, engine, _ = both_engines(small_spec(**sections), masked=masked)
        return digest_of_rounds(engine)

    return case


CASES: dict[str, Callable[[], Digest]] = {
    "loop: a module of the user's own": embedded(own=_own_module, local=BATCHES),
    "loop: mlp in float32, sampled": embedded(
        model={"kind": "mlp", "dtype": "float32"}, local=BATCHES, server={"participation": "fixed(4)"}
    ),
    "linear: softmax, whole batches": embedded(local={"rate": "auto", "steps": 5}),
    "linear: softmax, momentum and mini-batches, Poisson": embedded(
        local=BATCHES | {"weight_decay": 0.1}, server={"participation": "poisson(0.6)"}
    ),
    "linear: softmax, wide, float32": embedded(
        shape=(40,), model={"dtype": "float32", "init": "random"}, local=BATCHES
    ),
    "linear: logistic, sampled": embedded("logistic", local=BATCHES, server={"participation": "fixed(3)"}),
    "linear: least squares": embedded("least_squares", local={"rate": "auto", "steps": 4, "momentum": 0.5}),
    "linear: every reply looked at": embedded(local=BATCHES, server={"update_bound": 100.0, "rejected": "reply"}),
    "convolutions: float32, mini-batches, dropout": embedded(
        shape=(2, 6, 6),
        own=NETWORK,
        model={"dtype": "float32"},
        local=BATCHES,
        server={"participation": "poisson(0.6)"},
    ),
    "convolutions: float64, whole batches": embedded(
        shape=(2, 6, 6), own=NETWORK, local={"rate": 0.05, "steps": 3, "weight_decay": 0.01}
    ),
    "flower: softmax": flower(masked=False),
    "flower: mini-batches, Poisson": flower(masked=False, server={"participation": "poisson(0.7)"}, local={"batch": 5}),
    "flower: masked": flower(masked=True),
    "flower: masked network in float32": flower(
        masked=True, model={"kind": "mlp", "outputs": 10, "dtype": "float32"}, local={"rate": 0.1, "batch": 4}
    ),
}


def missing(name: str) -> str:
    """Return why a case cannot run here; empty if it can."""
    if name.startswith("flower") and importlib.util.find_spec("flwr") is None:
        return "Flower is not installed: make test-flower installs it"
    if name.startswith("convolutions") and importlib.util.find_spec("sifu_kernels") is not None:
        return "sifu-kernels trains convolutions here, with other bits"
    return ""


def digest(name: str) -> Digest:
    """Return the digests of a case on this machine."""
    with one_thread():
        return CASES[name]()


def recorded() -> dict[str, dict[str, Digest]]:
    """Return the content of digests.json: machine, case, digests."""
    content: dict[str, dict[str, Digest]] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    return content


def main(arguments: Sequence[str]) -> int:
    """Compare the digests of this machine, or record them."""
    everything = recorded()
    key = machine_key()
    here = {name: digest(name) for name in CASES if not missing(name)}
    if "--record" in arguments:
        kept = {name: old for name, old in everything.get(key, {}).items() if name in CASES}
        everything[key] = dict(sorted((kept | here).items()))
        RECORDED.write_text(json.dumps(dict(sorted(everything.items())), indent=1) + "\n")
        print(f"recorded {len(here)} cases for {key}")
        return 0
    recorded_here = everything.get(key)
    if recorded_here is None:
        print(f"no digests of this machine ({key}); record them with --record at a commit that is known to be good")
        return 1
    different = [name for name, digest in here.items() if recorded_here.get(name) != digest]
    print("\n".join(f"{'different' if name in different else 'same':<10}{name}" for name in here))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
