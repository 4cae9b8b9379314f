"""Rounds with `--sigma auto` against a grid of 12 fixed sigmas, and against Scratch.

    python benchmarks/noise_choice.py --data FOLDER       all tasks; what --results has already is kept
    python benchmarks/noise_choice.py --smoke             one small task, a few seconds
    python benchmarks/noise_choice.py --report            only the table of the results

Each task is trained once. Its requests are then executed on copies of the run: by Scratch, `--repeats` times with
`auto`, and with each sigma of the grid (the same one for every request of a sequence). The four best of the grid are
repeated as well. Rounds are summed over the requests, and means over the repeats are compared. The best of the grid is
chosen by half of its draws and judged by the other half, and the other way round; judged by the draws that chose it, it
would mostly be the luckiest. The grid is geometric, from 1/40 to 1.6 times the noise that the first request would need
at the last model of training (to 3 times in a sequence). Requests end at 1.5 times the rounds of training.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from choices.noise_choice_tasks import SMOKE, TASKS, Task, clients_of, folder_name

from sifu.api import open_run, train
from sifu.core.engine import Engine
from sifu.core.spec import Spec
from sifu.run.clients_and_engine import engine_from_spec
from sifu_paper.provenance import commit

GRID, CAP = 12, 1.5
CONTENDERS = 4
"""Number of the grid's best points that are repeated, because the best of twelve single draws would mostly be luck."""
PRECISION, MOST_REPEATS = 0.045, 25
"""Repeats continue until the standard error is below this share of the mean, up to this multiple of `--repeats`."""
RESULTS = Path(__file__).resolve().parent / "results" / "noise_choice.json"


def rounds_of(task: Task, trained: Path, engine: Engine, **terms: Any) -> int:
    """Execute a task's requests on a copy of its trained run; return their rounds together."""
    with tempfile.TemporaryDirectory(dir=trained.parent) as folder:
        copy = shutil.copytree(trained, Path(folder) / "run")
        run = open_run(copy, engine=engine)
        requests = task.requested_clients()
        return sum(run.forget(clients, level="none", **terms)[0].rounds for clients in requests)


def measure(task: Task, folder: Path, data: Path | None, repeats: int, result: dict[str, Any]) -> dict[str, Any]:
    """Measure what is missing of a task."""
    engine, _ = engine_from_spec(Spec.from_mapping(task.spec), clients_of(task, data))
    trained = folder / folder_name(task)
    run = train(task.spec, run=trained, engine=engine)
    status = run.status()
    noised = {"method": "sifu", "max_rounds": int(CAP * status.rounds)}
    scratch = result.get("scratch") or rounds_of(task, trained, engine, method="scratch")
    auto = list(result.get("auto", []))
    while needs_more(auto, repeats):
        auto.append(rounds_of(task, trained, engine, sigma="auto", **noised))
    needed = max(client.sigma_needed_now for client in status.clients if client.name in task.requested_clients()[0])
    top = 3.0 if task.requests > 1 else 1.6
    sigmas = np.geomspace(needed / 40.0, needed * top, GRID).tolist()
    grid = result.get("grid") or {repr(s): [rounds_of(task, trained, engine, sigma=s, **noised)] for s in sigmas}
    for sigma in sorted(grid, key=lambda sigma: statistics.mean(grid[sigma]))[:CONTENDERS]:
        while needs_more(grid[sigma], repeats):
            grid[sigma].append(rounds_of(task, trained, engine, sigma=float(sigma), **noised))
    sigma = run.plan(task.requested_clients()[0], method="sifu", sigma="auto").noise_std
    return {"training": status.rounds, "scratch": scratch, "sigma": sigma, "auto": auto, "grid": grid}


def needs_more(rounds: Sequence[int], repeats: int) -> bool:
    """Return whether another draw is needed: there are fewer than `repeats`, or their mean is too uncertain."""
    if len(rounds) < repeats or repeats == 1:
        return len(rounds) < repeats
    error = statistics.stdev(rounds) / math.sqrt(len(rounds))
    return len(rounds) < MOST_REPEATS * repeats and error > PRECISION * statistics.mean(rounds)


def judged_best(grid: Mapping[str, Sequence[int]]) -> tuple[float, float]:
    """Return sigma and mean rounds of the grid's best, chosen by half of the draws and judged by the other."""
    repeated = {sigma: rounds for sigma, rounds in grid.items() if len(rounds) > 1}
    chosen = min(repeated or grid, key=lambda sigma: statistics.mean(grid[sigma]))
    if not repeated:
        return float(chosen), statistics.mean(grid[chosen])
    halves = []
    for first in (0, 1):
        best = min(repeated, key=lambda sigma: statistics.mean(repeated[sigma][first::2]))
        halves.append(statistics.mean(repeated[best][1 - first :: 2]))
    return float(chosen), statistics.mean(halves)


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table in Markdown."""
    rows = [
        "| task | training | Scratch | best of grid (sigma) | auto (sigma) | auto / best |",
        "|---|---|---|---|---|---|",
    ]
    ratios = []
    for name, result in results.items():
        (sigma, best), auto = judged_best(result["grid"]), statistics.mean(result["auto"])
        ratios.append(auto / best)
        rows.append(
            f"| {name} | {result['training']} | {result['scratch']} | {best:.1f} ({sigma:.3g}) "
            f"| {auto:.1f} ({result['sigma']:.3g}) | {ratios[-1]:.2f} |"
        )
    return "\n".join([*rows, "", f"auto / best: median {statistics.median(ratios):.2f}, worst {max(ratios):.2f}"])


def main() -> None:
    """Measure the missing tasks, then print the table."""
    os.environ["SIFU_HEADS"] = os.devnull  # copies of a run may continue
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with MNIST, FashionMNIST, CIFAR-10 and CIFAR-100")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--only", default="", help="tasks whose name contains this")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--report", action="store_true", help="only print the table of the results")
    options = parser.parse_args()
    content = json.loads(options.results.read_text()) if options.results.exists() and not options.smoke else {}
    results: dict[str, Any] = content.get("tasks", {})
    tasks = (
        [] if options.report else [task for task in (SMOKE if options.smoke else TASKS) if options.only in task.name]
    )
    with tempfile.TemporaryDirectory() as folder:
        for task in (task for task in tasks if options.only in task.name):
            repeats = 1 if options.smoke else options.repeats
            results[task.name] = measure(task, Path(folder), options.data, repeats, results.get(task.name, {}))
            if not options.smoke:
                content = {"commit": commit(), "tasks": results}
                options.results.write_text(json.dumps(content, indent=1))
            print(table({task.name: results[task.name]}).splitlines()[2], flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
