"""Information that a purged run reveals to an adversary with the run folder and all other clients' data.

The adversary guesses a forgotten record, trains a copy of the federation with it, and searches the purged folder for
every figure and digest that follows from the guess.
"""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import sifu
import sifu_verifier
from folder_values import places_that_differ, values_by_place
from forged_runs import execute, rebuild_chain
from guessing import (
    AUTOMATIC,
    GONE,
    GUESSES,
    NETWORK,
    OUTLIER,
    RIDGE,
    ROUNDS,
    ROW,
    TRUTH,
    confirmed,
    federation,
    guess,
    in_bytes,
    is_random,
    listed,
    worked_out,
)
from sifu.core.ledger import canonical_json
from sifu.requests.what_remains import COUNTS, KEPT_FIGURES

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def guesses(tmp_path_factory: pytest.TempPathFactory) -> dict[int, set[str]]:
    folder = tmp_path_factory.mktemp("guesses")
    return {label: guess(RIDGE, folder / str(label), label) for label in range(3)}


def purged(spec: dict[str, Any], folder: Path, label: int = TRUTH, **terms: Any) -> sifu.Run:
    run = sifu.train(spec, run=folder, clients=federation(label))
    run.forget([f"c{GONE}"], retention="strict", **terms)
    run.purge()
    return run


def test_a_purged_closed_form_run_confirms_no_guess_of_a_record(tmp_path: Path, guesses: dict[int, set[str]]) -> None:
    """Before the client is forgotten exactly the right guess is confirmed (the positive control); after the purge none
    is.
    """
    run = sifu.train(RIDGE, run=tmp_path / "run", clients=federation(TRUTH))
    assert confirmed(run.folder, guesses) == {TRUTH}
    run.forget([f"c{GONE}"], retention="strict")
    run.purge()
    assert confirmed(run.folder, guesses) == set()
    verification = run.verify()
    assert verification.holds
    assert any("erased by the purge" in note for note in verification.notes)
    assert sifu_verifier.verify(run.folder) == []


def test_a_later_leaver_is_not_in_what_an_earlier_request_left(tmp_path: Path, guesses: dict[int, set[str]]) -> None:
    """A guess of a later leaver's record is not confirmed by certificates signed while it was still active."""
    run = sifu.train(RIDGE, run=tmp_path / "run", clients=federation(TRUTH))
    for client in ("c0", f"c{GONE}"):
        run.forget([client], retention="strict")
    run.purge()
    earlier = {}
    for label in guesses:
        folder = tmp_path / f"earlier-{label}"
        other = sifu.train(RIDGE, run=folder, clients=federation(label))
        other.forget(["c0"])
        earlier[label] = guesses[label] | worked_out(folder)
    assert confirmed(run.folder, earlier) == set()
    assert sifu_verifier.verify(run.folder) == []


@pytest.mark.parametrize("spec", [ROUNDS, AUTOMATIC, NETWORK], ids=["linear", "automatic rate", "network"])
def test_a_purged_run_in_rounds_confirms_no_guess_of_a_record(tmp_path: Path, spec: dict[str, Any]) -> None:
    """Before the client is forgotten only the right guess is confirmed, also by bytes (the control); after the purge
    none is.
    """
    run = sifu.train(spec, run=tmp_path / "run", clients=federation(TRUTH))
    guesses = {number: guess(spec, tmp_path / f"{number}", number) for number in GUESSES}
    assert confirmed(run.folder, guesses) == {TRUTH}
    assert in_bytes(run.folder, guesses[TRUTH] - guesses[0])
    run.forget([f"c{GONE}"], method="scratch", retention="strict")
    run.purge()
    assert confirmed(run.folder, guesses) == set()
    assert run.verify().holds
    assert sifu_verifier.verify(run.folder) == []


WHICH_WERE_KEPT = {
    "certificates.content.body.erased_nodes", "events.rolled back.dropped_models", "events.rounds.models.kept",
    "events.rounds.models.bytes", "events.rounds.models.node",
}  # fmt: skip
"""Places in which a purged run still shows which models of the first training were kept, as `sifu purge` reports."""
CASES = [
    (RIDGE, {}),
    (ROUNDS, {"method": "scratch"}),
    (ROUNDS, {"method": "scratch", "records": [ROW]}),
    (AUTOMATIC, {"method": "scratch"}),
    (NETWORK, {"method": "scratch"}),
    (ROUNDS | {"groups": {"count": 2, "rounds": 2}}, {"method": "groups"}),
]


