"""Tables and figures of the results for each kind of machine."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from peers.environments import ROOT
from peers.roofline import WORK
from peers.workloads import SETTINGS

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
Rows = list[list[str]]


@dataclass(frozen=True)
class Measured:
    """One contestant on one workload; `problem` explains a missing figure."""

    key: str
    title: str
    workload: str
    peer: bool
    threads: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    check: dict[str, float] = field(default_factory=dict)
    rounds_a_second: tuple[float, ...] = ()
    problem: str | None = None

    def with_run(self, report: dict[str, Any]) -> Measured:
        """Return the measurement with another repeat added."""
        if "problem" in report:
            return replace(self, problem=report["problem"])
        return replace(self, rounds_a_second=(*self.rounds_a_second, 1 / report["seconds_a_round"]))

    @property
    def median(self) -> float:
        """Median of the repeats."""
        return statistics.median(self.rounds_a_second)

    def said(self) -> str:
        """Return the outcome of the check in words."""
        if self.problem:
            return self.problem
        return f"{self.threads} threads, loss {self.check['loss']:.4f}, moved {self.check['moved']:.4f}"

    @property
    def version(self) -> str:
        """Version of the contestant, or torch's version for sifu and the plain loop."""
        name, version = next(iter(self.versions.items()), ("", ""))
        return version if self.peer else f"{name} {version}"


@dataclass(frozen=True)
class Results:
    """One run of the comparison."""

    date: str
    commit: str
    hardware: dict[str, Any]
    repeats: int
    seconds: float
    data: dict[str, str]
    peaks: dict[str, float]
    measured: tuple[Measured, ...]

    def of(self, workload: str) -> list[Measured]:
        """Return the contestants on a workload, fastest first, and those without a figure last."""
        rows = [row for row in self.measured if row.workload == workload]
        return sorted(rows, key=lambda row: (row.problem is not None, -row.median if not row.problem else 0.0))

    @property
    def where(self) -> str:
        """Hardware, date and commit in a sentence."""
        machine = f"{self.hardware['cores']} cores of {self.hardware['processor']}, {self.hardware['system']}"
        return f"{machine}, Python {self.hardware['python']}; {self.date}, commit {self.commit}"


def write_results(results: Results, path: Path) -> None:
    """Write the results as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(results), indent=1) + "\n", encoding="utf-8")


def results_of(machine: str) -> Path:
    """Return the file with the latest results of a kind of machine, as `platform.machine` names it."""
    return RESULTS / f"cpu-{machine}.json"


def figure_of(machine: str) -> Path:
    """Return the file of a machine's figure."""
    return ROOT / "docs" / "images" / f"speed-{machine}.png"


def machines() -> list[str]:
    """Return the kinds of machine with results."""
    return sorted(path.stem.removeprefix("cpu-") for path in RESULTS.glob("cpu-*.json"))


def read_results(path: Path) -> Results:
    """Read results as `write_results` wrote them."""
    values = json.loads(path.read_text(encoding="utf-8"))
    rows = tuple(
        Measured(**{**row, "rounds_a_second": tuple(row["rounds_a_second"])}) for row in values.pop("measured")
    )
    return Results(**values, measured=rows)


def headline_rows(results: Results) -> tuple[list[str], Rows]:
    """Return rounds per second with their spread, relative to the plain loop and to the fastest peer."""
    heads = ["workload", "contestant", "version", "threads", "rounds/s", "min..max", "x plain", "x fastest peer"]
    rows = []
    for workload in results.data:
        contestants = results.of(workload)
        good = [row for row in contestants if not row.problem]
        plain = next((row.median for row in good if row.key == "plain"), None)
        peer = max((row.median for row in good if row.peer), default=None)
        for row in contestants:
            if row.problem:
                rows.append([workload, row.title, row.version, "", row.problem, "", "", ""])
                continue
            spread = f"{_short(min(row.rounds_a_second))}..{_short(max(row.rounds_a_second))}"
            ratios = [f"{row.median / base:.2f}" if base else "" for base in (plain, peer)]
            rows.append([workload, row.title, row.version, str(row.threads), _short(row.median), spread, *ratios])
    return heads, rows


