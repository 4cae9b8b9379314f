"""The appendix agrees with its tables, and every number on the page is in a table or recomputed from one."""

from __future__ import annotations

import csv
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from bench_rows import made_up_rows, write_results

from sifu_paper import reading
from sifu_paper.appendix import TABLES, write_appendix
from sifu_paper.comparisons import by_dataset, complete, mean_fewer, our_line, paper_line, reached_gaps
from sifu_paper.letter_settings import Compared, LetterSetting, letter_settings
from sifu_paper.overview import large_federations, standings
from sifu_paper.plots.courses import Line
from sifu_paper.plots.group_cases import USUAL_STRETCH, cases_by_rule, first_trainings_of, sequences_of
from sifu_paper.plots.growing import settings_of
from sifu_paper.reading import before_first_round, courses_of
from sifu_paper.settings import Settings, TrainingSettings, experiment_names, load_experiment, shared_settings
from sifu_paper.sources import sources_in
from sifu_paper.summary import largest_ratio, summarise
from sifu_paper.table import Row
from sifu_paper.trained_to import trainings_of

RESULTS = Path(__file__).resolve().parents[1] / "results"
PAGE = re.sub(r"\s+", " ", (RESULTS / "README.md").read_text(encoding="utf-8"))
MOST_WORDS = 1500