@pytest.mark.parametrize(("spec", "terms"), CASES, ids=["ridge", "linear", "records", "automatic", "network", "groups"])
@pytest.mark.parametrize("other", [0, 7, OUTLIER], ids=["label", "features", "outlier"])
def test_nothing_in_a_purged_folder_follows_from_a_forgotten_record(
    tmp_path: Path, spec: dict[str, Any], terms: dict[str, Any], other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two federations that differ only in the record, every value after the purge is equal or random."""
    monkeypatch.setattr("sifu.store.unfinished._group_key", lambda spec: bytes(32))  # the same groups in both
    for module in ("training", "group_training"):  # rounds are committed at the end, not by the clock
        monkeypatch.setattr(f"sifu.run.{module}.COMMIT_SECONDS", float("inf"))
    runs = [purged(spec, tmp_path / f"{number}", number, **terms) for number in (other, TRUTH)]
    differ = places_that_differ(*(run.folder for run in runs))
    told = WHICH_WERE_KEPT if other == OUTLIER else set()
    assert {place for place in differ if not is_random(place)} <= told
    assert runs[0].purge().figures == COUNTS
    assert runs[1].verify().problems == sifu_verifier.verify(runs[1].folder) == []


@pytest.mark.parametrize("terms", [{}, {"records": [ROW]}], ids=["client", "records"])
def test_a_purge_of_all_figures_erases_which_models_were_kept(
    tmp_path: Path, terms: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outlier changes which models of a linear training are kept; a purge of all figures erases this, a plain one
    does not.
    """
    monkeypatch.setattr("sifu.run.training.COMMIT_SECONDS", float("inf"))
    runs = [purged(ROUNDS, tmp_path / f"{number}", number, method="scratch", **terms) for number in (OUTLIER, TRUTH)]
    differ = places_that_differ(*(run.folder for run in runs))
    assert {place for place in differ if not is_random(place)} == WHICH_WERE_KEPT
    for run in runs:
        assert any("sifu purge --figures erases the list" in why for _, why in run.purge().remains)
        assert run.purge(figures=True).figures == COUNTS
        assert not any("sifu purge --figures erases the list" in why for _, why in run.purge().remains)
        assert run.outcomes()[0].level == "exact"
    differ = places_that_differ(*(run.folder for run in runs))
    assert {place for place in differ if not is_random(place)} == set()
    for run in runs:
        run.forget(["c0"], method="scratch")  # the run continues
        assert run.verify().problems == sifu_verifier.verify(run.folder) == []


@pytest.mark.parametrize("steepest", [GONE, 0])
def test_an_automatic_rate_is_erased_whoever_set_it(tmp_path: Path, steepest: int) -> None:
    """In two federations that differ only in the record, the purge erases the rate, and later requests recompute it."""
    runs, rates = [], []
    for number in (7, TRUTH):
        run = sifu.train(AUTOMATIC, run=tmp_path / f"{number}", clients=federation(number, steepest))
        rates.append(run.spec.local.rate)
        for client in (f"c{GONE}", "c0"):
            run = sifu.open_run(run.folder, clients=federation(number, steepest))
            (outcome,) = run.forget([client], method="scratch", retention="strict")
            assert outcome.level == "exact"
            assert run.purge().figures == COUNTS
        assert run.verify().problems == sifu_verifier.verify(run.folder) == []
        runs.append(run)
    assert (rates[0] != rates[1]) == (steepest == GONE)  # control: before the purge the rate depended on the record
    differ = places_that_differ(*(run.folder for run in runs))
    assert {place for place in differ if not is_random(place)} == set()
    assert in_bytes(runs[0].folder, set(map(repr, rates))) == set()


def test_rates_that_a_purge_left_are_checked_against_those_who_stay(tmp_path: Path) -> None:
    """An erased rate that is put back is found, even with the operator's key."""
    for number, edit in enumerate((lambda rates: {"0": 0.25} | rates, lambda rates: dict.fromkeys(rates, 0.25))):
        run = purged(AUTOMATIC, tmp_path / f"{number}", method="scratch")

        def change(kind: str, content: dict[str, Any], edit: Any = edit) -> None:
            if kind == "purged":
                content["local_rates"] = edit(content["local_rates"])

        with run.reader() as reader:
            rates = canonical_json(edit({str(node): rate for node, rate in reader.local_rates.items()})).decode()
        execute(run.folder, f"UPDATE run SET value = '{rates}' WHERE key = 'local_rates'")
        rebuild_chain(run.folder, change)
        assert any("local rates of" in problem or "local_rates is" in problem for problem in run.verify().problems)
        assert any("local rates" in problem for problem in sifu_verifier.verify(run.folder))


def test_a_purge_that_erases_no_figures_keeps_every_rate_in_listed_places(tmp_path: Path) -> None:
    run = purged(AUTOMATIC, tmp_path / "run", method="scratch")
    rate = run.spec.local.rate
    run.forget(["c0"], method="sifu", sigma=0.05)
    assert run.purge().figures == (*KEPT_FIGURES, *COUNTS)
    assert run.spec.local.rate == rate
    places = {place for place, values in values_by_place(run.folder).items() if rate in values}
    assert {place.rpartition(".")[0] for place in places} >= {"run.local_rates", "sealed.content.local_rates"}
    assert {place for place in places if not listed(place, tuple(figure.place for figure in KEPT_FIGURES))} == set()
    assert run.verify().problems == sifu_verifier.verify(run.folder) == []
    run.forget(["c1"], method="scratch")
    assert run.verify().problems == sifu_verifier.verify(run.folder) == []


def test_where_a_method_rests_on_bounds_what_differs_is_in_the_list(tmp_path: Path) -> None:
    """Certificates of such methods contain bounds, which do confirm a guess; only listed places differ."""
    runs = [purged(ROUNDS, tmp_path / f"{label}", label, method="sifu", level="exact") for label in (0, TRUTH)]
    differ = {place for place in places_that_differ(*(run.folder for run in runs)) if not is_random(place)}
    assert {place for place in differ if not listed(place, tuple(figure.place for figure in KEPT_FIGURES))} == set()
    assert {"participation.drift", "nodes.mean_shift"} <= differ
    purge = runs[0].purge()
    assert purge.figures == (*KEPT_FIGURES, *COUNTS)
    assert any("not exact, or that started from a trained model" in why for _, why in purge.remains)


REMAINS = {
    "noise": (ROUNDS, {"method": "sifu", "sigma": 0.05}, "certificates.content.body.psi"),
    "automatic rate": (AUTOMATIC, {"method": "sifu", "sigma": 0.05}, "run.local_rates.0"),
}


@pytest.mark.parametrize(("spec", "terms", "place"), REMAINS.values(), ids=REMAINS)
def test_what_follows_from_a_forgotten_record_is_in_the_list(
    tmp_path: Path, spec: dict[str, Any], terms: dict[str, Any], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that agrees in two runs on the same data and differs on other data follows from the data, and must be
    listed.
    """
    monkeypatch.setattr("sifu.run.training.COMMIT_SECONDS", float("inf"))
    folders = []
    for copy, number in enumerate((7, 7, TRUTH)):
        run = sifu.train(spec, run=tmp_path / f"{copy}", clients=federation(number))
        run.forget([f"c{GONE}"], "gone", **({"retention": "strict"} | terms))
        figures_left = run.purge().figures
        folders.append(run.folder)
    follows = places_that_differ(folders[0], folders[2]) - places_that_differ(folders[0], folders[1])
    # times may or may not differ
    follows = {name for name in follows if name.endswith(".digest") or not is_random(name)}
    assert place in follows
    # counts of models, in every payload that contains them
    counted = ("*.dropped_models", "*.remaining_models", "*.bytes_kept")
    in_the_list = (*(figure.place for figure in figures_left), *counted)
    assert {name for name in follows if not listed(name, in_the_list)} == set()


def test_control_the_figures_of_a_request_with_noise_still_confirm_a_guess(tmp_path: Path) -> None:
    guesses = {label: guess(ROUNDS, tmp_path / f"guess-{label}", label) for label in range(3)}
    run = purged(ROUNDS, tmp_path / "run", method="sifu", sigma=0.05)
    assert run.outcomes()[0].sigma > 0.0
    assert confirmed(run.folder, guesses) == {TRUTH}


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE participation SET drift = 0.125 WHERE node = 2 AND client = 1",
        "UPDATE nodes SET rounding = 0 WHERE node = 2",
        f"UPDATE clients SET smoothness = 1.5, curvature = 0 WHERE client = {GONE}",
    ],
)
def test_erased_figures_that_come_back_are_noticed(tmp_path: Path, statement: str) -> None:
    run = purged(ROUNDS, tmp_path / "run", method="scratch")
    execute(run.folder, statement)
    assert run.verify().problems
    assert sifu_verifier.verify(run.folder)
    rebuild_chain(run.folder)  # with the operator's key
    assert run.verify().problems
    assert sifu_verifier.verify(run.folder)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE nodes SET factor_sum = factor_sum / 2, factor_max = 0.5, rounding = 9e999 WHERE node = 2",
        f"UPDATE clients SET smoothness = NULL, curvature = NULL WHERE client = {GONE}",
    ],
    ids=["a round", "a forgotten client"],
)
def test_figures_that_look_erased_without_a_purge_are_noticed(tmp_path: Path, statement: str) -> None:
    run = sifu.train(ROUNDS, run=tmp_path / "run", clients=federation(TRUTH))
    run.forget([f"c{GONE}"], method="scratch")
    execute(run.folder, statement)
    rebuild_chain(run.folder)  # with the operator's key
    assert run.verify().problems
    assert sifu_verifier.verify(run.folder)


def test_a_run_goes_on_after_its_figures_were_erased(tmp_path: Path) -> None:
    """Later requests, a second purge, and a backup with its restoration need none of the erased figures."""
    run = purged(ROUNDS, tmp_path / "run", method="scratch")
    run.forget(["c1"], method="scratch", retention="strict")
    run.purge()
    run.backup(tmp_path / "run.backup")
    sifu.restore(tmp_path / "run.backup", tmp_path / "restored")
    run.forget(["c4"], method="sifu", sigma=0.05)
    assert run.outcomes()[-1].sigma > 0.0
    run.purge()
    for folder in (run.folder, tmp_path / "restored"):
        assert sifu.open_run(folder).verify().problems == []
        assert sifu_verifier.verify(folder) == []


def test_the_page_lists_what_remains() -> None:
    page = (Path(__file__).parents[2] / "docs" / "store.md").read_text()
    section = page.partition("## 5c.")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    assert rows == [(figure.place, figure.what, figure.why) for figure in (*KEPT_FIGURES, *COUNTS)]


def test_a_sealed_part_that_comes_back_or_is_missing_is_noticed(tmp_path: Path) -> None:
    run = sifu.train(RIDGE, run=tmp_path / "run", clients=federation(TRUTH))
    with sqlite3.connect(run.folder / "run.db") as connection:
        sealed = connection.execute("SELECT * FROM sealed").fetchall()
    run.forget([f"c{GONE}"], retention="strict")
    run.purge()
    for statement, values, finding in (
        ("INSERT INTO sealed VALUES (?, ?, ?)", sealed[0], "is there again"),
        ("DELETE FROM sealed", (), "is missing"),
    ):
        with sqlite3.connect(run.folder / "run.db") as connection:
            connection.execute(statement, values)
        assert any(finding in problem for problem in run.verify().problems)
        assert sifu_verifier.verify(run.folder) != []


def test_a_purge_keeps_what_was_measured_since_and_plans_still_work(tmp_path: Path) -> None:
    run = purged(ROUNDS, tmp_path / "run", method="sifu", sigma=0.05)
    status = run.status()
    assert status.accuracy is not None
    plan = run.plan(["c1"])
    assert plan.level in ("exact", "proven", "conditional")
    (outcome,) = run.forget(["c1"], method="sifu")
    assert run.verify().holds, outcome
    assert sifu_verifier.verify(run.folder) == []


def test_copies_elsewhere_are_named(tmp_path: Path) -> None:
    cache = tmp_path / "features"
    spec = RIDGE | {"features": RIDGE["features"] | {"cache": str(cache)}}
    run = sifu.train(spec, run=tmp_path / "run", clients=federation(TRUTH))
    model = run.export(tmp_path / "released.safetensors")
    jobs = tmp_path / ".sifu-console" / "jobs"
    jobs.mkdir(parents=True)
    (jobs / "abc.out").write_text("{}")
    cache.mkdir(exist_ok=True)
    (cache / "0.npy").write_bytes(b"features")
    assert not any("outside the record" in note for note in run.verify().notes)
    run.forget([f"c{GONE}"], retention="strict")
    told = " ".join(what for what, _ in run.purge().remains)
    notes = " ".join(run.verify().notes)
    for path in (model, cache, jobs / "abc.out"):
        assert str(path) in told
        assert str(path) in notes
    again = run.export(tmp_path / "again.safetensors")
    assert str(again) not in " ".join(run.verify().notes)
