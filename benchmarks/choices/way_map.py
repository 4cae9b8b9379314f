"""Map of the method that took the fewest rounds, by numbers of clients and parameters.

Every mark is measured: `scale.csv` (a linear model on MNIST, noise against Scratch at epsilon 10), `sequential.csv`
(the paper's five tasks by sifu's rules), `groups.csv` (networks by groups), all in paper/results, and
`benchmarks/results/closed_form.json` (heads in closed form). A method wins a place if its median over tasks is the
smallest there and at most nine tenths of Scratch's rounds.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from sifu.core.spec.run_spec import separate_rounds
from sifu.engines.sim.networks import CONV_NETS
from sifu.plots.style import BLUE, GREEN, GREY, INK, ORANGE, figure_bytes, new_figure, styled
from sifu.theory.calibration import exact_multiplier
from sifu.theory.participation import Participation
from sifu_paper.group_trials import USUAL_STRETCH
from sifu_paper.plots.group_cases import Case, cases_of
from sifu_paper.reading import title_of
from sifu_paper.settings import load_experiment, run_spec
from sifu_paper.table import Row, read_table

ROOT = Path(__file__).resolve().parents[2]
FIGURE = ROOT / "docs" / "images" / "ways.png"
TABLES = ROOT / "paper" / "results"
CLOSED_FORM = ROOT / "benchmarks" / "results" / "closed_form.json"
EPSILON, DELTA, CLASSES = 10.0, 0.01, 10
WINS = 0.9
"""Largest share of Scratch's rounds with which a method wins."""
INPUTS = {"mnist": 784, "cifar10": (3, 32, 32), "cifar100": (3, 32, 32), "fashion_mnist": (1, 28, 28),
          "celeba": (3, 32, 32)}  # fmt: skip
OUTPUTS = {"cifar100": 100, "celeba": 2}
MARKS = {
    "noise": ("o", BLUE, "sifu with noise"),
    "groups": ("s", ORANGE, "groups that merge"),
    "closed form": ("D", GREEN, "a head in closed form"),
    "scratch": ("x", INK, "nothing beats Scratch"),
}
"""Mark, colour and label of each method; the marks differ without colours, too."""


@dataclass(frozen=True)
class Measured:
    """A method on one task, with its rounds as a share of Scratch's."""

    clients: int
    parameters: int
    way: str
    share: float
    task: str


@dataclass(frozen=True)
class Place:
    """Measurements for a number of clients and parameters: the winning method, and its shares on all tasks."""

    clients: int
    parameters: int
    way: str
    shares: tuple[float, ...]
    tasks: tuple[str, ...]

    @property
    def label(self) -> str:
        """Range of the shares in per cent."""
        low, high = (f"{100 * share:.0f}" for share in (min(self.shares), max(self.shares)))
        return f"{low} %" if low == high else f"{low}-{high} %"


def parameters_of(dataset: str) -> int:
    """Return the number of parameters of a data set's model in the experiments."""
    shape, outputs = INPUTS[dataset], OUTPUTS.get(dataset, CLASSES)
    if isinstance(shape, int):
        return (shape + 1) * outputs
    spec, _ = run_spec(load_experiment("sequential"), dataset, "ours", 1, "paper")
    return CONV_NETS[spec.model.kind](shape, outputs).parameters


def settings_of(row: Row) -> dict[str, str]:
    """Return the settings that a row's variant states."""
    return dict(part.split("=", 1) for part in row["variant"].split())


def noise_by_scale(rows: Sequence[Row]) -> Iterable[Measured]:
    """Yield a linear model with noise chosen at the request: first requests of one client, or else of ten."""
    rounds: dict[tuple[int, str, str], list[int]] = {}
    for row in rows:
        settings = settings_of(row)
        usual = float(settings.get("epsilon", EPSILON)) == EPSILON and settings.get("sigma_scale", "auto") == "auto"
        if row["method"] in ("sifu", "scratch") and usual:
            key = (int(settings["clients"]), settings["requests"], row["method"])
            rounds.setdefault(key, []).append(row["rounds"])
    for clients in sorted({clients for clients, _, _ in rounds}):
        for requests in ("1x10", "10"):
            ways = [rounds.get((clients, requests, method)) for method in ("sifu", "scratch")]
            if ways[0] and ways[1]:
                share = statistics.mean(ways[0]) / statistics.mean(ways[1])
                yield Measured(clients, parameters_of("mnist"), "noise", share, "MNIST, linear")
                break


def noise_by_task(rows: Sequence[Row]) -> Iterable[Measured]:
    """Yield the paper's tasks with 100 clients: first requests of SIFU by our rules against Scratch
    of the same seeds.
    """
    first = [row for row in rows if row["request"] == 1]
    for dataset in dict.fromkeys(row["dataset"] for row in first):
        ours, scratch = (
            {row["seed"]: row["rounds"] for row in first if (row["dataset"], row["method"], row["preset"]) == key}
            for key in ((dataset, "sifu", "ours"), (dataset, "scratch", "paper"))
        )
        shares = [ours[seed] / scratch[seed] for seed in ours if seed in scratch]
        if shares:
            task = "one class" if dataset == "mnist" else title_of(dataset)
            yield Measured(100, parameters_of(dataset), "noise", statistics.median(shares), task)


