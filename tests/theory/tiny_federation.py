"""Independent federation in plain numpy float64, small enough to run every counterfactual with the run itself.

It uses nothing from `sifu` except the data types it is checked against. All counterfactuals run at once: row 0 of
`models` is the run itself, row k the counterfactual without the set `removed[k - 1]`. Schedule, batches and noise are
the same in all of them, and slots are not refilled.

Losses are h(a.theta, y) averaged over rows a, with |h''| <= c known, or softmax cross-entropy:

    quadratic c=1, logistic c=1/4, cosine c=1 (not convex), tanh c=2.6 (not convex), softmax c=1/2.

Every client takes its own safe step, and knows how far its steps push two models apart, by formulas written out here.
With an assumed factor B per step, all clients take `local_rate`, however far beyond their safe steps it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sifu.theory.history import ActivePath, PathNode, TakenPart
from sifu.theory.regularity import RoundRegularity
from sifu.theory.rounding import norm_up
from sifu.theory.tracking import RoundScalars, SensitivityTracker, summarise_round

Array = NDArray[np.float64]
CURVATURE_BOUND = {"quadratic": 1.0, "logistic": 0.25, "cosine": 1.0, "tanh": 2.6, "softmax": 0.5}
CONVEX = ("quadratic", "logistic", "softmax")
CLASSES = 3


def _slope(loss: str, z: Array, y: Array) -> Array:
    """Return h'(z, y)."""
    if loss == "quadratic":
        return z - y
    if loss == "logistic":
        return -y / (1.0 + np.exp(np.clip(y * z, -500.0, 500.0)))
    if loss == "cosine":
        return -np.sin(z + y)
    t = np.tanh(z)
    return (t - y) * (1.0 - t * t)


@dataclass(frozen=True)
class Client:
    """Rows a, targets y and local steps of a client."""

    rows: Array
    targets: Array
    steps: int


def momentum_limit(steps: int, momentum: float) -> float:
    """Return the largest x for which (2/x) D - P has no negative eigenvalue (docs/theory.md, section 5.6)."""
    reach = [sum(momentum**k for k in range(steps - i)) for i in range(steps)]
    products = np.zeros((steps, steps))
    for j in range(steps):
        products[j, j] = reach[j] ** 2
        for i in range(j):
            between = sum(momentum**k for k in range(j - i))
            products[i, j] = products[j, i] = reach[j] * (reach[i] - between)
    return 2.0 / float(np.linalg.eigvals(products / np.array(reach)[:, None]).real.max()) * (1.0 - 1e-8)


