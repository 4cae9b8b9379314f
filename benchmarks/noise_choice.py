"""`--sigma auto` against the best of a 12-point grid of fixed sigmas, and against Scratch.

    python benchmarks/noise_choice.py --data FOLDER --jobs 2   all tasks; what lies in --runs is not run again
    python benchmarks/noise_choice.py --smoke                  one small task, a few seconds
    python benchmarks/noise_choice.py --page docs/noise.md     only write the table and the figure from the results

Each task is trained once. Then its requests are carried out with `auto`, with each sigma of the grid (the same one for
every request of a sequence) and with Scratch; `auto` and the four best of the grid `--repeats` times with fresh noise,
up to three times as often where the standard error of the mean (for auto, of every request's mean) is still above 10 %
of it. Rounds are summed over the requests, and means over the repeats are compared. The best of the grid is chosen by
half of its draws and judged by the other half, both ways round: judged by the draws that chose it, it would mostly be
the luckiest. The grid is geometric, from 1/40 to 1.6 times the noise that the first request would need at the last
model of training (to 3 times in a sequence). What took more than half as many rounds again as Scratch was stopped
there; a single request that took that much more than the best of the grid so far was stopped too, and is counted like
that.
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

from sifu.api import Run, open_run, train
from sifu.core.engine import Engine
from sifu.core.spec import Spec
from sifu.data import from_dataset, frozen_features, load, partition, trained_convolutions
from sifu.experiments.provenance import commit
from sifu.launch.federation import clients_from_spec, engine_from_spec
from sifu.methods.noised import noised_model
from sifu.planning.plan import Plan
from sifu.record.run_view import RunView
from sifu.record.unrecorded_training import retrain_unrecorded

GRID = 12
CAP = 1.5
CONTENDERS = 4
"""So many of the grid's best points are repeated; the best of twelve single draws would mostly be luck."""
PRECISION, MOST_REPEATS = 0.1, 3
"""Repeats go on until the standard error is below this share of the mean, up to so many times `--repeats`."""
ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results" / "noise_choice.json"


@dataclass(frozen=True)
class Task:
    """A federation, its budget, and the requests that are made of it."""

    name: str
    spec: dict[str, Any]
    requests: int = 1
    clients_a_request: int = 5
    features: bool = False

    def asked(self) -> list[list[str]]:
        """Who asks, request by request."""
        size = self.clients_a_request
        count = self.spec["data"]["clients"]
        width = max(3, len(str(count - 1)))
        return [[f"client-{k:0{width}d}" for k in range(n * size, (n + 1) * size)] for n in range(self.requests)]


def linear(name: str, clients: int, samples: int, target: float, epsilon: float = 10.0, **other: Any) -> dict[str, Any]:
    """Softmax regression; `other` are keys of `data`, `local` and `server`."""
    scale = "standard" if name == "digits" else "unit"
    return {
        "seed": 3,
        "data": {"name": name, "clients": clients, "samples_per_client": samples, "normalise": scale}
        | other.get("data", {}),
        "local": {"steps": 10} | other.get("local", {}),
        "server": other.get("server", {}),
        "stop": {"target": target, "max_rounds": 3000},
        "privacy": {"epsilon": epsilon, "delta": 0.01},
    }


def dirichlet(alpha: float) -> dict[str, Any]:
    """Class proportions of every client at random."""
    return {"data": {"partition": "dirichlet", "alpha": alpha}}


