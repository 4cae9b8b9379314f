"""Comparison of `--sigma auto` with the best of a 12-point grid of fixed sigmas, and with Scratch.

    python benchmarks/noise_choice.py grid --data FOLDER --jobs 2   all tasks; finished runs in --runs are kept
    python benchmarks/noise_choice.py grid --smoke                  one small task, a few seconds
    python benchmarks/noise_choice.py grid --report                 only the table and the figure of the results
    python benchmarks/noise_choice.py forecasts --tasks 40 --seed 1 --data FOLDER    checks predicted rounds
    python benchmarks/noise_choice.py forecasts --report            only the table of the results

Forecasts are those of `choices/planner_calibration.py`; without `--data` their tasks are digits and made-up data.

Each task is trained once. Then its requests are executed with `auto`, with each sigma of the grid (the same one for
every request of a sequence) and with Scratch; `auto` and the four best of the grid are repeated `--repeats` times with
fresh noise, up to three times as often if the standard error of the mean (for auto, of every request's mean) is still
above 10 % of it. Rounds are summed over the requests, and means over the repeats are compared. The best of the grid is
chosen by half of its draws and judged by the other half, and the other way round; judged by the draws that chose it, it
would mostly be the luckiest. The grid is geometric, from 1/40 to 1.6 times the noise that the first request would need
at the last model of training (to 3 times in a sequence). A sequence is stopped at 1.5 times the rounds of Scratch, and
a single request also at 1.5 times the best of the grid so far; it counts with the rounds taken until then.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from choices import planner_calibration
from choices.noise_choice_table import FIGURE, Line, draw, mean_total, table, total
from choices.noise_choice_tasks import SMOKE, TASKS, Task, clients_of, folder_name

from sifu.api import Run, open_run, train
from sifu.core.engine import Engine
from sifu.core.spec import Spec
from sifu.methods.base import noised_model
from sifu.planning.plan import Plan
from sifu.run.clients_and_engine import engine_from_spec
from sifu.run.coupled_replay import retrain_unrecorded
from sifu.run.run_view import RunView
from sifu_paper.provenance import commit

GRID = 12
CAP = 1.5
CONTENDERS = 4
"""Number of the grid's best points that are repeated, because the best of twelve single draws would mostly be luck."""
PRECISION, MOST_REPEATS = 0.1, 3
"""Repeats continue until the standard error is below this share of the mean, up to this multiple of `--repeats`."""
ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results" / "noise_choice.json"


def execute(task: Task, trained: Path, engine: Engine, cap: int, **terms: Any) -> list[dict[str, Any]]:
    """Execute a task's requests on a copy of its trained run; return the results with the seconds of planning."""
    folder = Path(tempfile.mkdtemp(dir=trained.parent))
    shutil.rmtree(folder)
    shutil.copytree(trained, folder)
    rows = []
    for clients in task.requested_clients():
        run = open_run(folder, engine=engine)
        started = time.perf_counter()
        terms = {"method": "sifu"} | terms
        plan = run.plan(clients, **terms)
        seconds = time.perf_counter() - started
        (outcome,) = run.forget(clients, max_rounds=cap, level="none", **terms)
        rows.append(
            {
                "sigma": outcome.sigma,
                "rollback_to": outcome.rollback_to,
                "rounds": outcome.rounds,
                "predicted": plan.predicted_rounds,
                "interval": list(plan.predicted_interval or ()),
                "level": outcome.level,
                "planning": seconds,
            }
        )
    shutil.rmtree(folder)
    return rows


def try_out(task: Task, run: Run, engine: Engine, cap: int, **terms: Any) -> list[dict[str, Any]]:
    """Return the rounds of a task's single request with fresh noise, without the work of recording them.

    It does what `Run.forget` would do: load the plan's model, add its noise, and train the next branch without the
    requesting clients.
    """
    (clients,) = task.requested_clients()
    plan = run.plan(clients, method="sifu", **terms)
    with closing(run.reader()) as reader:
        view = RunView(reader)
        start = noised_model(view, plan, reader.load_model(plan.source_node or 0))
        active = np.setdiff1d(view.active, view.indices(clients))
        stop = replace(view.spec.stop, max_rounds=cap)
    rounds = retrain_unrecorded(engine, active, stop, plan.order, start=start)[1]
    row = {
        "sigma": plan.noise_std,
        "rollback_to": plan.source_rounds,
        "rounds": rounds,
        "predicted": plan.predicted_rounds,
        "interval": list(plan.predicted_interval or ()),
        "level": plan.level,
    }
    return [row]


