"""Comparison of `--method auto` with every single method on small runs: linear models and networks, few and many
clients.

    python benchmarks/auto_choice.py                      all runs, half an hour; rows in --results are kept
    python benchmarks/auto_choice.py --seed 5 --runs 10   other runs, drawn by another seed
    python benchmarks/auto_choice.py --report             only print the table

25 runs were chosen by hand, and a seed draws more (`choices/auto_choice_runs.py`). Each run is trained once and gets
one request. Every method that the run allows at the required level is planned by name, and its plan is executed without
recording it: the starting model, then rounds without the requesting clients, to the target. Methods that draw noise are
repeated `--draws` times and judged by their mean. Methods that start from an untouched model (scratch, sifu back at the
initial model, groups that are all hit) differ only in the initial model, so they share their draws. `auto` chooses one
of these methods; the ratio is that method's rounds over the fewest of any method (both plus one, because zero rounds
are possible).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from choices.auto_choice_runs import CASES, DRAWN_RUNS, DRAWN_SEED, Case, drawn_case

from sifu.api import Run, train
from sifu.choices import LEVELS
from sifu.core.engine import Engine
from sifu.core.method_info import CLOSED_FORM
from sifu.core.spec import Spec
from sifu.errors import RoundRejectedError
from sifu.methods.registry import method_named, plan_request
from sifu.planning.plan import Plan
from sifu.requests.filing import make_terms
from sifu.run.clients_and_engine import clients_from_spec, engine_from_spec
from sifu.run.coupled_replay import retrain_unrecorded
from sifu.run.run_view import RunView
from sifu_paper.provenance import commit

RESULTS = Path(__file__).resolve().parent / "results" / "auto_choice.json"
LARGEST_RATIO = 1.2
"""Largest allowed ratio of the rounds of `auto` to those of the best single method."""


def rounds_of(view: RunView, engine: Engine, plan: Plan) -> int:
    """Return the rounds that a plan takes, executed without recording."""
    method = method_named(plan.terms.method)
    if method.info.name == CLOSED_FORM:
        return plan.predicted_rounds or 0
    start = method.starting_model(view, plan, engine)
    active = np.setdiff1d(view.active, view.indices(plan.terms.clients))
    stop = plan.terms.stop(view.spec.stop)
    # The rounds that made the starting model belong to the request (fed_eraser's calibration).
    left = replace(stop, max_rounds=max(1, stop.max_rounds - start.rounds))
    try:
        return start.rounds + retrain_unrecorded(engine, active, left, plan.order, start=start.model)[1]
    except RoundRejectedError:  # the noise made the network diverge: it never reaches the target
        return stop.max_rounds


def with_target(case: Case) -> dict[str, Any]:
    """Return the spec of a run; if a pilot sets the target, it is the pilot's accuracy rounded down
    to half a percent.
    """
    if case.pilot_rounds == 0:
        return case.spec
    spec = Spec.from_mapping(case.spec)
    engine = engine_from_spec(spec, clients_from_spec(spec))[0]
    stop = replace(spec.stop, target=0.0, max_rounds=case.pilot_rounds, evaluate_every=case.pilot_rounds)
    accuracy = retrain_unrecorded(engine, np.arange(len(engine.clients)), stop, 0)[2]
    return case.spec | {"stop": case.spec["stop"] | {"target": math.floor(200.0 * accuracy) / 200.0}}


def measure(case: Case, folder: Path, draws: int) -> dict[str, Any]:
    """Measure the rounds of every method on one run, and the choice of `auto`."""
    spec = with_target(case)
    run: Run = train(spec, run=folder)
    engine = run.engine()
    names = [client.name for client in run.status().clients][: case.leaving]
    with run.reader() as reader:
        view = RunView(reader)
        given = case.terms | ({"level": case.level} if case.level else {})
        chosen = plan_request(view, make_terms(view, names, given))
        assert chosen.auto is not None
        rounds: dict[str, list[int]] = {}
        untouched: list[str] = []
        drawn: dict[tuple[int | None, float, bool], list[int]] = {}
        for way in chosen.auto.compared:
            if LEVELS.index(way.level) < LEVELS.index(chosen.auto.least_level):
                continue
            plan = plan_request(view, make_terms(view, names, given | {"method": way.method}))
            merges = method_named(way.method).info.starts_from in ("merge", "initial")
            key = (plan.source_node, plan.noise_std, merges)
            if key not in drawn:
                drawn[key] = [rounds_of(view, engine, plan) for _ in range(draws if plan.noise_std else 1)]
            rounds[way.method] = drawn[key]
            if plan.noise_std == 0.0 and plan.source_rounds == 0 and (plan.source_node is None or not merges):
                untouched.append(way.method)
        pooled = [drawn_rounds for method in untouched for drawn_rounds in rounds[method]]
        rounds |= dict.fromkeys(untouched, pooled)
    return {
        "case": case.name,
        "target": spec["stop"]["target"],
        "least_level": chosen.auto.least_level,
        "auto": chosen.terms.method,
        "level": chosen.level,
        "training": run.status().rounds,
        "rounds": rounds,
        "predicted": {way.method: way.rounds for way in chosen.auto.compared},
        "interval": list(chosen.predicted_interval or ()),
    }


def ratio_of(row: dict[str, Any]) -> float:
    """Return the rounds of the method that `auto` chooses, relative to the best."""
    means = {method: statistics.mean(rounds) for method, rounds in row["rounds"].items()}
    return float((means[row["auto"]] + 1.0) / (min(means.values()) + 1.0))


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the table in Markdown."""
    yield "| run | asked | auto takes | level | predicted | took | others took | auto / best |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        auto = row["auto"]
        others = ", ".join(
            f"{method} {statistics.mean(rounds):.3g}" for method, rounds in row["rounds"].items() if method != auto
        )
        predicted = row["predicted"][auto]
        yield (
            f"| {row['case']} | {row['least_level']} | {auto} | {row['level']} "
            f"| {'-' if predicted is None else f'{predicted:.3g}'} | {statistics.mean(row['rounds'][auto]):.3g} "
            f"| {others or '-'} | {ratio_of(row):.2f} |"
        )
    yield ""
    yield summary(rows)


