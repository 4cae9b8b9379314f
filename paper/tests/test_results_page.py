"""The page: five sentences and a figure at the top, a section for each experiment, provenance folded at the end."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from bench_rows import made_up_rows, write_results

from sifu_paper import reading
from sifu_paper.columns import COLUMNS
from sifu_paper.letter_settings import PRESET_MEANINGS
from sifu_paper.overview import standings
from sifu_paper.page import write_page
from sifu_paper.readings import reading_of
from sifu_paper.settings import Settings, TrainingSettings, experiment_names, load_experiment, shared_settings
from sifu_paper.statements import PAPER_STATEMENTS, verdicts
from sifu_paper.summary import summarise
from sifu_paper.table import read_table
from sifu_paper.top import top_sentences

NAMES = ("sequential", "scale", "groups")
QUESTIONS = ("Does it forget?", "What does it cost?", "What is proven?", "Which method should I take?")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    folders = [write_results(name, folder / name, made_up_rows(name, seeds=1)) for name in NAMES]
    return write_page(folders, folder / "out")


def test_the_four_questions_are_answered_before_anything_else(page: Path) -> None:
    text = page.read_text()
    top = text[: text.index("\n## ")]
    for question in (*QUESTIONS, "Does the paper hold?"):
        assert f"* **{question}** " in top
    assert top.count("\n* ") == 5
    assert "![Every method at a glance](overview.png)" in top
    assert "**Speed-up** means the same everywhere" in top
    assert (page.parent / "overview.png").stat().st_size > 20_000


def test_each_experiment_has_question_figure_reading_and_table(page: Path) -> None:
    text = page.read_text()
    for name in NAMES:
        experiment = load_experiment(name)
        section = text.split(f"## {experiment.title}\n", 1)[1].split("\n## ", 1)[0]
        order = [
            section.index(part)
            for part in (
                experiment.question,
                f"({name}.png)",
                reading_of(experiment, made_up_rows(name, seeds=1)),
                "|---|",
            )
        ]
        assert order == sorted(order)
        for kind in ("png", "csv", "json"):
            assert (page.parent / f"{name}.{kind}").exists()
    assert "900.0 MB" in text  # what is kept, in the same table


def test_provenance_is_one_folded_table_at_the_end(page: Path) -> None:
    text = page.read_text()
    assert text.count("<summary>Provenance") == 1
    end = text[text.index("<summary>Provenance") :]
    assert end.rstrip().endswith("</details>")
    for name in NAMES:
        row = f"| {name} | `sifu-bench run {name}` | a computer | 2026-01-02 03:04 UTC | 0123456789 | sifu 0 |"
        assert row in end


def test_every_preset_is_explained_where_it_is_first_named() -> None:
    assert set(PRESET_MEANINGS) | {"paper", "ours"} == set(shared_settings().presets)


def test_the_top_says_where_groups_do_not_pay() -> None:
    """The committed table has tasks on which they do not: the page must not speak of the others alone."""
    rows = read_table(Path(__file__).parents[1] / "results" / "groups.csv")
    cost, choice = top_sentences({"groups": rows})
    assert "2 of all 17 tasks (CIFAR-100, iid, all take part; CelebA, identity, all take part)" in cost
    assert "the first training differs by -5.5 to +1.4 points" in choice
    assert "CelebA, identity, all take part: 1.21x" in reading_of(load_experiment("groups"), rows)


def test_every_column_is_defined(page: Path) -> None:
    names = {
        name
        for experiment in map(load_experiment, experiment_names())
        for row in summarise(experiment, made_up_rows(experiment.name, seeds=1)).rows[:1]
        for name in row
    }
    undefined = {
        name for name in names if name not in COLUMNS and not re.fullmatch(r"(remaining|test|forgotten), \d+ %", name)
    }
    assert not undefined


@pytest.fixture
def text_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without figures: they take longer, and letters are drawn a little differently on other machines."""
    monkeypatch.setattr("sifu_paper.page.figure_bytes", lambda figure, kind: b"")
    monkeypatch.setattr("sifu_paper.page.draw_source", lambda source: None)
    monkeypatch.setattr("sifu_paper.page.draw_overview", lambda standings: None)


@pytest.mark.usefixtures("text_only")
def test_a_page_can_be_made_again_from_the_tables_beside_it(page: Path, tmp_path: Path) -> None:
    assert write_page([page.parent], tmp_path / "again").read_bytes() == page.read_bytes()


@pytest.mark.usefixtures("text_only")
def test_the_committed_page_is_what_its_tables_give(tmp_path: Path) -> None:
    results = Path(__file__).parents[1] / "results"
    same = write_page([results], tmp_path).read_text() == (results / "README.md").read_text()
    assert same, "a table was changed: run sifu-bench page docs/results --out docs/results"


def sentence(question: str, tables: dict[str, list[dict[str, object]]]) -> str:
    return next(text for text in top_sentences(tables) if text.startswith(f"**{question}**"))