ONE_CLASS = {"data": {"partition": "one_class"}}
HALF = {"server": {"participation": "poisson(0.5)"}}
TASKS = (
    Task("digits 160x10 iid, eps 10", linear("digits", 160, 10, 0.95)),
    Task("digits 160x10 iid, eps 1", linear("digits", 160, 10, 0.95, 1.0)),
    Task("digits 50x30 iid, eps 10", linear("digits", 50, 30, 0.96), clients_a_request=1),
    Task("digits 140x10 one class, eps 10", linear("digits", 140, 10, 0.94, **ONE_CLASS)),
    Task("digits 110x14 poisson 0.5, eps 10", linear("digits", 110, 14, 0.95, **HALF), clients_a_request=3),
    Task("digits 160x10 iid, eps 10, 4 in a row", linear("digits", 160, 10, 0.95), requests=4),
    Task("cifar10 features 1000x10 iid, eps 10", linear("cifar10", 1000, 10, 0.43), features=True),
    Task("cifar10 features 1000x10 iid, eps 1", linear("cifar10", 1000, 10, 0.43, 1.0), features=True),
    Task("mnist 1000x5 iid, eps 10", linear("mnist", 1000, 5, 0.88), clients_a_request=10),
    Task("mnist 1000x5 iid, eps 1", linear("mnist", 1000, 5, 0.88, 1.0), clients_a_request=1),
    Task("fashion 500x8 one class, eps 10", linear("fashion_mnist", 500, 8, 0.76, **ONE_CLASS), clients_a_request=1),
    Task("fashion 400x10 iid, eps 10", linear("fashion_mnist", 400, 10, 0.79), clients_a_request=1),
    Task("mnist 300x15 dirichlet 0.5, eps 10", linear("mnist", 300, 15, 0.88, **dirichlet(0.5)), clients_a_request=2),
    Task("mnist 2000x2 iid, eps 10", linear("mnist", 2000, 2, 0.86), clients_a_request=1),
)
SMOKE = (Task("digits 40x10 iid, eps 10", linear("digits", 40, 10, 0.95), clients_a_request=1),)


def clients_of(task: Task, data: Path | None) -> Any:
    """The clients of a task: their images, or features of them from a network that saw CIFAR-100 only."""
    spec = Spec.from_mapping(task.spec)
    if not task.features:
        return clients_from_spec(spec, data)
    dataset = load(spec.data.name, data)
    parts = partition(
        spec.data.partition,
        dataset.y_train,
        spec.data.clients,
        spec.data.samples_per_client,
        np.random.default_rng(spec.seed),
    )
    return frozen_features(
        from_dataset(dataset, parts, flat=False), trained_convolutions(load("cifar100", data)), norm=4
    )


def folder_name(task: Task) -> str:
    """A task's name as a file's."""
    return task.name.replace(" ", "_").replace(",", "")


