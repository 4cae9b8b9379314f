"""Runs of the `--method auto` table: 25 chosen by hand, and others that a seed draws.

A drawn run divides digits among a few or many clients. It has a linear model, a small network or a head in closed form,
with or without groups, momentum and partial participation, an epsilon from 1 to 20 and a request of one to five
clients. Its target is the accuracy, rounded down to half a percent, that a pilot reaches in a random number of rounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SAMPLES = 1600
"""Number of training samples of digits that a run may divide among clients."""


@dataclass(frozen=True)
class Case:
    """A run, the number of clients that ask to be forgotten, and the required level.

    If `pilot_rounds` is not 0, a pilot of this length sets the target.
    """

    name: str
    spec: dict[str, Any]
    leaving: int = 1
    level: Any = None
    terms: dict[str, Any] = field(default_factory=dict)
    pilot_rounds: int = 0


def digits(clients: int, samples: int, target: float, **sections: Any) -> dict[str, Any]:
    """Return the spec of a federation of 8x8 digits; `sections` update the sections of the spec."""
    spec: dict[str, Any] = {
        "seed": 7,
        "data": {"name": "digits", "clients": clients, "samples_per_client": samples, "normalise": "standard"},
        "local": {"steps": 5},
        "stop": {"target": target, "max_rounds": 400},
    }
    for name, values in sections.items():
        spec[name] = {**spec.get(name, {}), **values}
    return spec


EPSILON_1 = {"privacy": {"epsilon": 1.0}}
MLP = {
    "model": {"kind": "mlp"},
    "local": {"steps": 5, "rate": 0.1, "momentum": 0.9},
    "regularity": {"kind": "assumed"},
}
CNN = {
    "model": {"kind": "cnn"},
    "local": {"steps": 3, "rate": 0.05, "momentum": 0.9},
    "regularity": {"kind": "assumed"},
}


def groups(count: int, rounds: int) -> dict[str, Any]:
    """Return the spec section for separately trained groups."""
    return {"groups": {"count": count, "rounds": rounds, "rebuild": "later"}}


CASES = (
    Case("softmax 160x10 iid", digits(160, 10, 0.95)),
    Case("softmax 160x10 iid, five leave", digits(160, 10, 0.95), leaving=5),
    Case("softmax 160x10 iid, epsilon 1", digits(160, 10, 0.95, **EPSILON_1)),
    Case("softmax 160x10 iid, exact asked", digits(160, 10, 0.95), level="exact"),
    Case("softmax 160x10 iid, proven asked", digits(160, 10, 0.95), level="proven"),
    Case("softmax 400x4 iid", digits(400, 4, 0.94)),
    Case("softmax 800x2 iid, epsilon 1", digits(800, 2, 0.93, **EPSILON_1)),
    Case("softmax 50x30 iid", digits(50, 30, 0.95)),
    Case("softmax 20x60 iid", digits(20, 60, 0.95)),
    Case("softmax 8x150 iid, epsilon 1", digits(8, 150, 0.95, **EPSILON_1)),
    Case("softmax 100x14 one class", digits(100, 14, 0.92, data={"partition": "one_class"})),
    Case("softmax 120x12 dirichlet 0.3", digits(120, 12, 0.94, data={"partition": "dirichlet", "alpha": 0.3})),
    Case("softmax 100x16 half take part", digits(100, 16, 0.94, server={"participation": "poisson(0.5)"})),
    Case("softmax 60x20 weight decay", digits(60, 20, 0.9, local={"weight_decay": 0.01})),
    Case("softmax 50x30, five groups", digits(50, 30, 0.95, **groups(5, 25))),
    Case(
        "ridge 40x40", digits(40, 40, 0.0, model={"kind": "ridge"}, features={"kind": "random_fourier", "count": 128})
    ),
    Case(
        "ridge 40x40, the sum is kept",
        digits(
            40,
            40,
            0.0,
            model={"kind": "ridge"},
            features={"kind": "random_fourier", "count": 128},
            keep={"statistics": "sum"},
        ),
        leaving=4,
    ),
    Case("mlp 20x60", digits(20, 60, 0.97, **MLP)),
    Case("mlp 20x60, exact asked", digits(20, 60, 0.97, **MLP), level="exact"),
    Case("mlp 40x40, five groups", digits(40, 40, 0.97, **MLP, **groups(5, 20))),
    Case("mlp 40x40, ten groups, three leave", digits(40, 40, 0.97, **MLP, **groups(10, 20)), leaving=3),
    Case("mlp 40x40, five groups, exact asked", digits(40, 40, 0.97, **MLP, **groups(5, 20)), level="exact"),
    Case(
        "mlp 60x14, six groups, one class",
        digits(60, 14, 0.9, **MLP | {"data": {"partition": "one_class"}}, **groups(6, 25)),
    ),
    Case("mlp 40x40, two groups, all hit", digits(40, 40, 0.97, **MLP, **groups(2, 20)), leaving=6),
    Case("cnn 20x40, four groups", digits(20, 40, 0.95, **CNN, **groups(4, 15))),
)


def drawn_case(seed: int, number: int) -> Case:
    """Return run `number` of a seed, which does not depend on the number of runs."""
    generator = np.random.default_rng([seed, number])

    def between(low: float, high: float) -> int:
        return round(math.exp(generator.uniform(math.log(low), math.log(high))))

    def pick(*values: Any) -> Any:
        return values[int(generator.integers(len(values)))]

    kind = pick("softmax", "softmax", "softmax", "softmax", "mlp", "mlp", "mlp", "cnn", "ridge")
    clients = between(8, 500) if kind in ("softmax", "ridge") else between(10, 60)
    samples = min(60, int(generator.integers(max(2, SAMPLES // clients // 2), SAMPLES // clients + 1)))
    skew = pick("iid", "iid", "dirichlet", "one_class")
    if skew == "one_class":  # the smallest of the ten classes must suffice for its clients
        samples = max(1, min(samples, 150 // -(-clients // 10)))
    alpha, share = round(float(generator.uniform(0.1, 1.0)), 2), pick("all", "all", "poisson(0.5)", "poisson(0.25)")
    epsilon = round(math.exp(generator.uniform(0.0, math.log(20.0))), 1)
    momentum = pick(0.0, 0.0, 0.0, 0.5)
    grouped = kind != "ridge" and generator.random() < (0.2 if kind == "softmax" else 0.5)
    groups_drawn, separate = int(generator.integers(3, 9)), int(generator.integers(10, 26))
    leaving, pilot = min(between(1, 5), clients // 4), between(15, 80 if kind == "softmax" else 40)
    level = pick(None, None, None, None, "exact")
    sections: dict[str, Any] = {
        "data": {"partition": skew, "alpha": alpha},
        "server": {"participation": share},
        "privacy": {"epsilon": epsilon},
    }
    if kind == "softmax":
        sections["local"] = {"momentum": momentum}
    elif kind == "ridge":
        sections |= {"model": {"kind": "ridge"}, "features": {"kind": "random_fourier", "count": 128}, "server": {}}
        sections["keep"] = {"statistics": pick("clients", "sum")}
    else:
        sections |= MLP if kind == "mlp" else CNN
    if grouped:
        sections |= groups(groups_drawn, separate)
    words = [f"{kind} {clients}x{samples}", f"dirichlet {alpha:g}" if skew == "dirichlet" else skew.replace("_", " ")]
    words += [share] if share != "all" and kind != "ridge" else []
    words += [f"momentum {momentum:g}"] if momentum and kind == "softmax" else []
    words += [f"{groups_drawn} groups"] if grouped else []
    words += [f"epsilon {epsilon:g}", f"{leaving} leave"] + (["exact asked"] if level else [])
    spec = digits(clients, samples, 0.0, **sections) | {"seed": 1000 * seed + number}
    return Case(f"{seed}.{number} {', '.join(words)}", spec, leaving, level, {}, 0 if kind == "ridge" else pilot)


DRAWN_SEED, DRAWN_RUNS = 20, 24
"""Seed and number of the drawn runs in the committed table."""