@dataclass
class Federation:
    """Clients, hyper-parameters, and each client's step and expansion."""

    loss: str
    clients: list[Client]
    local_rate: float = math.inf
    momentum: float = 0.0
    weight_decay: float = 0.0
    batch: int = 0
    seed: int = 0
    true_curvature: bool = False
    """If True, mu is the smallest eigenvalue of a full-batch quadratic; otherwise it comes from weight decay alone."""
    assumed: float | None = None
    """Factor B per step that is assumed; every client then takes `local_rate`."""
    stretch: float = 1.0
    """Factor of every step that nobody accounts for: 1 except in negative controls."""

    rates: list[float] = field(init=False)
    factors: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.rates, self.factors = [], []
        for index, client in enumerate(self.clients):
            beta, mu = self.curvature(index)
            if self.assumed is not None:
                rate, factor = self.local_rate, self.assumed**client.steps
            elif self.momentum:
                rate, factor = min(self.local_rate, momentum_limit(client.steps, self.momentum) / beta), 1.0
            else:
                rate = min(self.local_rate, 2.0 / (beta + mu) * (1.0 - 1e-12))
                step = max(abs(1.0 - rate * mu), abs(1.0 - rate * beta)) * (1.0 + 1e-14)
                factor = 1.0 if mu == 0.0 else min(1.0, step**client.steps)
            self.rates.append(rate * self.stretch)
            self.factors.append(factor)

    @property
    def size(self) -> int:
        width = self.clients[0].rows.shape[1]
        return width * CLASSES if self.loss == "softmax" else width

    def curvature(self, index: int) -> tuple[float, float]:
        """Return beta and mu of a client, as upper and lower bounds over every batch it may draw."""
        client, bound = self.clients[index], CURVATURE_BOUND[self.loss]
        n = client.rows.shape[0]
        spectrum = np.linalg.eigvalsh(client.rows.T @ client.rows / n)
        steepest = float(spectrum[-1])
        if self._sampled(n):  # a batch bends no more than its longest row, nor than all rows divided by its size
            steepest = min(float(np.max(np.sum(client.rows**2, axis=1))), steepest * n / self.batch)
        beta = bound * steepest
        mu = 0.0
        if self.true_curvature and self.loss == "quadratic" and not self._sampled(n):
            mu = max(0.0, float(spectrum[0])) * (1.0 - 1e-12)
        return (beta + self.weight_decay) * (1.0 + 1e-9), mu + self.weight_decay

    def _sampled(self, n: int) -> bool:
        return 0 < self.batch < n

    def gradient(self, models: Array, client: Client, picked: NDArray[np.int64]) -> Array:
        """Return the gradients in all counterfactuals at once, weight decay included."""
        rows, y = client.rows[picked], client.targets[picked]
        if self.loss == "softmax":
            weights = models.reshape(len(models), CLASSES, -1)
            scores = np.einsum("wcp,np->wnc", weights, rows)
            scores = np.exp(scores - scores.max(axis=2, keepdims=True))
            chances = scores / scores.sum(axis=2, keepdims=True)
            chances[:, np.arange(len(rows)), y.astype(int)] -= 1.0
            slope = np.einsum("wnc,np->wcp", chances, rows).reshape(len(models), -1) / len(rows)
        else:
            slope = _slope(self.loss, models @ rows.T, y) @ rows / len(rows)
        return slope + self.weight_decay * models

    def train_locally(self, models: Array, index: int, round_number: int) -> Array:
        """Train one client for K local steps from every counterfactual's model, with the same batches."""
        client = self.clients[index]
        generator = np.random.default_rng([self.seed, round_number, index])
        moved, velocity = models.copy(), np.zeros_like(models)
        n = client.rows.shape[0]
        for _ in range(client.steps):
            picked = generator.choice(n, self.batch, replace=False) if self._sampled(n) else np.arange(n)
            gradient = self.gradient(moved, client, picked)
            velocity = self.momentum * velocity + gradient
            moved = moved - self.rates[index] * velocity
        return moved

    def samples(self, who: Sequence[int]) -> NDArray[np.int64]:
        return np.array([len(self.clients[i].rows) for i in who], dtype=np.int64)


@dataclass(frozen=True)
class RoundRecord:
    """One round of the real run, as an engine would report it."""

    participants: NDArray[np.int64]
    samples: NDArray[np.int64]
    drifts: Array
    mean_shift: float


def run_round(
    federation: Federation, models: Array, removed: Sequence[frozenset[int]], who: Sequence[int], number: int
) -> tuple[Array, RoundRecord]:
    """Run one round in every counterfactual; the record describes number 0, the run itself."""
    who = sorted(who)
    samples = federation.samples(who)
    if not who:
        empty = np.zeros(0)
        return models.copy(), RoundRecord(np.zeros(0, dtype=np.int64), samples, empty, 0.0)
    trained = np.stack([federation.train_locally(models, i, number) for i in who])  # clients, counterfactuals, size
    after = models.copy()
    for counterfactual, gone in enumerate([frozenset(), *removed]):
        stay = [k for k, i in enumerate(who) if i not in gone]
        if stay and samples[stay].sum() > 0:
            mean = np.tensordot(samples[stay] / samples[stay].sum(), trained[stay, counterfactual], axes=1)
            after[counterfactual] = mean
    mean = np.tensordot(samples / samples.sum(), trained[:, 0], axes=1)
    separate = trained[:, 0] - mean
    return after, RoundRecord(
        np.array(who, dtype=np.int64),
        samples,
        np.array([norm_up(row) for row in separate]),
        norm_up(mean - models[0]),
    )


@dataclass(frozen=True)
class Run:
    """Whole training: records, and every counterfactual's model after each depth (row 0: the initial model)."""

    federation: Federation
    removed: tuple[frozenset[int], ...]
    records: list[RoundRecord]
    models: list[Array]

    def distance(self, depth: int, counterfactual: int) -> float:
        """Return || theta^n - phi^n ||, with phi the model without `removed[counterfactual]`."""
        return float(np.linalg.norm(self.models[depth][0] - self.models[depth][counterfactual + 1]))


def train(
    federation: Federation, removed: Sequence[frozenset[int]], schedule: Sequence[Sequence[int]], start: Array
) -> Run:
    models = np.tile(start, (len(removed) + 1, 1))
    records, history = [], [models]
    for number, who in enumerate(schedule):
        models, record = run_round(federation, models, removed, who, number)
        records.append(record)
        history.append(models)
    return Run(federation, tuple(removed), records, history)


