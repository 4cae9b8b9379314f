"""Appendix A of the paper: with more features than samples, fine-tuning keeps a trace for ever.

Clients hold a few rows (x, y) each and minimise |y - X theta|^2 / (2 n). Gradients on the remaining rows lie in their
span, so what a forgotten client contributed outside that span never disappears, however long training goes on; and no
accuracy shows it, because both models fit the remaining rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sifu_paper.draws import keyed
from sifu_paper.experiment import Experiment, Options
from sifu_paper.figures import draw_trace
from sifu_paper.table import Table

CLIENTS, ROWS, FEATURES, STEPS, FORGOTTEN = 4, 2, 12, 3, 0
TRAINED, EVERY, AFTERWARDS = 40, 10, 400


def average_round(rows: Sequence[tuple[np.ndarray, np.ndarray]], model: np.ndarray, rate: float) -> np.ndarray:
    """Return the mean of the clients' models after some steps of gradient descent on their own rows."""
    models = []
    for x, y in rows:
        own = model
        for _ in range(STEPS):
            own = own - rate * x.T @ (x @ own - y) / len(y)
        models.append(own)
    mean: np.ndarray = np.mean(models, axis=0)
    return mean


def outside_span(x: np.ndarray, model: np.ndarray) -> np.ndarray:
    """Return the part of a model that is orthogonal to all these rows.

    >>> outside_span(np.array([[1.0, 0.0]]), np.array([3.0, 4.0]))
    array([0., 4.])
    """
    basis = np.linalg.qr(x.T)[0]
    outside: np.ndarray = model - basis @ (basis.T @ model)
    return outside


def run_trace(
    experiment: Experiment, options: Options, dataset: str, seed: int, table: Table, say: Callable[[str], None]
) -> None:
    """Train with everyone, then go on without one client: from the trained model and from a fresh one."""
    generator = keyed(seed, "appendix A")
    rows = [(generator.normal(size=(ROWS, FEATURES)), generator.normal(size=ROWS)) for _ in range(CLIENTS)]
    rest = [own for client, own in enumerate(rows) if client != FORGOTTEN]
    remaining = np.vstack([x for x, _ in rest])
    rate = 1.0 / max(float(np.linalg.norm(x, 2)) ** 2 / ROWS for x, _ in rows)
    models = {"fine_tuning": np.zeros(FEATURES), "scratch": np.zeros(FEATURES)}
    for _ in range(TRAINED):
        models["fine_tuning"] = average_round(rows, models["fine_tuning"], rate)
    for number in range(AFTERWARDS + 1):
        if number % EVERY == 0:
            for method, model in models.items():
                errors = [x @ model - y for x, y in rest]
                table.add(
                    {"dataset": dataset, "seed": seed, "preset": "", "method": method, "variant": "", "number": number}
                    | {"trace": float(np.linalg.norm(outside_span(remaining, model)))}
                    | {"error": float(np.sqrt(np.mean(np.concatenate(errors) ** 2)))}
                )
        models = {method: average_round(rest, model, rate) for method, model in models.items()}
    say(f"{dataset}, seed {seed}: measured")


EXPERIMENT = Experiment(
    title="Fine-tuning keeps a trace",
    question="Linear regression with more features than rows: does what a client left disappear when training goes on "
    "without it?",
    paper_figure="appendix A",
    run=run_trace,
    draw=draw_trace,
    datasets=("regression",),
    methods=(),
)