@pytest.fixture
def text_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip figures, which take longer and render text slightly differently on other machines."""
    monkeypatch.setattr("sifu_paper.appendix.figure_bytes", lambda figure, kind: b"")
    monkeypatch.setattr("sifu_paper.appendix.draw_source", lambda source: None)
    monkeypatch.setattr("sifu_paper.appendix.draw_overview", lambda standings: None)


@pytest.mark.usefixtures("text_only")
def test_the_committed_appendix_is_what_its_tables_give(tmp_path: Path) -> None:
    write_appendix([RESULTS], tmp_path)
    written = [path for kind in ("*.md", f"{TABLES}/*.csv") for path in sorted(tmp_path.glob(kind))]
    assert len(written) > 40
    changed = [
        path.name for path in written if path.read_bytes() != (RESULTS / path.relative_to(tmp_path)).read_bytes()
    ]
    assert changed == [], "a table was changed: run sifu-bench appendix paper/results --out paper/results"
    kept = {path.name for path in (RESULTS / TABLES).iterdir()}
    assert kept == {path.name for path in written if path.parent.name == TABLES}


def test_every_column_is_defined() -> None:
    headings = [
        row
        for experiment in map(load_experiment, experiment_names())
        for row in summarise(experiment, made_up_rows(experiment.name, seeds=1)).rows[:1]
    ]
    for path in (RESULTS / TABLES).glob("*.csv"):
        with path.open(newline="", encoding="utf-8") as stream:
            headings.append(dict.fromkeys(next(csv.reader(stream))))
    defined = set(re.findall(r"`([^`]+)`", (RESULTS / "columns.md").read_text(encoding="utf-8")))
    undefined = {name for row in headings for name in row if name not in defined}
    assert not {name for name in undefined if not re.fullmatch(r"(remaining|test|forgotten), \d+ %", name)}


def with_a_letter() -> Settings:
    settings = shared_settings()
    presets = {
        **settings.presets,
        "letter": {"privacy": settings.presets["paper"]["privacy"], "training": "letter"},
        "letter_ours": {"privacy": settings.presets["ours"]["privacy"], "training": "letter"},
    }
    training = TrainingSettings(
        {"local": {"clip": 0.1, "rate": 0.1, "steps": 1, "batch": 2, "momentum": 0.0}}, {"a": {}}
    )
    return replace(settings, trainings={**settings.trainings, "letter": training}, presets=presets)


@pytest.mark.usefixtures("text_only")
def test_a_new_preset_and_a_new_method_need_no_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = made_up_rows("sequential", seeds=1)
    extra = [row | {"preset": "letter"} for row in rows if row["preset"] == "paper"]
    extra += [row | {"method": "brand_new", "level": "exact"} for row in extra if row["method"] == "scratch"]
    monkeypatch.setattr(reading, "shared_settings", with_a_letter)
    reading.trained_like.cache_clear()
    try:
        both = [*rows, *extra]
        assert reading.letter_preset(both) == "letter"
        assert reading.trained_like("letter") == "letter"
        labels = {standing.label for standing in standings({"sequential": both})}
        assert {"Scratch (letter)", "SIFU (letter)", "SIFU (ours)", "Brand new (letter)"} <= labels
        assert "Scratch" not in labels
        own = [row | {"preset": "letter_ours"} for row in rows if row["preset"] == "ours"]
        assert reading.honest_preset(both) == "ours"
        assert reading.honest_preset([*both, *own]) == "letter_ours"
        (page,) = write_appendix([write_results("sequential", tmp_path / "new", both)], tmp_path / "out")
        assert "| Brand new (letter) |" in page.read_text()
    finally:
        reading.trained_like.cache_clear()


@cache
def tables() -> dict[str, list[Row]]:
    """Return the rows of every experiment, by name."""
    return {source.experiment.name: source.rows for source in sources_in([RESULTS])}


def rows_of(name: str) -> list[Row]:
    return tables()[name]


def shown(table: str, column: str, **where: str) -> str:
    """Return a cell of a table of the appendix."""
    with (RESULTS / TABLES / f"{table}.csv").open(newline="", encoding="utf-8") as stream:
        (row,) = (row for row in csv.DictReader(stream) if all(row[key] == value for key, value in where.items()))
    return row[column]


def percent(share: float | None) -> str:
    assert share is not None
    return f"{100 * share:.0f} %"


def spread(values: list[float], digits: int = 1) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def gaps(line: Line) -> list[float]:
    return [100 * gap for gap in reached_gaps(rows_of("sequential"), line)[0]]


def saved(line: Line) -> str:
    """Return the saved rounds, as the mean over the data sets on which every run reached the target."""
    return percent(mean_fewer(complete(by_dataset(rows_of("sequential"), line))))


def more(method: str) -> str:
    share = mean_fewer(complete(by_dataset(rows_of("sequential"), paper_line(method, rows_of("sequential")))))
    assert share is not None
    return percent(-share)


def missed(line: Line) -> str:
    speeds = [speed for speed in by_dataset(rows_of("sequential"), line).values() if not speed.complete]
    return f"{sum(speed.missed for speed in speeds)} of {sum(speed.runs for speed in speeds)}"


def setting(preset: str) -> LetterSetting:
    return next(item for item in letter_settings(tables()) if item.preset == preset)


def compared(other: Compared | None) -> str:
    assert other is not None
    return percent(other.saved)


def our_runs() -> list[Any]:
    return [course for course in courses_of(rows_of("sequential")) if course.line == our_line(rows_of("sequential"))]


def levels() -> Counter[str]:
    """Count the proven levels of SIFU's requests under our rules."""
    requests = [row for rows in tables().values() for row in rows if row.get("level") and row["request"]]
    own = [row for row in requests if row["method"] == "sifu" and Line("sifu", str(row["preset"])).honest]
    return Counter(str(row["level"]) for row in own)


def closed_form_requests() -> int:
    courses = [*courses_of(rows_of("exact")), *courses_of(rows_of("sequential"))]
    own = [course for course in courses if course.first["method"] == "closed_form"]
    assert sum(course.total for course in own) == 0
    return sum(len(course.rows) for course in own)


def main_speeds(leavers: int) -> list[float]:
    medians = [case.speed.median for case in cases_by_rule(rows_of("groups"), leavers) if case.main]
    assert len(medians) == 4
    return [median for median in medians if median is not None]


def halved() -> list[bool]:
    cases = cases_by_rule(rows_of("groups"))
    return [case.speed.complete and (case.speed.median or 0.0) >= 2.0 - 1e-9 for case in cases]


def group_speed(dataset: str) -> Any:
    (case,) = (case for case in cases_by_rule(rows_of("groups")) if case.task.dataset == dataset)
    return case.speed


def first_trainings(main: bool = False) -> list[float]:
    cases = [case for case in cases_by_rule(rows_of("groups")) if case.main or not main]
    own = {(case.task, case.groups, case.separate, case.stretch) for case in cases}
    trainings = first_trainings_of(rows_of("groups"))
    return [
        100 * first.difference
        for first in trainings
        if (first.task, first.groups, first.separate, first.stretch) in own
    ]