def factors_of(federation: Federation, record: RoundRecord) -> Array:
    return np.array([federation.factors[i] for i in record.participants])


def regularity_of(federation: Federation, record: RoundRecord) -> RoundRegularity:
    return RoundRegularity.of(record.samples, factors_of(federation, record))


def scalars_of(federation: Federation, record: RoundRecord, rounding: float = 0.0) -> RoundScalars:
    """Return the scalars of one round for the tracker."""
    factors = factors_of(federation, record)
    return summarise_round(
        record.participants, record.samples, record.drifts, record.mean_shift, rounding, factors=factors
    )[1]


def tracked(run: Run, rounding: float = 0.0) -> list[Array]:
    """Return Psi of every client after each depth, by the tracker."""
    everyone = np.arange(len(run.federation.clients))
    tracker = SensitivityTracker(everyone.size)
    values = [tracker.total(everyone)]
    for record in run.records:
        tracker.update(scalars_of(run.federation, record, rounding))
        values.append(tracker.total(everyone))
    return values


def path_of(run: Run, *, rounding: float = 0.0) -> ActivePath:
    nodes = [PathNode(0, None, "initial", 0, 0)]
    for depth, record in enumerate(run.records, start=1):
        regularity = regularity_of(run.federation, record)
        nodes.append(PathNode(depth, depth - 1, "round", 0, depth, regularity, record.mean_shift, rounding))
    return ActivePath(nodes)


def part_of(federation: Federation, records: Sequence[RoundRecord], client: int) -> TakenPart:
    """Return the rounds one client took part in; record k made depth k + 1."""
    return part_at(federation, [(depth, record) for depth, record in enumerate(records, start=1)], client)


def part_at(federation: Federation, records: Sequence[tuple[int, RoundRecord]], client: int) -> TakenPart:
    rows = []
    for depth, record in records:
        index = np.flatnonzero(record.participants == client)
        if index.size:
            rows.append((depth, int(record.samples[index[0]]), float(record.drifts[index[0]])))
    return TakenPart(
        np.array([row[0] for row in rows], dtype=np.int64),
        np.array([row[1] for row in rows], dtype=np.int64),
        np.array([row[2] for row in rows], dtype=np.float64),
        federation.factors[client],
    )


def random_clients(
    generator: np.random.Generator,
    loss: str,
    count: int,
    width: int,
    largest: int = 6,
    steps: Sequence[int] = (1, 2, 4),
) -> list[Client]:
    """Return clients of unequal size, each with its own number of local steps and its own direction of data."""
    clients = []
    for _ in range(count):
        n = int(generator.integers(1, largest + 1))
        rows = generator.normal(size=(n, width)) + 0.7 * generator.normal(size=width)
        if loss == "softmax":
            targets = generator.integers(0, CLASSES, n).astype(np.float64)
        elif loss == "logistic":
            targets = generator.choice([-1.0, 1.0], n)
        elif loss == "tanh":
            targets = generator.uniform(-1.0, 1.0, n)
        else:
            targets = 2.0 * generator.normal(size=n)
        clients.append(Client(rows, targets, int(generator.choice(steps))))
    return clients


def random_schedule(generator: np.random.Generator, count: int, rounds: int, rate: float) -> list[list[int]]:
    """Draw Poisson participation, with possibly empty rounds and rounds of one client."""
    return [[i for i in range(count) if generator.random() < rate] for _ in range(rounds)]


def largest_smoothness(loss: str, clients: Sequence[Client], batch: int) -> float:
    """Return the largest beta of the clients, without weight decay."""
    probe = Federation(loss, list(clients), 1e-6, batch=batch)
    return max(probe.curvature(i)[0] for i in range(len(clients)))


PsiRule = Callable[[Run], list[list[float]]]
"""Rule under test: it returns Psi of every removed set at every depth, [depth][counterfactual]."""


def violations(run: Run, rule: PsiRule) -> list[str]:
    """Return every (depth, set) at which the true distance exceeds the rule's Psi.

    Tolerance: the models are computed in float64, so their distance is known to a few ulps.
    """
    broken = []
    for depth, values in enumerate(rule(run)):
        size = float(np.max(np.abs(run.models[depth])))
        for counterfactual, psi in enumerate(values):
            truth = run.distance(depth, counterfactual)
            if not truth <= psi * (1.0 + 1e-9) + 1e-12 * (1.0 + size):
                broken.append(f"depth {depth}, without {sorted(run.removed[counterfactual])}: {truth:.6g} > {psi:.6g}")
    return broken