def by_groups(rows: Sequence[Row]) -> Iterable[Measured]:
    """Yield groups with one leaver; of the settings tried on a task, the one nearest to the rule."""
    tasks: dict[Any, list[Case]] = {}
    for case in cases_of(rows):
        if case.leavers == 1:
            tasks.setdefault(case.task, []).append(case)
    for task, cases in tasks.items():
        moved = [case for case in cases if case.stretch == USUAL_STRETCH] or cases
        rate = Participation.parse(task.participation).rate
        usual = min(moved, key=lambda case: abs(case.separate - separate_rounds(case.length, rate)))
        share = statistics.median(request.rounds / request.scratch for request in usual.requests)
        yield Measured(int(task.clients), parameters_of(task.dataset), "groups", share, title_of(task.dataset))


def in_closed_form(content: dict[str, Any]) -> Iterable[Measured]:
    """Yield heads in closed form, which need no round: whole runs of 100 clients, and sums over more."""
    for run in content["runs"]:
        if run["level"] == "exact":
            yield Measured(100, run["features"] * CLASSES, "closed form", float(run["rounds"]), "head")
    for federation in content["federations"][1:]:  # the first has 100 clients, like the whole runs
        parameters = federation["features"] * CLASSES
        yield Measured(federation["clients"], parameters, "closed form", 0.0, "head")


def measured_points() -> list[Measured]:
    """Return all measurements of the committed tables."""
    scale, sequential, groups = (read_table(TABLES / f"{name}.csv") for name in ("scale", "sequential", "groups"))
    closed = json.loads(CLOSED_FORM.read_text())
    return [*noise_by_scale(scale), *noise_by_task(sequential), *by_groups(groups), *in_closed_form(closed)]


def places_of(points: Iterable[Measured]) -> list[Place]:
    """Return the method with the smallest median share at each place, or Scratch if that exceeds `WINS`."""
    by_place: dict[tuple[int, int], list[Measured]] = {}
    for point in points:
        by_place.setdefault((point.clients, point.parameters), []).append(point)
    places = []
    for (clients, parameters), here in sorted(by_place.items()):
        ways = {way: tuple(p.share for p in here if p.way == way) for way in dict.fromkeys(p.way for p in here)}
        way, shares = min(ways.items(), key=lambda entry: statistics.median(entry[1]))
        if statistics.median(shares) > WINS:
            way, shares = "scratch", (1.0,)
        places.append(Place(clients, parameters, way, shares, tuple(dict.fromkeys(p.task for p in here))))
    return places


def _has_one_right_above(place: Place, places: Sequence[Place]) -> bool:
    """Return whether another mark is so close above that the label must go below this one."""
    return any(other.clients == place.clients and 1.0 < other.parameters / place.parameters < 1.2 for other in places)


@styled
def draw(places: Sequence[Place]) -> Figure:
    """Draw the map."""
    figure = new_figure(4.8)
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.set_yscale("log")
    for way, (mark, colour, words) in MARKS.items():
        here = [place for place in places if place.way == way]
        axes.plot([p.clients for p in here], [p.parameters for p in here], mark, color=colour, markersize=8,
                  markeredgecolor=INK, markeredgewidth=1.6 if mark == "x" else 0.6, linestyle="none",
                  label=words)  # fmt: skip
        for place in here:
            at, low = (place.clients, place.parameters), _has_one_right_above(place, places)
            if way != "scratch":
                axes.annotate(place.label, at, xytext=(0, -15 if low else 7), ha="center",
                              textcoords="offset points", fontsize=7.5)  # fmt: skip
            if way in ("scratch", "groups"):
                axes.annotate(", ".join(place.tasks), at, xytext=(-8, -7 if low else -1), ha="right", color=GREY,
                              textcoords="offset points", fontsize=7)  # fmt: skip
    sizes = [10.0**power for power in (3.6, 6.4)]
    multiplier = exact_multiplier(EPSILON, DELTA)
    axes.plot([multiplier * math.sqrt(size) for size in sizes], sizes, color=GREY, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.annotate(r"clients $= s\sqrt{d}$", (multiplier * math.sqrt(1.6e6), 1.6e6), xytext=(-6, 4), color=GREY,
                  textcoords="offset points", fontsize=7.5, ha="right")  # fmt: skip
    axes.set_xlim(25, 25_000)
    axes.set_ylim(4e3, 2.5e6)
    axes.set_xlabel("clients")
    axes.set_ylabel("parameters")
    axes.legend(loc="upper right", title="fewest rounds to forget one client", title_fontsize=8.5, alignment="left")
    return figure


def write_map() -> None:
    """Write the figure of docs/guide.md from the committed tables, and print its points."""
    places = places_of(measured_points())
    FIGURE.write_bytes(figure_bytes(draw(places), "png"))
    for place in places:
        named = f"{place.clients:6d} clients, {place.parameters:8d} parameters ({', '.join(place.tasks)})"
        print(f"{named}: {place.way} {place.label}")