def carry_out(task: Task, trained: Path, engine: Engine, cap: int, **terms: Any) -> list[dict[str, Any]]:
    """The requests of a task on a copy of its trained run: what came of each, and the seconds of planning it."""
    folder = Path(tempfile.mkdtemp(dir=trained.parent))
    shutil.rmtree(folder)
    shutil.copytree(trained, folder)
    rows = []
    for clients in task.asked():
        run = open_run(folder, engine=engine)
        started = time.perf_counter()
        plan = run.plan(clients, **terms)
        seconds = time.perf_counter() - started
        (outcome,) = run.forget(clients, max_rounds=cap, min_level="none", **terms)
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
    """The rounds that the one request of a task takes with fresh noise, without recording them: far less work.

    What `Run.forget` would do: the plan's model, its noise, and rounds of the next branch without whoever asks.
    """
    (clients,) = task.asked()
    plan = run.plan(clients, **terms)
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
    task: Task, folder: Path, data: Path | None, repeats: int, known: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Everything about a task, yielded whenever something was added."""
    spec = Spec.from_mapping(task.spec)
    engine, _ = engine_from_spec(spec, clients_of(task, data))
    trained = folder / folder_name(task)
    run = train(task.spec, run=trained, engine=engine)
    result = known or {"task": task.name, "grid": {}, "auto": [], "scratch": [], "spec": task.spec}
    rounds = result["training_rounds"] = run.status().rounds
    if not result["scratch"]:
        result["scratch"] = [carry_out(task, trained, engine, 3000, method="scratch")]
        yield result
    carried: Callable[..., list[dict[str, Any]]] = partial(carry_out, task, trained, engine)
    tried = carried if task.requests > 1 else partial(try_out, task, run, engine)
    cap = int(CAP * max(rounds, *(one["rounds"] for one in result["scratch"][0])))
    planned = run.plan(task.asked()[0], sigma="auto")
    if result["auto"] and result["auto"][0][0]["predicted"] != planned.predicted_rounds:
        plan_again(result, planned, task.requests)
    while needs_more(result["auto"], repeats, each=True):
        # The first one is carried out and certified like any other.
        result["auto"].append((tried if result["auto"] else carried)(cap, sigma="auto"))
        yield result
    if not result["grid"]:
        needed = max(client.sigma_needed_now for client in run.status().clients if client.name in task.asked()[0])
        top = 3.0 if task.requests > 1 else 1.6
        result["grid"] = {repr(float(s)): [] for s in np.geomspace(needed / 40.0, needed * top, GRID)}
    for sigma, found in sorted(result["grid"].items(), key=lambda item: -float(item[0])):
        if not found:
            # A single request that takes half as many rounds again as the best so far is of no interest.
            known_best = min((mean_total(value) for value in result["grid"].values() if value), default=float(cap))
            limit = min(cap, math.ceil(1.5 * known_best) + 5) if task.requests == 1 else cap
            rows = tried(limit, sigma=float(sigma))
            if limit < cap and total(rows) >= limit:
                rows[0] |= {"rounds": cap, "stopped": True}
            found.append(rows)
            yield result
    contenders = sorted(result["grid"], key=lambda sigma: mean_total(result["grid"][sigma]))[:CONTENDERS]
    for sigma in contenders:
        while needs_more(result["grid"][sigma], repeats):
            result["grid"][sigma].append(tried(cap, sigma=float(sigma)))
            yield result


def plan_again(result: dict[str, Any], planned: Plan, requests: int) -> None:
    """Take over a new plan, after a change of the forecast: rounds depend on it by node and noise alone."""
    same = all(
        (rows[0]["rollback_to"], rows[0]["sigma"]) == (planned.source_rounds, planned.noise_std)
        for rows in result["auto"]
    )
    if not same or requests > 1:
        result["auto"] = []
    for rows in result["auto"]:
        rows[0] |= {"predicted": planned.predicted_rounds, "interval": list(planned.predicted_interval or ())}


def total(rows: list[dict[str, Any]]) -> int:
    """Rounds over a sequence."""
    return sum(row["rounds"] for row in rows)


def mean_total(repeats: list[list[dict[str, Any]]]) -> float:
    """The mean over repeats of the rounds over a sequence."""
    return float(statistics.mean(total(repeat) for repeat in repeats))


def needs_more(found: list[list[dict[str, Any]]], repeats: int, each: bool = False) -> bool:
    """Whether another draw is wanted: there are fewer than `repeats`, or their mean is not known well enough.

    With `each` that of every request of a sequence, since predictions are judged one by one.
    """
    if len(found) < repeats or repeats == 1:
        return len(found) < repeats
    judged = [[total(one) for one in found]]
    if each:
        judged += [[one["rounds"] for one in same] for same in zip(*found, strict=True)]
    unsure = any(
        statistics.stdev(rounds) / math.sqrt(len(rounds)) > PRECISION * statistics.mean(rounds) for rounds in judged
    )
    return len(found) < MOST_REPEATS * repeats and unsure


def judged_best(grid: dict[float, list[list[dict[str, Any]]]]) -> tuple[float, float]:
    """Sigma and mean rounds of the grid's best: chosen by every second draw, judged by the others, both ways round."""
    known = {sigma: found for sigma, found in grid.items() if len(found) > 1}
    chosen = min(known or grid, key=lambda sigma: (mean_total(grid[sigma]), sigma))
    if not known:
        return chosen, mean_total(grid[chosen])
    halves = []
    for first in (0, 1):
        best = min(known, key=lambda sigma: (mean_total(known[sigma][first::2]), sigma))
        halves.append(mean_total(known[best][1 - first :: 2]))
    return chosen, statistics.mean(halves)


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    task: str
    scratch: float
    best_sigma: float
    best: float
    auto_sigma: float
    auto: float
    predicted: float | None
    within: int
    predictions: int
    covered: float
    planning: float

    @staticmethod
    def of(result: dict[str, Any]) -> Line:
        """From what was measured."""
        tried = {float(sigma): found for sigma, found in result["grid"].items() if found}
        best_sigma, best = judged_best(tried) if tried else (float("nan"), float("nan"))
        autos = [row for rows in result["auto"] for row in rows]
        inside = [auto["interval"][0] <= auto["rounds"] <= auto["interval"][1] for auto in autos if auto["interval"]]
        pairs = [
            (statistics.mean(one["predicted"] for one in same), statistics.mean(one["rounds"] for one in same))
            for same in zip(*result["auto"], strict=True)
            if all(one["predicted"] is not None for one in same)
        ]
        within = sum(1 for guess, real in pairs if ratio_within(guess, real))
        sums = [sum(row["predicted"] or 0 for row in rows) for rows in result["auto"]]
        return Line(
            result["task"],
            mean_total(result["scratch"]),
            best_sigma,
            best,
            autos[0]["sigma"],
            mean_total(result["auto"]),
            statistics.median(sums) if pairs else None,
            within,
            len(pairs),
            statistics.mean(inside) if inside else float("nan"),
            statistics.median(auto["planning"] for auto in autos if "planning" in auto),
        )


