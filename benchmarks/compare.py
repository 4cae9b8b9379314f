"""Rounds per second on the same work: sifu, a plain PyTorch loop, pfl-research, fluke, FedLab and Flower.

Two workloads, training only, float32, FedAvg:
  A  MNIST softmax regression, 10 of 100 clients per round, one class per client, 100 samples each, 10 full-batch steps
  B  the CIFAR-10 CNN of the paper, 5 of 100 clients per round, 100 samples each, 5 steps of batch 20, momentum 0.9

Steps of a run:
  1. writes both workloads to .bench/workloads: real data if SIFU_DATA or --data names a folder with mnist.npz and
     cifar10.npz (or the official files), synthetic data of the same shape otherwise;
  2. runs each contestant once for each number of threads and checks its work: the number of samples trained on, the
     loss and the movement of the model must agree with the plain loop;
  3. runs all contestants in turn, with each number of threads, each in a fresh process with its own environment, and
     repeats the list;
  4. prints medians with their spread, of each contestant's faster number of threads, writes
     benchmarks/results/cpu-MACHINE.json, draws docs/images/speed-MACHINE.png (MACHINE as aarch64 or x86_64).

A contestant that cannot be installed, fails or does other work is reported as such.

Examples:
  make bench                                                    everything, environments included
  python benchmarks/compare.py --only ours plain --repeats 3     a quick look, nothing to install
  python benchmarks/compare.py --workloads A --seconds 1         one workload
  python benchmarks/compare.py --report                          only the tables and the figures of docs/performance.md
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from peers import workloads
from peers.environments import CONTESTANTS, FOLDER, ROOT, Contestant, install, last_line
from peers.speed_tables import (
    Measured,
    Results,
    draw,
    figure_of,
    headline_rows,
    report,
    results_of,
    roofline_rows,
    show,
    write_results,
)
from rich.console import Console

from sifu_paper.provenance import commit, processor

BENCHMARKS = ROOT / "benchmarks"
TIME_LIMIT = 300.0
QUICK = 1.0
"""Seconds for each setting if a contestant chooses its own."""
console = Console(stderr=True)


def call(command: list[str]) -> dict[str, Any]:
    """Run a script that prints JSON on its last line; `problem` describes a failure."""
    paths = os.pathsep.join([str(BENCHMARKS), str(ROOT / "src")])
    try:
        # -P keeps peers/ off the path: peers/pfl.py must not hide the package pfl.
        result = subprocess.run(
            [command[0], "-P", *command[1:]],
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"not done after {TIME_LIMIT:.0f} s"}
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if result.returncode or not lines:
        return {"problem": f"failed: {last_line(result.stderr)}"}
    report: dict[str, Any] = json.loads(lines[-1])
    return report


def once(contestant: Contestant, workload: Path, threads: int, seconds: float, *extra: str) -> dict[str, Any]:
    """Run a contestant once."""
    script = str(BENCHMARKS / "peers" / contestant.script)
    options = ["--threads", str(threads), "--seconds", str(seconds)]
    return call([str(contestant.python), script, str(workload), *options, *contestant.options, *extra])


def check(contestant: Contestant, setting: workloads.Setting, workload: Path, threads: int) -> Measured:
    """Check a contestant's work with `threads` threads, without timing it."""
    row = Measured(contestant.key, contestant.title, setting.name, contestant.peer, threads=threads)
    report = once(contestant, workload, threads, QUICK, "--check")
    if "problem" in report:
        return replace(row, problem=report["problem"])
    seen = {key: report[key] for key in ("samples_a_round", "loss", "moved")}
    return replace(row, versions=report["versions"], check=seen)


def fastest(rows: Sequence[Measured]) -> Measured:
    """Return the row of a contestant's fastest number of threads on one workload, or a failed row."""
    return max(rows, key=lambda row: row.median if row.rounds_a_second and not row.problem else -1.0)


def judge(row: Measured, plain: Measured | None, setting: workloads.Setting) -> Measured:
    """Note in `problem` how the work differs from the plain loop's."""
    if row.problem or not plain or not plain.check:
        return row
    # Full batches are deterministic; with mini-batches each contestant shuffles by itself.
    slack = 0.001 if setting.batch == setting.samples else 0.15
    checked, wanted = row.check, plain.check
    if checked["samples_a_round"] != setting.samples_a_round:
        return replace(row, problem=f"other work: {checked['samples_a_round']:g} samples a round")
    for what in ("loss", "moved"):
        if abs(checked[what] - wanted[what]) > slack * wanted[what]:
            return replace(row, problem=f"other work: {what} {checked[what]:.4g}, plain loop {wanted[what]:.4g}")
    return row


