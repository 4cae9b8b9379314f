"""Calibration of predicted rounds and their intervals on random tasks, which a seed draws.

A task is a data set (digits, synthetic features, and MNIST and FashionMNIST if their files exist), 50 to 1,000 clients,
their samples and skew, local steps, participation, an epsilon from 1 to 10, a target and a request of 1 to 10 clients.
The target is the accuracy, rounded down to half a percent, that a pilot reaches in a random number of rounds: so every
target can be reached, and none was picked by hand. Each task is trained once and planned once (method sifu, sigma
auto); then the plan's model gets fresh noise and is trained to the target `--draws` times. The report gives the share
of single draws within the plan's interval and the median of actual over predicted rounds.

Trained runs and finished rows are kept in --runs: the same command continues after an interruption, and after a change
of the forecast it plans again without training again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sifu.api import Run, train
from sifu.core.engine import Engine
from sifu.core.spec import Spec
from sifu.data import from_dataset, partition
from sifu.data.dataset import Dataset
from sifu.methods.base import noised_model
from sifu.planning.plan import Plan
from sifu.run.clients_and_engine import clients_from_spec, engine_from_spec
from sifu.run.coupled_replay import retrain_unrecorded
from sifu.run.run_view import RunView
from sifu_paper.provenance import commit

RESULTS = Path(__file__).resolve().parents[1] / "results" / "planner_calibration.json"
MADE_UP = "made-up"
POOL = {"digits": 1600, "mnist": 10000, "fashion_mnist": 10000, MADE_UP: 8000}
"""Number of training samples that a task may divide among clients."""
CAP = 4.0
"""A draw stops after this multiple of the training's rounds, or of the interval's end."""


@dataclass(frozen=True)
class Task:
    """Task drawn from a seed."""

    seed: int
    number: int
    data: str
    clients: int
    samples: int
    skew: str
    alpha: float
    steps: int
    participation: str
    epsilon: float
    pilot_rounds: int
    leaving: int

    @property
    def name(self) -> str:
        """Name for files and tables."""
        return f"seed{self.seed}-{self.number:02d}"

    def spec(self, target: float) -> dict[str, Any]:
        """Return the spec of the run that is trained."""
        own = {"name": "python", "preprocessing": "fixed"} if self.data == MADE_UP else {"name": self.data}
        shape = {"outputs": 2 + self.number % 9} if self.data == MADE_UP else {}
        return {
            "seed": 1000 * self.seed + self.number,
            "data": own
            | {
                "clients": self.clients,
                "samples_per_client": self.samples,
                "partition": self.skew,
                "alpha": self.alpha,
                "normalise": "standard" if self.data == "digits" else "unit",
            },
            "model": shape,
            "local": {"steps": self.steps},
            "server": {"participation": self.participation},
            "stop": {"target": target, "max_rounds": 3000},
            "privacy": {"epsilon": self.epsilon, "delta": 0.01},
        }


def draw_task(seed: int, number: int, data: bool) -> Task:
    """Draw task `number` of a seed; it does not depend on the number of tasks."""
    generator = np.random.default_rng([seed, number])
    names = ["digits", MADE_UP, "mnist", "fashion_mnist"] if data else ["digits", MADE_UP]
    name = str(generator.choice(names))
    clients = round(math.exp(generator.uniform(math.log(50), math.log(1000))))
    samples = int(generator.integers(2, 1 + max(2, min(30, POOL[name] // clients))))
    clients = min(clients, POOL[name] // samples)
    skew = str(generator.choice(["iid", "iid", "dirichlet", "one_class"]))
    if skew == "one_class":  # the smallest class must suffice for its clients
        classes = 2 + number % 9 if name == MADE_UP else 10
        samples = max(1, min(samples, int(0.9 * POOL[name] / classes) // -(-clients // classes)))
    return Task(
        seed,
        number,
        name,
        clients,
        samples,
        skew,
        round(float(generator.uniform(0.1, 1.0)), 2),
        int(generator.choice([1, 5, 10])),
        str(generator.choice(["all", "all", "all", "poisson(0.5)"])),
        round(math.exp(generator.uniform(0.0, math.log(10.0))), 2),
        round(math.exp(generator.uniform(math.log(25), math.log(160)))),
        round(math.exp(generator.uniform(0.0, math.log(10.0)))),
    )


def made_up(task: Task) -> Dataset:
    """Return classes around random centres; the directions have very unequal scales, like real features."""
    generator = np.random.default_rng([task.seed, task.number, 1])
    classes = 2 + task.number % 9
    width = int(generator.integers(10, 120))
    scales = np.arange(1, width + 1) ** -float(generator.uniform(0.3, 1.0))
    labels = generator.integers(classes, size=POOL[MADE_UP])
    centres = generator.normal(size=(classes, width)) * float(generator.uniform(0.2, 0.6))
    values = (centres[labels] + generator.normal(size=(labels.size, width))) * scales
    values = np.clip(values / 4.0, -1.0, 1.0)
    return Dataset(MADE_UP, values, labels, values[:0], labels[:0], tuple(str(number) for number in range(classes)))


def engine_of(task: Task, target: float, data: Path | None) -> Engine:
    """Return the engine of a task."""
    spec = Spec.from_mapping(task.spec(target))
    if task.data != MADE_UP:
        return engine_from_spec(spec, clients_from_spec(spec, data))[0]
    dataset = made_up(task)
    generator = np.random.default_rng([task.seed, task.number, 2])
    parts = partition(task.skew, dataset.y_train, task.clients, task.samples, generator, alpha=task.alpha)
    return engine_from_spec(spec, from_dataset(dataset, parts, flat=True))[0]


def target_of(task: Task, data: Path | None) -> float:
    """Return the accuracy that a pilot reaches, rounded down to half a percent."""
    engine = engine_of(task, 0.0, data)
    stop = replace(Spec().stop, target=0.0, max_rounds=task.pilot_rounds, evaluate_every=task.pilot_rounds)
    accuracy = retrain_unrecorded(engine, np.arange(len(engine.clients)), stop, 0)[2]
    return math.floor(200.0 * accuracy) / 200.0


def leaving_of(task: Task, run: Run) -> list[str]:
    """Return the requesting clients."""
    names = [client.name for client in run.status().clients]
    chosen = np.random.default_rng([task.seed, task.number, 3]).choice(len(names), task.leaving, replace=False)
    return [names[index] for index in sorted(chosen.tolist())]


def drawn_rounds(run: Run, engine: Engine, plan: Plan, cap: int) -> int:
    """Return the rounds to the target from the plan's model with fresh noise, without recording them."""
    with run.reader() as reader:
        view = RunView(reader)
        start = None if plan.source_node is None else noised_model(view, plan, reader.load_model(plan.source_node))
        active = np.setdiff1d(view.active, view.indices(plan.terms.clients))
        stop = replace(view.spec.stop, max_rounds=cap)
    return retrain_unrecorded(engine, active, stop, plan.order, start=start)[1]


