"""A linear head on frozen features: a `proven` certificate for an image task.

    python examples/frozen_features.py                    digits, 120 clients, some seconds
    python examples/frozen_features.py cifar10 FOLDER     CIFAR-10, 1,000 clients x 10, about a minute

On digits the features are random convolutions, made from a seed and from nobody's data. On CIFAR-10 they are those of a
small network trained on CIFAR-100, which stands for public data; put any pretrained torch module of yours in its place.
Only the head is trained, and that is softmax regression: convex, every premise measured.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import sifu
from sifu.data import (
    from_dataset,
    frozen_features,
    load,
    partition,
    random_convolutions,
    trained_convolutions,
)


def make_clients(name: str, count: int, samples: int, folder: str | None = None) -> Any:
    """Images of every client, turned into features once."""
    dataset = load(name, folder)
    parts = partition("iid", dataset.y_train, count, samples, np.random.default_rng(0))
    images = from_dataset(dataset, parts, flat=False, normalise="unit")
    if name == "digits":
        module = random_convolutions(images[0].x.shape[1], filters=16, patch=3)
    else:
        module = trained_convolutions(load("cifar100", folder))
    # With features of length 4 the bias, whose input is 1, does not slow the other parameters down.
    return frozen_features(images, module, norm=4.0)


def make_spec(target: float, steps: int = 20) -> dict[str, Any]:
    """Softmax regression on features; `fixed` is our declaration that no client's data shaped them."""
    return {
        "data": {"preprocessing": "fixed"},
        "model": {"kind": "softmax", "outputs": 10},
        "local": {"steps": steps},
        "stop": {"target": target, "max_rounds": 2000},
        "privacy": {"epsilon": 10.0, "delta": 0.01},
    }


def main(folder: Path, name: str = "digits", data_folder: str | None = None) -> sifu.Run:
    """Train the head, forget one client, verify."""
    if name == "digits":
        clients, spec = make_clients("digits", 120, 12), make_spec(0.93)
    else:
        clients, spec = make_clients(name, 1000, 10, data_folder), make_spec(0.43, steps=10)
    run = sifu.train(spec, run=folder, clients=clients)
    plan = run.plan(["client-003"])
    print(f"{plan.tip_rounds} rounds so far; would go back to {plan.source_rounds}, sigma {plan.noise_std:g}")
    (outcome,) = run.forget(["client-003"], level="proven", compare_scratch=True)
    print(f"forgotten in {outcome.rounds} rounds, Scratch takes {outcome.scratch_rounds}; level {outcome.level}")
    print("verified:", run.verify().holds)
    return run


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary) / "run", *sys.argv[1:3])