def in_sequence() -> list[float]:
    sequences = sequences_of(rows_of("groups"))
    return [item.ratio for item in sequences if (item.rebuild, item.stretch) == ("now", USUAL_STRETCH)]


def growing(clients: int, epsilon: int) -> Any:
    (own,) = (
        item
        for item in settings_of(courses_of(rows_of("scale")))
        if (item.clients, float(item.epsilon), item.requests) == (clients, epsilon, "10")
    )
    return own


def speed(clients: int, epsilon: int, digits: int) -> str:
    return f"{growing(clients, epsilon).automatic.median:.{digits}f}"


def proven_from(clients: int) -> bool:
    """Return whether every request of ten clients in federations of this size or larger is proven."""
    own = [item for item in settings_of(courses_of(rows_of("scale"))) if item.requests == "10"]
    return all(tuple(item.levels) == ("proven",) for item in own if item.clients >= clients)


def broken(psi: str) -> str:
    measured = [row for row in rows_of("psi-alpha") if row["distance"]]
    return f"{sum(row['distance'] > row[psi] for row in measured):,}"


def factor(psi: str) -> str:
    return f"{largest_ratio([row for row in rows_of('psi-alpha') if row['distance']], psi):,.0f}"


def attacked(method: str) -> str:
    return shown("metrics", "TPR at 1 % FPR", method=method)


def klom(method: str) -> str:
    return shown("metrics", "KLoM forgotten", method=method).split()[0]


def exact_accuracy(data: str) -> str:
    return f"{100 * float(shown('exact', 'test', data=data, method='Closed form', requests='1x50')):.1f} %"


def sequential() -> list[Row]:
    return rows_of("sequential")