def summary(rows: list[dict[str, Any]]) -> str:
    """Return a one-sentence summary of the table."""
    ratios = sorted(map(ratio_of, rows))
    within = sum(ratio <= LARGEST_RATIO for ratio in ratios)
    below = sum(LEVELS.index(row["level"]) < LEVELS.index(row["least_level"]) for row in rows)
    return (
        f"{len(rows)} runs: auto / best at most {LARGEST_RATIO:g} on {within}, median {statistics.median(ratios):.2f}, "
        f"worst {ratios[-1]:.2f}; {below} below the level asked for."
    )


def main() -> None:
    """Measure the missing runs, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=12, help="noise draws for each plan")
    parser.add_argument("--seed", type=int, default=DRAWN_SEED, help="seed of the random runs")
    parser.add_argument("--runs", type=int, default=DRAWN_RUNS, help="number of random runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--report", action="store_true", help="only print the results")
    options = parser.parse_args()
    content: dict[str, Any] = json.loads(options.results.read_text()) if options.results.exists() else {"rows": {}}
    cases = [*CASES, *(drawn_case(options.seed, number) for number in range(options.runs))]
    for case in () if options.report else cases:
        if case.name in content["rows"] or options.only not in case.name:
            continue
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            content["rows"][case.name] = measure(case, Path(folder) / "run", options.draws)
        content["made"] = f"{time.strftime('%Y-%m-%d')}, commit {commit()}"
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(content, indent=1))
        print(list(table([content["rows"][case.name]]))[2], f"{time.perf_counter() - started:.0f} s", flush=True)
    rows = content["rows"]
    print("\n".join(table([rows[case.name] for case in cases if case.name in rows])))


if __name__ == "__main__":
    main()
