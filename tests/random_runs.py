"""Random runs of random federations: any training that can be certified, with a few requests of any terms."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import sifu
from sifu.api.run import Run
from sifu.core.spec import Spec
from sifu.run.clients_and_engine import clients_from_spec


def random_spec(dice: random.Random, seed: int) -> dict[str, Any]:
    """Return a random spec of any certifiable training, on a federation of a few digits."""
    return {
        "seed": seed,
        "data": {
            "clients": dice.randint(8, 14),
            "samples_per_client": dice.choice([2, 5, 10]),
            "partition": dice.choice(["iid", "one_class"]),
            "preprocessing": "fixed",
        },
        "model": {
            "kind": dice.choice(["softmax", "logistic", "least_squares"]),
            "init": dice.choice(["zeros", "random"]),
        },
        "local": {
            "rate": dice.choice(["auto", "auto", 0.03, 0.3]),
            "steps": dice.choice([1, 2, 4]),
            "batch": dice.choice([0, 0, 1, 3]),
            "momentum": dice.choice([0.0, 0.0, 0.5, 0.9]),
            "weight_decay": dice.choice([0.0, 0.0, 0.01, 0.5]),
        },
        "server": {
            "participation": dice.choice(["all", "poisson(0.15)", "poisson(0.5)", "poisson(0.9)"]),
        },
        "stop": {"target": 0.0, "max_rounds": dice.randint(3, 8)},
        "keep": {"models": dice.choice([3, 6, 64])},
    }


def random_terms(dice: random.Random) -> dict[str, Any]:
    """Return random terms of a request, sometimes with Scratch."""
    return {
        "epsilon": dice.choice([1.0, 10.0, 100.0]),
        "delta": dice.choice([1e-2, 1e-5]),
        "sigma": dice.choice(["auto", 0.01, 0.1, 0.3, 1.0, 10.0]),
        "retention": dice.choice(["paper", "strict"]),
        "method": dice.choice(["sifu"] * 5 + ["scratch"]),
    }


def own_clients(spec: dict[str, Any]) -> list[Any]:
    """Return the spec's clients with unequal numbers of samples and two classes."""
    clients = clients_from_spec(Spec.from_mapping(spec))
    kept = [1 + number % client.samples for number, client in enumerate(clients)]
    return [
        replace(client, x=client.x[:rows], y=client.y[:rows] % 2) for client, rows in zip(clients, kept, strict=True)
    ]


def random_run(seed: int, folder: Path) -> Run:
    """Make a run of `random_spec` with two to four requests, each of one or two clients or of a client's records."""
    spec = random_spec(dice := random.Random(seed), seed)
    own = spec["model"]["kind"] == "logistic" or dice.random() < 0.3
    run = sifu.train(spec, run=folder, clients=own_clients(spec) if own else None)
    left, rows = [client.name for client in run.engine().clients], {c.name: c.samples for c in run.engine().clients}
    dice.shuffle(left)
    for _ in range(dice.randint(2, 4)):
        terms = random_terms(dice)
        if rows[left[-1]] > 1 and dice.random() < 0.4:  # it stays, and may be the next to ask
            rows[left[-1]] -= 1
            run.forget(left[-1:], level="none", records=[rows[left[-1]]], **terms)
            continue
        who = [left.pop() for _ in range(min(dice.randint(1, 2), len(left) - 1))]
        run.forget(who, level="none", **terms)
    return run
