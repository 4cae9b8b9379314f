"""Run of an experiment: a data set and a seed at a time, or several at once; it can be interrupted at any point.

Every data set and seed has a table of its own in DIR/parts, which says what is done; DIR/results.csv puts them
together. What fails is recorded in DIR/failures.txt, and the others go on.
"""

from __future__ import annotations

import itertools
import shutil
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

from sifu_paper.experiment import Options
from sifu_paper.experiments import experiment_named
from sifu_paper.provenance import provenance, record
from sifu_paper.table import Row, Table, read_table, write_table

TABLE, FAILURES = "results.csv", "failures.txt"


@dataclass(frozen=True)
class Result:
    """Rows of an experiment, and the errors of what failed by its name."""

    rows: list[Row]
    failures: dict[str, str]


def run(options: Options, command: tuple[str, ...], jobs: int = 1, say: Callable[[str], None] = print) -> Result:
    """Do what is missing; an interrupt loses no finished request."""
    experiment = experiment_named(options.name)
    options.out.mkdir(parents=True, exist_ok=True)
    asked = {"experiment": options.name, "scale": options.scale, "max_rounds": options.max_rounds}
    record(options.out, asked, provenance(options.device, command))
    units = list(itertools.product(options.datasets or experiment.datasets, options.seeds))
    failures: dict[str, str] = {}
    if jobs == 1:
        for unit in units:
            _keep_error(failures, unit, partial(run_unit, options, *unit, say))
    else:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            waiting = {pool.submit(run_unit, options, *unit): unit for unit in units}
            for done in as_completed(waiting):
                _keep_error(failures, waiting[done], done.result)
                say(f"{waiting[done][0]}, seed {waiting[done][1]}: done")
    rows = [row for path in sorted((options.out / "parts").glob("*.csv")) for row in read_table(path)]
    write_table(options.out / TABLE, rows)
    (options.out / FAILURES).unlink(missing_ok=True)
    if failures:
        (options.out / FAILURES).write_text("\n".join(f"{unit}\n{trace}" for unit, trace in failures.items()))
    else:
        shutil.rmtree(options.out / "unfinished", ignore_errors=True)
    return Result(rows, failures)


def run_unit(options: Options, dataset: str, seed: int, say: Callable[[str], None] = print) -> None:
    """Do what is missing of one data set and seed."""
    experiment = experiment_named(options.name)
    table = Table(options.out / "parts" / f"{dataset}-{seed}.csv")
    experiment.run(experiment, options, dataset, seed, table, say)


def _keep_error(failures: dict[str, str], unit: tuple[str, int], work: Callable[[], None]) -> None:
    try:
        work()
    except Exception:
        failures[f"{unit[0]}, seed {unit[1]}"] = traceback.format_exc()
