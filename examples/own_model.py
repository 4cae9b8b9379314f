"""Forgetting a client of your own federation: your torch module, your data, and a certificate.

    python examples/own_model.py

A convolutional network is not convex, so nothing proves how far a local step can separate two models. The paper assumes
B = 1; sifu lets you assume it too, and every certificate then has the level `conditional`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from torch import nn

import sifu
from sifu.data import load


def make_network() -> nn.Module:
    """Return a small CNN for 8x8 images."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 10),
    )


def make_clients(count: int = 20) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return your clients: names and their arrays (or a torch Dataset each)."""
    digits = load("digits")
    images, labels = digits.features(flat=False), digits.y_train
    order = np.random.default_rng(0).permutation(len(labels))[: count * 40]
    parts = np.split(order, count)
    return {f"hospital-{k:02d}": (images[part], labels[part]) for k, part in enumerate(parts)}


SPEC = {
    "data": {"preprocessing": "fixed"},  # a declaration: nothing below was computed from the clients' data
    "local": {"rate": 0.1, "steps": 5},
    "stop": {"target": 0.8, "max_rounds": 60, "evaluate_every": 2},
    "regularity": {"kind": "assumed", "factor": 1.0},
    "privacy": {"epsilon": 10.0, "delta": 0.01, "sigma": 0.05},
}


def main(folder: Path) -> sifu.Run:
    """Train, print the plan, forget one client, verify; return the run."""
    run = sifu.train(SPEC, run=folder, model=make_network, clients=make_clients())

    plan = run.plan(["hospital-03"])
    print(f"would go back to round {plan.source_rounds} of {plan.tip_rounds}, sigma {plan.noise_std:g}: {plan.level}")

    (outcome,) = run.forget(["hospital-03"])
    print(f"forgotten in {outcome.rounds} rounds, level {outcome.level}, accuracy {outcome.accuracy:.3f}")

    print("verified:", run.verify().holds)

    # Later, in another process: pass the model and the data again.
    again = sifu.open_run(folder, model=make_network, clients=make_clients())
    (second,) = again.forget(["hospital-07"])
    print(f"and another one in {second.rounds} rounds, level {second.level}")
    return again


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary) / "run")