def measure(
    task: Task, folder: Path, data: Path | None, repeats: int, earlier: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Measure everything about a task; yield the result after each measurement."""
    spec = Spec.from_mapping(task.spec)
    engine, _ = engine_from_spec(spec, clients_of(task, data))
    trained = folder / folder_name(task)
    run = train(task.spec, run=trained, engine=engine)
    result = earlier or {"task": task.name, "grid": {}, "auto": [], "scratch": [], "spec": task.spec}
    rounds = result["training_rounds"] = run.status().rounds
    if not result["scratch"]:
        result["scratch"] = [execute(task, trained, engine, 3000, method="scratch")]
        yield result
    carried: Callable[..., list[dict[str, Any]]] = partial(execute, task, trained, engine)
    tried = carried if task.requests > 1 else partial(try_out, task, run, engine)
    cap = int(CAP * max(rounds, *(row["rounds"] for row in result["scratch"][0])))
    planned = run.plan(task.requested_clients()[0], method="sifu", sigma="auto")
    if result["auto"] and result["auto"][0][0]["predicted"] != planned.predicted_rounds:
        plan_again(result, planned, task.requests)
    while needs_more(result["auto"], repeats, each=True):
        # The first one is executed and certified in full.
        result["auto"].append((tried if result["auto"] else carried)(cap, sigma="auto"))
        yield result
    if not result["grid"]:
        needed = max(
            client.sigma_needed_now for client in run.status().clients if client.name in task.requested_clients()[0]
        )
        top = 3.0 if task.requests > 1 else 1.6
        result["grid"] = {repr(float(s)): [] for s in np.geomspace(needed / 40.0, needed * top, GRID)}
    for sigma, draws in sorted(result["grid"].items(), key=lambda item: -float(item[0])):
        if not draws:
            # A single request that takes 1.5 times the rounds of the best so far is stopped.
            best_so_far = min((mean_total(value) for value in result["grid"].values() if value), default=float(cap))
            limit = min(cap, math.ceil(1.5 * best_so_far) + 5) if task.requests == 1 else cap
            rows = tried(limit, sigma=float(sigma))
            if limit < cap and total(rows) >= limit:
                rows[0] |= {"rounds": cap, "stopped": True}
            draws.append(rows)
            yield result
    contenders = sorted(result["grid"], key=lambda sigma: mean_total(result["grid"][sigma]))[:CONTENDERS]
    for sigma in contenders:
        while needs_more(result["grid"][sigma], repeats):
            result["grid"][sigma].append(tried(cap, sigma=float(sigma)))
            yield result


def plan_again(result: dict[str, Any], planned: Plan, requests: int) -> None:
    """Replace the plan after a change of the forecast; measured rounds depend only on its node and noise."""
    same = all(
        (rows[0]["rollback_to"], rows[0]["sigma"]) == (planned.source_rounds, planned.noise_std)
        for rows in result["auto"]
    )
    if not same or requests > 1:
        result["auto"] = []
    for rows in result["auto"]:
        rows[0] |= {"predicted": planned.predicted_rounds, "interval": list(planned.predicted_interval or ())}


def needs_more(draws: list[list[dict[str, Any]]], repeats: int, each: bool = False) -> bool:
    """Return whether another draw is needed: there are fewer than `repeats`, or their mean is too uncertain.

    With `each`, this applies to the mean of every request of a sequence, because predictions are judged one by one.
    """
    if len(draws) < repeats or repeats == 1:
        return len(draws) < repeats
    judged = [[total(rows) for rows in draws]]
    if each:
        judged += [[row["rounds"] for row in request] for request in zip(*draws, strict=True)]
    unsure = any(
        statistics.stdev(rounds) / math.sqrt(len(rounds)) > PRECISION * statistics.mean(rounds) for rounds in judged
    )
    return len(draws) < MOST_REPEATS * repeats and unsure


def where() -> str:
    """Return hardware, date and commit, in one line."""
    return f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} cores, CPU only, commit {commit()}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the grid."""
    parser.add_argument("--data", type=Path, help="folder with MNIST and FashionMNIST")
    parser.add_argument("--runs", type=Path, default=Path("noise-choice-runs"), help="folder for trained runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="number of tasks measured concurrently")
    parser.add_argument("--only", help="tasks whose name contains this")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--report", action="store_true", help="only print the table and draw the figure of the results")


def run(options: argparse.Namespace) -> None:
    """Measure the missing tasks, then print the table."""
    content = json.loads(options.results.read_text()) if options.results.exists() and not options.smoke else {}
    if options.report:
        order = [task.name for task in TASKS]
        measured = [content["tasks"][name] for name in order if name in content["tasks"]]
        print(content["where"], table([Line.of(result) for result in measured]), sep="\n\n")
        draw(measured, FIGURE)
        return
    if options.smoke:
        options.runs, options.repeats = Path(tempfile.mkdtemp()), 1
    tasks = tuple(task for task in (SMOKE if options.smoke else TASKS) if (options.only or "") in task.name)
    results: dict[str, Any] = content.get("tasks", {})
    options.runs.mkdir(parents=True, exist_ok=True)
    work = [Work(task, options.runs, options.data, options.repeats) for task in tasks]
    with multiprocessing.get_context("spawn").Pool(options.jobs) if options.jobs > 1 else nullcontext() as pool:
        for name, result in pool.imap_unordered(carry_through, work) if pool else map(carry_through, work):
            results[name] = result
            if not options.smoke:
                options.results.parent.mkdir(parents=True, exist_ok=True)
                options.results.write_text(json.dumps({"where": where(), "tasks": results}, indent=1))
            print(table([Line.of(result)]).splitlines()[2], flush=True)
    order = [task.name for task in TASKS]
    measured = sorted(
        results.values(), key=lambda result: order.index(result["task"]) if result["task"] in order else -1
    )
    print()
    print(table([Line.of(result) for result in measured if result["auto"] and result["scratch"]]))


@dataclass(frozen=True)
class Work:
    """A task for one process."""

    task: Task
    runs: Path
    data: Path | None
    repeats: int


def carry_through(work: Work) -> tuple[str, dict[str, Any]]:
    """Measure what is missing of a task; results are kept next to its run, so that nothing is measured twice."""
    half_way = work.runs / f"{folder_name(work.task)}.json"
    result: dict[str, Any] = json.loads(half_way.read_text()) if half_way.exists() else {}
    for result_so_far in measure(work.task, work.runs, work.data, work.repeats, result):
        result = result_so_far
        half_way.write_text(json.dumps(result))
    return work.task.name, result


def main() -> None:
    """Execute the chosen part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    grid, forecasts = parts.add_parser("grid"), parts.add_parser("forecasts", description=planner_calibration.__doc__)
    add_options(grid)
    planner_calibration.add_options(forecasts)
    options = parser.parse_args()
    (run if options.part == "grid" else planner_calibration.run)(options)


if __name__ == "__main__":
    main()