def test_the_answers_follow_the_tables() -> None:
    rows = made_up_rows("sequential")
    tables = {"sequential": rows, "scale": made_up_rows("scale"), "groups": made_up_rows("groups")}
    assert "Fine-Tuning, which only trains on, stays" in sentence("Does it forget?", tables)
    assert re.search(r"stays 6\d points above it", sentence("Does it forget?", tables))
    assert "**groups**" in sentence("Which method should I take?", tables)
    # Negative controls: groups that gain nothing and a SIFU that is quick change the advice.
    slow = [row | {"rounds": 100} if row["method"] == "groups" else row for row in tables["groups"]]
    quick = [row | {"rounds": 10} if row["method"] == "sifu" else row for row in rows]
    advice = sentence("Which method should I take?", {"sequential": quick, "groups": slow})
    assert "**groups**" not in advice
    assert "verything else: **SIFU** by our rules" in advice
    remembering = [row | {"accuracy_forgotten_after": 0.9} if row["method"] == "sifu" else row for row in rows]
    assert re.search(
        r"SIFU by our rules \([^)]*\) ends 7\d points above", sentence("Does it forget?", {"sequential": remembering})
    )


def test_a_head_that_takes_no_round_needs_no_scratch_to_be_compared_with() -> None:
    rows = [
        row | {"method": "closed_form", "rounds": 0}
        for row in made_up_rows("exact", seeds=1)
        if row["method"] == "sifu"
    ]
    (standing,) = standings({"exact": rows})
    assert (standing.label, standing.median) == ("Closed form (a head)", float("inf"))
    assert {row["speed-up"] for row in summarise(load_experiment("exact"), rows).rows} == {"no rounds"}


def test_ways_are_compared_on_the_tasks_that_all_of_them_were_tried_on() -> None:
    rows = [row for row in made_up_rows("exact", seeds=1) if (row["preset"], row["method"]) == ("ours", "sifu")]
    head = [row | {"method": "closed_form", "rounds": 0, "accuracy_test": 0.5} for row in rows]
    noise = [row | {"rounds": 7, "accuracy_test": 0.9} for row in rows if row["dataset"] == "mnist"]
    text = reading_of(load_experiment("exact"), [*head, *noise])
    assert "on MNIST, which every way was tried on): Closed form 0, SIFU 7." in text
    assert "Closed form 50.0 %, SIFU 90.0 %" in text


def test_a_method_that_rests_on_an_assumption_is_not_said_to_prove() -> None:
    for level, words in (("proven", "a method that proves it"), ("conditional", "says what it proves and assumes")):
        rows = [row | {"level": level} for row in made_up_rows("sequential", seeds=1)]
        assert words in sentence("Does it forget?", {"sequential": rows})


def test_levels_are_counted() -> None:
    rows = made_up_rows("sequential", seeds=1)
    ours = [row for row in rows if (row["method"], row["preset"]) == ("sifu", "ours")]
    ours[0]["level"], ours[1]["level"] = "exact", "proven"
    text = sentence("What is proven?", {"sequential": rows})
    assert f"Of {len(ours)} requests by SIFU under our rules 1 are exact" in text
    assert f"1 proven (epsilon and delta from measured premises) and {len(ours) - 2} conditional" in text
    assert "DP, FedAccum, FedEraser, Fine-Tuning" in text


def test_nothing_is_said_of_what_was_not_measured() -> None:
    assert top_sentences({}) == []
    assert standings({}) == []
    assert [text.split("**")[1] for text in top_sentences({"psi-alpha": made_up_rows("psi-alpha")})] == [
        "Does the paper hold?"
    ]


def test_automatic_choices_and_hindsight_are_told_apart() -> None:
    rows = made_up_rows("scale")
    table = summarise(load_experiment("scale"), rows).rows
    at = next(row for row in table if (row["requests"], row["epsilon"], row["clients"]) == ("10", "10", 3000))
    # The made-up table is twice as quick at one sigma, which the automatic choice does not know.
    automatic, hindsight = (float(at[name].split("x")[0]) for name in ("automatic", "best in hindsight"))
    assert hindsight > automatic > 1
    assert (at["draws"], at["tried"]) == (3, 4)
    text = reading_of(load_experiment("scale"), rows)
    assert "With the automatic sigma and 6,000 clients" in text
    assert "no promise" in text
    single = reading_of(load_experiment("scale"), made_up_rows("scale", seeds=1))
    assert "one draw of the noise stands behind each number" in single


def test_every_experiment_is_read_in_two_sentences_at_most() -> None:
    for name in experiment_names():
        experiment = load_experiment(name)
        assert reading_of(experiment, made_up_rows(name, seeds=2))
        assert reading_of(experiment, []) == ""


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
    for row in extra:
        if row["method"] == "sifu":
            row["rounds"] = 1000  # by the letter SIFU is slow
    extra += [row | {"method": "brand_new", "level": "exact"} for row in extra if row["method"] == "scratch"]
    monkeypatch.setattr(reading, "shared_settings", with_a_letter)
    reading.trained_like.cache_clear()
    try:
        both = [*rows, *extra]
        assert reading.letter_preset(both) == "letter"
        assert reading.trained_like("letter") == "letter"
        verdict = next(
            v for s, v in verdicts({"sequential": both}, PAPER_STATEMENTS) if s.says.startswith("SIFU takes")
        )
        assert verdict.word == "not the same"
        labels = {standing.label for standing in standings({"sequential": both})}
        assert {"Scratch (letter)", "SIFU (letter)", "SIFU (ours)", "Brand new (letter)"} <= labels
        assert "Scratch" not in labels
        own = [row | {"preset": "letter_ours"} for row in rows if row["preset"] == "ours"]
        assert reading.honest_preset(both) == "ours"
        assert reading.honest_preset([*both, *own]) == "letter_ours"
        text = write_page([write_results("sequential", tmp_path / "new", both)], tmp_path / "page").read_text()
        assert "| Brand new (letter) |" in text
    finally:
        reading.trained_like.cache_clear()