QUOTES: dict[str, Callable[[], str]] = {
    "ends 0 points from Scratch (median of 15 runs, -4 to +2)": lambda: (
        f"ends {abs(round(statistics.median(gaps(our_line(sequential())))))} points from Scratch (median of "
        f"{len(gaps(our_line(sequential())))} runs, {min(gaps(our_line(sequential()))):+.0f} to "
        f"{max(gaps(our_line(sequential()))):+.0f})"
    ),
    "stays 32 points above it": lambda: (
        f"stays {statistics.median(gaps(paper_line('fine_tuning', sequential()))):.0f} points above it"
    ),
    "no rounds for 495 requests": lambda: f"no rounds for {closed_form_requests()} requests",
    "are 6.6 to 11.8 times faster than Scratch on four tasks": lambda: (
        f"are {spread(main_speeds(1))} times faster than Scratch on four tasks"
    ),
    "SIFU is 13 times faster with 1,000 or more clients": lambda: (
        f"SIFU is {large_federations(rows_of('scale'))[0].median:.0f} times faster with 1,000 or more clients"
    ),
    "federations of 100 clients: 2 % fewer rounds": lambda: (
        f"federations of 100 clients: {saved(our_line(sequential()))} fewer rounds"
    ),
    "Of 866 requests by SIFU under our rules 51 are exact, 208 proven and 572 conditional; 35 diverged": lambda: (
        f"Of {levels().total()} requests by SIFU under our rules {levels()['exact']} are exact, {levels()['proven']} "
        f"proven and {levels()['conditional']} conditional; {levels()['diverged']} diverged"
    ),
    "SIFU takes 37 % fewer rounds on average on the three data sets": lambda: (
        f"SIFU takes {saved(paper_line('sifu', sequential()))} fewer rounds on average on the three data sets"
    ),
    "On the other two, 12 of 20 runs missed the target": lambda: (
        f"On the other two, {missed(paper_line('sifu', sequential()))} runs missed the target"
    ),
    "our control, already saves 13 %": lambda: f"our control, already saves {compared(setting('paper').control)}",
    "By our rules SIFU saves 2 % (speed-ups of 1.00 to 1.05)": lambda: (
        f"By our rules SIFU saves {saved(our_line(sequential()))} (speed-ups of "
        + spread([item.median or 0.0 for item in by_dataset(sequential(), our_line(sequential())).values()], 2)
        + ")"
    ),
    "in 39 of 45 requests it must go back": lambda: (
        f"in {sum(before_first_round(row) for run in our_runs() for row in run.rows)} of "
        f"{sum(len(run.rows) for run in our_runs())} requests it must go back"
    ),
    "FedEraser takes 12 % more rounds than Scratch": lambda: (
        f"FedEraser takes {more('fed_eraser')} more rounds than Scratch"
    ),
    "saves 44 % on MNIST, CIFAR-10 and CIFAR-100": lambda: (
        f"saves {percent(setting('authors_unclipped').saved)} on MNIST, CIFAR-10 and CIFAR-100"
    ),
    "But 13 of 50 runs": lambda: (
        f"But {setting('authors_unclipped').missed} of {setting('authors_unclipped').runs} runs"
    ),
    "and the control saves 21 %": lambda: f"and the control saves {compared(setting('authors_unclipped').control)}",
    "nothing is left: 0 %": lambda: f"nothing is left: {compared(setting('authors_unclipped').honest)}",
    "10,000 rounds do not train FashionMNIST, CIFAR-10 or CIFAR-100 to their target of 90 %": lambda: (
        f"{max(max(item.rounds) for item in clipped()):,} rounds do not train FashionMNIST, CIFAR-10 or CIFAR-100 to "
        f"their target of {percent(clipped()[0].target)}"
    ),
    "Psi is too small in all 1,017 measurements, by a factor of up to 1,572": lambda: (
        f"Psi is too small in all {broken('psi_population')} measurements, by a factor of up to "
        f"{factor('psi_population')}"
    ),
    "it is too small in 162, by up to 143": lambda: (
        f"it is too small in {broken('psi_round')}, by up to {factor('psi_round')}"
    ),
    "the speed-up is 1.5 with 50 clients, 8.3 with 200, 20 with 1,000 and 46 with 3,000": lambda: (
        f"the speed-up is {speed(50, 10, 1)} with 50 clients, {speed(200, 10, 1)} with 200, {speed(1000, 10, 0)} with "
        f"1,000 and {speed(3000, 10, 0)} with 3,000"
    ),
    "At epsilon 1 it is 1.9 with 1,000 clients and 5.2 with 6,000": lambda: (
        f"At epsilon 1 it is {speed(1000, 1, 1)} with 1,000 clients and {speed(6000, 1, 1)} with 6,000"
    ),
    "four draws with 3,000 clients gave 20 to 198": lambda: (
        f"four draws with 3,000 clients gave {spread(list(growing(3000, 10).automatic.ratios), 0)}"
    ),
    "From 200 clients on, every one": lambda: f"From {200 if proven_from(200) else 'more'} clients on, every one",
    "one leaver takes 6.6 to 11.8 times fewer rounds, five at once 5.0 to 9.6 times fewer": lambda: (
        f"one leaver takes {spread(main_speeds(1))} times fewer rounds, five at once {spread(main_speeds(5))} times "
        "fewer"
    ),
    "rebuilding counted, are 3.6 to 5.0 times cheaper": lambda: (
        f"rebuilding counted, are {spread(in_sequence())} times cheaper"
    ),
    "Of 17 tasks, 15 take at most half": lambda: f"Of {len(halved())} tasks, {sum(halved())} take at most half",
    "and CelebA, with a speed-up of 1.2": lambda: f"and CelebA, with a speed-up of {group_speed('celeba').median:.1f}",
    "between 5.5 points below and 1.4 points above": lambda: (
        f"between {-min(first_trainings()):.1f} points below and {max(first_trainings()):.1f} points above"
    ),
    "no rounds in any of 495 requests": lambda: f"no rounds in any of {closed_form_requests()} requests",
    "is 98.0 % on MNIST and 87.4 % on FashionMNIST": lambda: (
        f"is {exact_accuracy('MNIST')} on MNIST and {exact_accuracy('FashionMNIST')} on FashionMNIST"
    ),
    "it is 55.7 %": lambda: f"it is {exact_accuracy('CIFAR-10')}",
    "a median of 472 rounds": lambda: (
        f"a median of {float(shown('exact', 'rounds', data='MNIST', method='SIFU (our rules)')):.0f} rounds"
    ),
    "On 20 models per method": lambda: f"On {shown('metrics', 'models', method='SIFU')} models per method",
    "recognises 99.1 % of models that did not forget, 16.6 % after Fine-Tuning, 2.6 % after groups and 1.8 %": lambda: (
        f"recognises {attacked('Not forgotten')} of models that did not forget, {attacked('Fine-Tuning')} after "
        f"Fine-Tuning, {attacked('Groups')} after groups and {attacked('SIFU')}"
    ),
    "Scratch itself scores 0.5 %": lambda: f"Scratch itself scores {attacked('Scratch')}",
    "SIFU (3.07) and groups (2.76)": lambda: f"SIFU ({klom('SIFU')}) and groups ({klom('Groups')})",
    "it is 2.52": lambda: f"it is {klom('Scratch')}",
}
"""Numbers that the page states, and their computation from the tables."""
WITHOUT_TABLE = (
    "AISTATS 2024",
    "the paper says 52 %",
    "close to the paper's 52 %",
    "B = 1",
    "100 clients, five data sets",
    "1 % false-alarm rate",
    "At epsilon 10",
    "Dirichlet 0.3",
    "[fashion_mnist-float32.csv](fashion_mnist-float32.csv)",
)
"""Numbers from the paper, in settings and in names."""