def ratio_within(guess: float, real: float, factor: float = 1.5) -> bool:
    """Whether a prediction is within a factor of the truth; a round more or less never counts against it."""
    low, high = sorted((max(guess, 1.0), max(real, 1.0)))
    return high <= factor * low or high - low <= 1.0


def table(lines: list[Line]) -> str:
    """The table in Markdown."""
    rows = [
        "| task | Scratch | best of grid (sigma) | auto (first sigma) | auto / best | auto / Scratch | predicted "
        "| within 1.5x | in interval | planning |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in lines:
        rows.append(
            f"| {one.task} | {one.scratch:g} "
            f"| {one.best:.1f} ({one.best_sigma:.3g}) "
            f"| {one.auto:.1f} ({one.auto_sigma:.3g}) "
            f"| {one.auto / max(one.best, 1):.2f} | {one.auto / max(one.scratch, 1):.2f} "
            f"| {one.predicted if one.predicted is not None else '-'} | {one.within} of {one.predictions} "
            f"| {one.covered:.0%} | {one.planning:.2f} s |"
        )
    ratios = sorted(line.auto / max(line.best, 1.0) for line in lines)
    if ratios:
        within, all_ = sum(line.within for line in lines), sum(line.predictions for line in lines)
        rows += [
            "",
            f"auto / best: median {statistics.median(ratios):.2f}, worst {ratios[-1]:.2f}; auto / Scratch: worst "
            f"{max(one.auto / max(one.scratch, 1) for one in lines):.2f}; predictions within a factor 1.5: "
            f"{within} of {all_}.",
        ]
    return "\n".join(rows)


def draw(results: list[dict[str, Any]], file: Path) -> None:
    """Rounds against sigma, one panel a task: means of fixed sigmas, Scratch, and auto with the spread of its draws."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    columns = min(4, len(results))
    lines = -(-len(results) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(3.6 * columns, 2.7 * lines), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(results) :]:
        axis.set_visible(False)
    for axis, result in zip(axes.flat, results, strict=False):
        whole = {
            float(sigma): [rows for rows in found if not rows[0].get("stopped")]
            for sigma, found in result["grid"].items()
        }
        # What was stopped has no mean: a gap in the line.
        means = {sigma: mean_total(found) if found else math.nan for sigma, found in sorted(whole.items())}
        axis.plot(list(means), list(means.values()), "o-", color="#4477aa", ms=4, lw=1, label="fixed sigma")
        axis.axhline(mean_total(result["scratch"]), color="#888888", ls="--", lw=1, label="Scratch")
        totals = [total(rows) for rows in result["auto"]]
        chosen = statistics.median(rows[0]["sigma"] for rows in result["auto"]) or min(whole)
        low, high = np.quantile(totals, [0.1, 0.9])
        axis.plot([chosen, chosen], [max(low, 1), max(high, 1)], color="#cc3311", lw=2, alpha=0.5)
        axis.plot([chosen], [statistics.mean(totals)], "*", color="#cc3311", ms=12, label="auto (bar: 10 to 90 %)")
        axis.set(xscale="log", yscale="log", title=result["task"], xlim=(min(whole) / 1.3, max(whole) * 1.3))
        axis.title.set_fontsize(9)
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.2)
    axes.flat[0].legend(fontsize=7, loc="best")
    figure.supxlabel("sigma (of the first request)", fontsize=10)
    figure.supylabel("rounds to the target, mean", fontsize=10)
    figure.savefig(file, dpi=130)
    plt.close(figure)


BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def write_page(page: Path, results: list[dict[str, Any]], made: str) -> None:
    """Put the table between the page's marks and the figure beside it."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    content = f"{BEGIN}\n{made}\n\n{table([Line.of(one) for one in results])}\n{END}"
    page.write_text(before + content + after, encoding="utf-8")
    (page.parent / "images").mkdir(exist_ok=True)
    draw(results, page.parent / "images" / "noise-choice.png")


def where() -> str:
    """Hardware, date and commit, in one line."""
    return f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} cores, CPU only, commit {commit()}"