def roofline_rows(results: Results) -> tuple[list[str], Rows]:
    """Return operations and bytes of a round, the rounds per second they allow, and the share that sifu reaches."""
    heads = ["workload", "form", "GFLOP", "MB", "FLOP/byte", "limit", "rounds/s at most", "ours of it"]
    rows: Rows = []
    if not results.peaks:
        return heads, rows
    flops, bandwidth = results.peaks["sgemm_flops"], results.peaks["bytes_a_second"]
    for work in WORK:
        if work.setting not in results.data:
            continue
        most = 1 / work.bound(flops, bandwidth)
        ours = next((row.median for row in results.of(work.setting) if row.key == "ours" and not row.problem), None)
        limit = "arithmetic" if work.operations / flops > work.bytes / bandwidth else "memory"
        rows.append(
            [
                work.setting,
                work.form,
                f"{work.operations / 1e9:.3g}",
                f"{work.bytes / 1e6:.3g}",
                f"{work.operations / work.bytes:.0f}",
                limit,
                _short(most),
                f"{ours / most:.1%}" if ours else "",
            ]
        )
    return heads, rows


def cost_of_tracking(results: Results) -> str:
    """Return the cost of tracking per round in words, from the medians."""
    parts = []
    for workload in results.data:
        medians = {row.key: row.median for row in results.of(workload) if not row.problem}
        if {"ours", "ours-tracking"} <= medians.keys():
            parts.append(f"{100 * (medians['ours'] / medians['ours-tracking'] - 1):+.0f} % on {workload}")
    return "Tracking (Psi of every client, kept models) adds to a round: " + ", ".join(parts) + "." if parts else ""


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def show(title: str, heads: list[str], rows: Rows) -> None:
    """Print a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number < 3 else "right")
    grouped = len({row[0] for row in rows}) < len(rows)
    for before, row in zip([None, *rows], rows, strict=False):
        if grouped and before and before[0] != row[0]:
            table.add_section()
        table.add_row(*row)
    Console(width=140).print(table)


def draw(results: Results, path: Path) -> None:
    """Draw bars of rounds per second, sifu's in another colour, with the spread of the repeats as a line."""
    from sifu.plots.style import BLUE, FAINT, GREY, ORANGE, figure_bytes, figure_style, headline, new_figure

    with figure_style():
        figure = new_figure(0.9 + 2.4 * len(results.data))
        panels = figure.subplots(len(results.data), 1, squeeze=False)[:, 0]
        for axes, workload in zip(panels, results.data, strict=True):
            rows = [row for row in results.of(workload) if not row.problem][::-1]
            for place, row in enumerate(rows):
                colour = BLUE if row.key.startswith("ours") else GREY if row.key == "plain" else ORANGE
                low, high = min(row.rounds_a_second), max(row.rounds_a_second)
                axes.barh(place, row.median, color=colour, height=0.7)
                axes.plot([low, high], [place, place], color="black", linewidth=1)
                axes.annotate(_short(row.median), (high, place), (4, 0), textcoords="offset points", va="center")
            axes.set_yticks(range(len(rows)), [row.title for row in rows])
            axes.set_xlim(0, 1.12 * max(max(row.rounds_a_second) for row in rows))
            axes.set_title(f"{workload}: {_title(workload)}", loc="left")
            axes.tick_params(length=0)
            axes.grid(True, axis="x", color=FAINT, linewidth=0.6)
            axes.set_axisbelow(True)
        panels[-1].set_xlabel(
            f"rounds a second, training only: median of {results.repeats} interleaved runs, line: min to max\n"
            f"{results.hardware['cores']} cores, {results.date}, commit {results.commit}"
        )
        headline(figure, _message(results))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(figure_bytes(figure, "png"))


def _title(workload: str) -> str:
    return SETTINGS[workload].title


def _message(results: Results) -> str:
    """Return the figure's headline: the speed relative to the fastest peer."""
    parts = []
    for workload in results.data:
        good = [row for row in results.of(workload) if not row.problem]
        peer = max((row.median for row in good if row.peer), default=None)
        ours = next((row.median for row in good if row.key == "ours-tracking"), None)
        if peer and ours:
            parts.append(f"{ours / peer:.1f}x on {workload}")
    return "sifu with tracking, against the fastest peer: " + ", ".join(parts) if parts else "Rounds a second"


def report() -> None:
    """Print the tables, and draw the figures of docs/performance.md."""
    for machine in machines():
        results = read_results(results_of(machine))
        show(machine, *headline_rows(results))
        show("how far from the hardware", *roofline_rows(results))
        print(cost_of_tracking(results))
        draw(results, figure_of(machine))