def clipped() -> list[Any]:
    """Return trainings like the authors' code, with its clipping."""
    own = [item for item in trainings_of(rows_of("letter")) if (item.preset, item.kind) == ("authors", "shared")]
    return [item for item in own if item.dataset in ("fashion_mnist", "cifar10", "cifar100")]


@pytest.mark.parametrize("quote", QUOTES)
def test_a_number_on_the_page_follows_from_its_table(quote: str) -> None:
    assert quote in PAGE
    assert QUOTES[quote]() == quote


def unchecked(text: str) -> str:
    """Return the page without the checked parts; no digit may be left."""
    for part in sorted([*QUOTES, *WITHOUT_TABLE], key=len, reverse=True):
        text = text.replace(part, "")
    return re.sub(r"CIFAR-100?\b", "", text)


def test_no_number_on_the_page_is_unchecked() -> None:
    left = unchecked(PAGE)
    assert not re.findall(r".{0,30}\d.{0,30}", left)


def test_control_a_number_that_no_table_has_is_seen() -> None:
    assert "7" in unchecked(PAGE + " It is 7 times faster.")


def test_statements_without_numbers_hold() -> None:
    """Statements in words about runs, requests and trainings agree with the tables."""
    assert all(item.reached == 0 and item.seeds == 10 for item in clipped())
    assert min(first_trainings(main=True)) > 0.0
    assert group_speed("cifar100").missed == group_speed("cifar100").runs
    hard = [course for course in courses_of(sequential()) if course.first["dataset"] in ("cifar10", "cifar100")]
    assert not any(course.reached for course in hard if course.first["method"] in ("last", "dp"))
    assert round(statistics.median(gaps(paper_line("fed_accum", sequential())))) == 0
    slow = [
        case.task.dataset for case, half in zip(cases_by_rule(rows_of("groups")), halved(), strict=True) if not half
    ]
    assert slow == ["cifar100", "celeba"]
    requests = [row for rows in tables().values() for row in rows if row.get("level") and row["request"]]
    for row in requests:
        honest = Line(str(row["method"]), str(row["preset"])).honest
        if row["method"] == "sifu" and honest and row["level"] == "diverged":
            assert "sigma_factor=" in row["variant"]
        if row["method"] in ("sifu", "last") and not honest and row["level"] not in ("none", "diverged"):
            assert before_first_round(row)
        if row["method"] in ("dp", "fed_eraser", "fed_accum", "fine_tuning"):
            assert row["level"] in ("none", "diverged")


def test_the_page_is_short_and_links_the_csv_of_every_table() -> None:
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= MOST_WORDS
    linked = set(re.findall(r"\]\(([^)]+)\)", text))
    assert all((RESULTS / target).exists() for target in linked)
    names = {f"{TABLES}/{path.name}" for path in (RESULTS / TABLES).iterdir() if "-provenance" not in path.name}
    assert {name for name in names if "-trainings" not in name} <= linked
    assert {f"{name}.md" for name in tables()} <= linked