def main() -> None:
    """Measure what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with MNIST and FashionMNIST")
    parser.add_argument("--runs", type=Path, default=Path("noise-choice-runs"), help="where trained runs are kept")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="tasks measured at the same time")
    parser.add_argument("--only", help="tasks whose name contains this")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--page", type=Path, help="only write the table and figure of the results into this page")
    options = parser.parse_args()
    content = json.loads(options.results.read_text()) if options.results.exists() and not options.smoke else {}
    if options.page:
        order = [task.name for task in TASKS]
        known = [content["tasks"][name] for name in order if name in content["tasks"]]
        write_page(options.page, known, content["where"])
        return
    if options.smoke:
        options.runs, options.repeats = Path(tempfile.mkdtemp()), 1
    tasks = tuple(one for one in (SMOKE if options.smoke else TASKS) if (options.only or "") in one.name)
    known: dict[str, Any] = content.get("tasks", {})
    options.runs.mkdir(parents=True, exist_ok=True)
    work = [Work(task, options.runs, options.data, options.repeats) for task in tasks]
    with multiprocessing.get_context("spawn").Pool(options.jobs) if options.jobs > 1 else nullcontext() as pool:
        for name, result in pool.imap_unordered(carry_through, work) if pool else map(carry_through, work):
            known[name] = result
            if not options.smoke:
                options.results.parent.mkdir(parents=True, exist_ok=True)
                options.results.write_text(json.dumps({"where": where(), "tasks": known}, indent=1))
            print(table([Line.of(result)]).splitlines()[2], flush=True)
    order = [task.name for task in TASKS]
    measured = sorted(known.values(), key=lambda one: order.index(one["task"]) if one["task"] in order else -1)
    print()
    print(table([Line.of(one) for one in measured if one["auto"] and one["scratch"]]))


@dataclass(frozen=True)
class Work:
    """One task for one process."""

    task: Task
    runs: Path
    data: Path | None
    repeats: int


def carry_through(work: Work) -> tuple[str, dict[str, Any]]:
    """Measure what is missing of a task; what was found lies beside its run, so that nothing is measured twice."""
    half_way = work.runs / f"{folder_name(work.task)}.json"
    result: dict[str, Any] = json.loads(half_way.read_text()) if half_way.exists() else {}
    for found in measure(work.task, work.runs, work.data, work.repeats, result):
        result = found
        half_way.write_text(json.dumps(result))
    return work.task.name, result


if __name__ == "__main__":
    main()