def hardware() -> dict[str, Any]:
    """Describe the hardware of this machine."""
    return {
        "processor": f"{processor()} ({platform.machine()})",
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def run(chosen: argparse.Namespace) -> Iterator[Results]:
    """Run the whole comparison, and yield the results after each repeat."""
    measured_commit = commit()  # taken before the results are written, which would count as a change
    contestants = [contestant for contestant in CONTESTANTS if contestant.key in chosen.only]
    problems = {contestant.key: install(contestant) for contestant in contestants} if chosen.install else {}
    files, sources = {}, {}
    for name in chosen.workloads:
        workload = workloads.make(workloads.SETTINGS[name], chosen.data)
        files[name], sources[name] = FOLDER / "workloads" / f"{name}.npz", workload.source
        workloads.save(workload, files[name])
        console.print(f"{name}: {workload.setting.title}; data: {workload.source}")
    measured: dict[tuple[str, str, int], Measured] = {}
    for name in chosen.workloads:
        setting = workloads.SETTINGS[name]
        for contestant in contestants:
            problem = problems.get(contestant.key)
            if not problem and not contestant.python.exists():
                problem = "not installed: run make bench, or compare.py --install"
            for threads in chosen.threads:
                row = Measured(
                    contestant.key, contestant.title, name, contestant.peer, threads=threads, problem=problem
                )
                row = row if problem else check(contestant, setting, files[name], threads)
                measured[name, contestant.key, threads] = row
                console.print(f"checked {contestant.title} on {name}: {row.said()}")
        plain = next((row for (place, key, _), row in measured.items() if (place, key) == (name, "plain")), None)
        for place in [place for place in measured if place[0] == name]:
            measured[place] = judge(measured[place], plain, setting)
    peaks: list[dict[str, float]] = []
    for repeat in range(chosen.repeats):
        peaks.append(call([sys.executable, str(BENCHMARKS / "peers" / "roofline.py")]))
        for name in chosen.workloads:
            # Rotate the order, so that no contestant always follows the same neighbour.
            turn = repeat % len(contestants)
            for contestant in contestants[turn:] + contestants[:turn]:
                for threads in chosen.threads:
                    row = measured[name, contestant.key, threads]
                    if not row.problem:
                        report = once(contestant, files[name], threads, chosen.seconds)
                        measured[name, contestant.key, threads] = row.with_run(report)
        console.print(f"repeat {repeat + 1} of {chosen.repeats} done")
        good = [peak for peak in peaks if "problem" not in peak]
        yield Results(
            date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            commit=measured_commit,
            hardware=hardware(),
            repeats=repeat + 1,
            seconds=chosen.seconds,
            data=sources,
            peaks={key: max(peak[key] for peak in good) for key in good[0]} if good else {},
            measured=tuple(
                fastest([measured[name, contestant.key, threads] for threads in chosen.threads])
                for name in chosen.workloads
                for contestant in contestants
            ),
        )


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    keys = [contestant.key for contestant in CONTESTANTS]
    cores = os.cpu_count() or 1
    parser.add_argument("--only", nargs="+", choices=keys, default=keys, metavar="NAME", help=", ".join(keys))
    parser.add_argument("--workloads", nargs="+", choices=list(workloads.SETTINGS), default=list(workloads.SETTINGS))
    parser.add_argument("--repeats", type=int, default=5, help="number of repeats of the list (default 5)")
    parser.add_argument("--seconds", type=float, default=3.0, help="timed seconds of each run (default 3)")
    parser.add_argument(
        "--threads",
        type=int,
        nargs="+",
        default=sorted({1, cores}),
        help=f"numbers of threads to choose from (default 1 and {cores})",
    )
    parser.add_argument("--data", help="folder with mnist.npz and cifar10.npz; default: SIFU_DATA, or synthetic data")
    parser.add_argument("--install", action="store_true", help="make the peers' environments under .bench first (pip)")
    parser.add_argument("--no-files", action="store_true", help="only print, without writing results and figure")
    parser.add_argument("--report", action="store_true", help="only print the tables and draw the figures")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write and draw; an interrupted run keeps its finished results."""
    chosen = arguments()
    if chosen.report:
        report()
        return
    for results in run(chosen):
        if not chosen.no_files:
            write_results(results, results_of(platform.machine()))
    show("Rounds a second, training only", *headline_rows(results))
    show("Roofline", *roofline_rows(results))
    if not chosen.no_files:
        draw(results, figure_of(platform.machine()))


if __name__ == "__main__":
    main()