def measure(task: Task, runs: Path, data: Path | None, draws: int) -> dict[str, Any]:
    """Return the row of a task; keep earlier measurements of the same plan."""
    file = runs / f"{task.name}.json"
    row: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"task": asdict(task)}
    if "target" not in row:
        row["target"] = target_of(task, data)
        file.write_text(json.dumps(row))
    engine = engine_of(task, row["target"], data)
    run = train(task.spec(row["target"]), run=runs / task.name, engine=engine)
    plan = run.plan(leaving_of(task, run), method="sifu", sigma="auto")
    row["training_rounds"] = run.status().rounds
    chosen = {"sigma": plan.noise_std, "rollback_to": plan.source_rounds}
    if row.get("plan", {}) != chosen:
        row |= {"plan": chosen, "rounds": []}
    row |= {
        "level": plan.level,
        "predicted": plan.predicted_rounds,
        "interval": list(plan.predicted_interval or ()),
    }
    cap = math.ceil(CAP * max(row["training_rounds"], *row["interval"], 25))
    while len(row["rounds"]) < draws:
        row["rounds"].append(drawn_rounds(run, engine, plan, cap))
    file.write_text(json.dumps(row))
    return row


@dataclass(frozen=True)
class Calibration:
    """Summary of the predictions in the rows of a seed."""

    tasks: int
    draws: int
    coverage: float
    median_ratio: float
    within_half: float

    @staticmethod
    def of(rows: list[dict[str, Any]]) -> Calibration:
        """Summarise the rows that have a prediction."""
        predicted = [row for row in rows if row["predicted"] is not None]
        pairs = [(row, rounds) for row in predicted for rounds in row["rounds"]]
        inside = [row["interval"][0] <= rounds <= row["interval"][1] for row, rounds in pairs]
        ratios = [rounds / row["predicted"] for row, rounds in pairs]
        near = [max(ratio, 1.0 / ratio) <= 1.5 for ratio in ratios if ratio > 0.0]
        return Calibration(
            len(predicted), len(pairs), statistics.mean(inside), statistics.median(ratios), statistics.mean(near)
        )


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a Markdown table with one line per task."""
    yield "| task | clients x samples | skew | steps | takes part | epsilon | target | training | predicted | took |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        task = row["task"]
        skew = f"dirichlet {task['alpha']:g}" if task["skew"] == "dirichlet" else task["skew"]
        guess = "-" if row["predicted"] is None else f"{row['predicted']} ({row['interval'][0]}-{row['interval'][1]})"
        yield (
            f"| {task['data']} {task['seed']}.{task['number']} | {task['clients']} x {task['samples']} | {skew} "
            f"| {task['steps']} | {task['participation']} | {task['epsilon']:g} | {row['target']:.3f} "
            f"| {row['training_rounds']} | {guess} | {', '.join(map(str, row['rounds']))} |"
        )


def summary(seed: int, rows: list[dict[str, Any]]) -> str:
    """Return a one-line summary of one seed's calibration."""
    calibration = Calibration.of(rows)
    return (
        f"seed {seed}: {calibration.tasks} tasks, {calibration.draws} draws: {calibration.coverage:.0%} within the "
        f"interval, median of actual over predicted {calibration.median_ratio:.2f}, {calibration.within_half:.0%} "
        "within a factor 1.5"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("--tasks", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--draws", type=int, default=3, help="noise draws for each plan")
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("SIFU_DATA"), help="folder with MNIST and FashionMNIST"
    )
    parser.add_argument("--runs", type=Path, default=Path("planner-calibration-runs"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help="only print the results")


def run(options: argparse.Namespace) -> None:
    """Measure the missing tasks, then report."""
    content: dict[str, Any] = json.loads(options.results.read_text()) if options.results.exists() else {}
    if not options.report:
        options.runs.mkdir(parents=True, exist_ok=True)
        rows = []
        for number in range(options.tasks):
            started = time.perf_counter()
            rows.append(
                measure(draw_task(options.seed, number, bool(options.data)), options.runs, options.data, options.draws)
            )
            print(list(table(rows[-1:]))[2], f"{time.perf_counter() - started:.0f} s", flush=True)
        content[str(options.seed)] = {"made": f"{time.strftime('%Y-%m-%d')}, commit {commit()}", "rows": rows}
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(content, indent=1))
    for seed, part in content.items():
        if options.report:
            print("\n".join(table(part["rows"])))
        print(summary(int(seed), part["rows"]))
