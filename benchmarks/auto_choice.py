"""`--method auto` against every single method on small runs: linear models and networks, few and many clients.

    python benchmarks/auto_choice.py            all runs, a few minutes; what lies in --results is not run again
    python benchmarks/auto_choice.py --report   only print the table

Each run is trained once and asked once. Every method that the run allows at the level asked for is planned by its name,
and its plan is carried out beside the run: the model it starts from, then rounds without whoever asks, to the target.
What draws noise is repeated `--draws` times and judged by its mean. Ways that all start from a model that nobody
touched (scratch, sifu back at the beginning, groups that are all hit) differ by the initial model alone: they share
their draws. `auto` takes one of these methods; the ratio is that method's rounds over the fewest of any (both plus one,
since none at all is possible).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from sifu.api import Run, train
from sifu.choices import LEVELS
from sifu.core.engine import Engine
from sifu.core.method_info import CLOSED_FORM
from sifu.experiments.provenance import commit
from sifu.methods.registry import method_named
from sifu.methods.ways import plan_request
from sifu.planning.plan import Plan
from sifu.record.run_view import RunView
from sifu.record.unrecorded_training import retrain_unrecorded
from sifu.requests.given_terms import make_terms

RESULTS = Path(__file__).resolve().parent / "results" / "auto_choice.json"
LARGEST_RATIO = 1.2
"""What `auto` may take more than the best single method."""


@dataclass(frozen=True)
class Case:
    """A run, who asks it to be forgotten, and the least level asked for."""

    name: str
    spec: dict[str, Any]
    leaving: int = 1
    level: Any = None
    terms: dict[str, Any] = field(default_factory=dict)


def digits(clients: int, samples: int, target: float, **sections: Any) -> dict[str, Any]:
    """A federation of 8x8 digits; `sections` replace keys of the spec's."""
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
    """Groups that train apart."""
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


def rounds_of(view: RunView, engine: Engine, plan: Plan) -> int:
    """Rounds that a plan takes, carried out beside the run."""
    method = method_named(plan.terms.method)
    if method.info.name == CLOSED_FORM:
        return plan.predicted_rounds or 0
    start = method.starting_model(view, plan, engine)
    active = np.setdiff1d(view.active, view.indices(plan.terms.clients))
    stop = plan.terms.stop(view.spec.stop)
    # The rounds that making the starting model took belong to the request (fed_eraser's calibration).
    left = replace(stop, max_rounds=max(1, stop.max_rounds - start.rounds))
    return start.rounds + retrain_unrecorded(engine, active, left, plan.order, start=start.model)[1]


def measure(case: Case, folder: Path, draws: int) -> dict[str, Any]:
    """What every method takes on one run, and which one `auto` takes."""
    run: Run = train(case.spec, run=folder)
    engine = run.engine()
    names = [client.name for client in run.status().clients][: case.leaving]
    with run.reader() as reader:
        view = RunView(reader)
        given = case.terms | ({"min_level": case.level} if case.level else {})
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
        "least_level": chosen.auto.least_level,
        "auto": chosen.terms.method,
        "level": chosen.level,
        "training": run.status().rounds,
        "rounds": rounds,
        "predicted": {way.method: way.rounds for way in chosen.auto.compared},
        "interval": list(chosen.predicted_interval or ()),
    }


def ratio_of(row: dict[str, Any]) -> float:
    """Rounds of the way that `auto` takes over those of the best."""
    means = {method: statistics.mean(rounds) for method, rounds in row["rounds"].items()}
    return float((means[row["auto"]] + 1.0) / (min(means.values()) + 1.0))


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The table in Markdown."""
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
    ratios = sorted(map(ratio_of, rows))
    below = sum(LEVELS.index(row["level"]) < LEVELS.index(row["least_level"]) for row in rows)
    yield ""
    yield (
        f"{len(rows)} runs: auto / best median {statistics.median(ratios):.2f}, worst {ratios[-1]:.2f}; "
        f"{below} below the level asked for."
    )


def main() -> None:
    """Measure what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=6, help="draws of the noise of each plan")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--report", action="store_true", help="only print what is in the results")
    options = parser.parse_args()
    content: dict[str, Any] = json.loads(options.results.read_text()) if options.results.exists() else {"rows": {}}
    for case in () if options.report else CASES:
        if case.name in content["rows"] or options.only not in case.name:
            continue
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            content["rows"][case.name] = measure(case, Path(folder) / "run", options.draws)
        content["made"] = f"{time.strftime('%Y-%m-%d')}, commit {commit()}"
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(content, indent=1))
        print(list(table([content["rows"][case.name]]))[2], f"{time.perf_counter() - started:.0f} s", flush=True)
    order = [case.name for case in CASES]
    rows = sorted(content["rows"].values(), key=lambda row: order.index(row["case"]))
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
