"""Purges of all figures: no guess of a forgotten record is confirmed, no claim grows, and no erasure is partial."""

from __future__ import annotations

import io
import itertools
import random
import sqlite3
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sifu
import sifu_verifier
from folder_values import places_that_differ
from forged_runs import execute, rebuild_chain
from guessing import GONE, RIDGE, ROUNDS, ROW, TRUTH, confirmed, federation, guess, in_bytes, is_random
from killed_purges import purge_killed_at
from run_tools import Command, copy_run, query
from sifu.data import ClientData
from sifu.errors import InputError, NotCertifiableError, RunDamagedError, VerificationError
from sifu.requests import figures_policy
from sifu.requests.what_remains import COUNTS, KEPT_FIGURES
from sifu.run.run_view import RunView
from sifu.store import erased_figures, writer
from sifu.store.sealed import ALL_FIGURES
from sifu.store.writer import SCRUB_FILE, RunWriter

pytestmark = pytest.mark.long

SIGMAS = [0.05, "auto"]


def scaled(factor: float) -> list[ClientData]:
    """Return the federation with one record of the leaving client scaled by `factor`."""
    clients = federation(TRUTH)
    x = clients[GONE].x.copy()
    x[ROW] *= factor
    clients[GONE] = ClientData(clients[GONE].name, x, clients[GONE].y)
    return clients


def noised(folder: Path, clients: list[ClientData], spec: dict[str, Any] = ROUNDS, **terms: Any) -> sifu.Run:
    run = sifu.train(spec, run=folder, clients=clients)
    run.forget([f"c{GONE}"], "gone", **({"method": "sifu", "retention": "strict", "sigma": 0.05} | terms))
    return run


@pytest.fixture
def erased(tmp_path: Path) -> sifu.Run:
    run = noised(tmp_path / "run", federation(TRUTH))
    run.purge(figures=True)
    return run


def problems(run: sifu.Run) -> list[str]:
    return [*run.verify().problems, *sifu_verifier.verify(run.folder)]


def test_the_command_asks_first_and_no_means_no(tmp_path: Path, cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    run = noised(tmp_path / "run", federation(TRUTH))
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    answer = cli("purge", run.folder, "--figures")
    assert answer.code == 0
    assert answer.err.endswith("Nothing was erased.\n")
    assert run.verify().not_recomputed == {}
    assert cli("purge", run.folder, "--figures", "--yes").code == 0
    assert list(run.verify().not_recomputed) == ["gone"]


@pytest.mark.parametrize(("method", "sigma"), [("sifu", 0.05), ("sifu", "auto")])
def test_no_guess_is_confirmed_after_a_purge_of_all_figures(tmp_path: Path, method: str, sigma: float | str) -> None:
    """Before the purge of all figures exactly the right guess is confirmed (the control); after it none is."""
    guesses = {label: guess(ROUNDS, tmp_path / f"guess-{label}", label) for label in range(3)}
    run = noised(tmp_path / "run", federation(TRUTH), method=method, sigma=sigma)
    run.purge()
    assert confirmed(run.folder, guesses) == {TRUTH}
    assert in_bytes(run.folder, guesses[TRUTH] - guesses[0])
    run.purge(figures=True)
    assert confirmed(run.folder, guesses) == set()
    assert problems(run) == []


@pytest.mark.parametrize("sigma", SIGMAS)
def test_runs_whose_requests_went_back_to_other_nodes_leave_the_same_folder(
    tmp_path: Path, sigma: float | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Source, Psi and sigma depend on the record, yet after the purge the folders differ only in random or noisy
    places.
    """
    monkeypatch.setattr("sifu.run.training.COMMIT_SECONDS", float("inf"))
    runs, chosen = [], set()
    for number, factor in enumerate((1.0, 0.1, 2.5)):
        run = noised(tmp_path / f"{number}", scaled(factor), sigma=sigma)
        outcome = run.outcomes()[0]
        chosen.add((outcome.sigma, outcome.rollback_to))
        assert run.purge(figures=True).figures == (*KEPT_FIGURES[-2:], *COUNTS)
        runs.append(run)
    assert len(chosen) > 1, "the worlds must be ones that could be told apart before"
    for first, second in itertools.combinations(runs, 2):
        differ = places_that_differ(first.folder, second.folder)
        assert {place for place in differ if not is_random(place)} <= {"file standing.json"}


def test_what_was_erased_is_named_and_the_rest_holds(erased: sifu.Run) -> None:
    verification = erased.verify()
    assert verification.holds
    assert list(verification.not_recomputed) == ["gone"] == list(sifu_verifier.not_recomputed(erased.folder))
    assert "NOT recomputed" in verification.notes[0]
    assert sifu_verifier.verify(erased.folder) == []
    (outcome,) = erased.outcomes()
    assert outcome.level == "proven"
    assert outcome.rollback_to is None
    assert outcome.sigma != outcome.sigma  # NaN
    assert erased.certificate("gone").body["sigma"] == 0.05  # the request set it explicitly
    with pytest.raises(InputError, match="was erased on"):
        erased.certificate("gone", "auditor")


def test_a_public_certificate_whose_sigma_follows_from_the_data_goes_too(tmp_path: Path) -> None:
    run = noised(tmp_path / "run", federation(TRUTH), sigma="auto")
    kept = tmp_path / "handed-out.public.json"
    kept.write_bytes((run.folder / "certificates" / "gone.public.json").read_bytes())
    run.purge(figures=True)
    assert list((run.folder / "certificates").iterdir()) == []
    with pytest.raises(InputError, match="was erased on"):
        run.certificate("gone")
    assert sifu.verify_certificate(kept).holds


def test_later_requests_start_afresh_and_noise_comes_back_after_that(erased: sifu.Run) -> None:
    for method in ("sifu", "auto"):
        plan = erased.plan(["c1"], method=method)
        assert (plan.level, plan.noise_std) == ("exact", 0.0)
        assert any("never by noise" in note for note in plan.notes)
        assert not any("larger epsilon" in note for note in plan.notes)
    (outcome,) = erased.forget(["c1"], method="scratch", retention="strict")
    assert outcome.level == "exact"
    assert not any("never by noise" in note for note in erased.plan(["c0"], method="sifu").notes)
    (outcome,) = erased.forget(["c0"], "again", sigma=50)
    assert outcome.sigma > 0.0
    assert problems(erased) == []
    erased.purge(figures=True)
    assert list(erased.verify().not_recomputed) == ["gone", "r2", "again"]
    assert problems(erased) == []


def test_an_ordinary_purge_after_a_fresh_start_leaves_numbers_of_things(erased: sifu.Run) -> None:
    erased.forget(["c1"], method="scratch", retention="strict")
    assert erased.purge().figures == COUNTS
    assert problems(erased) == []


def test_records_and_then_the_client_after_it(erased: sifu.Run) -> None:
    (outcome,) = erased.forget(["c1"], records=[0], method="sifu", sigma=0.05)
    assert (outcome.level, outcome.sigma) == ("exact", 0.0)
    (outcome,) = erased.forget(["c1"], method="sifu", sigma=0.05)
    assert outcome.level in ("exact", "proven")
    assert problems(erased) == []


@pytest.mark.parametrize(
    ("spec", "terms", "why"),
    [
        (ROUNDS | {"local": {"rate": "auto", "steps": 2}}, {}, "local rate follows from"),
    ],
    ids=["rate"],
)
def test_it_is_refused_where_it_cannot_be_whole(
    tmp_path: Path, spec: dict[str, Any], terms: dict[str, Any], why: str
) -> None:
    run = noised(tmp_path / "run", federation(TRUTH), spec, **terms)
    before = query(run.folder, "SELECT COUNT(*) FROM events")
    with pytest.raises(InputError, match=why):
        run.purge(figures=True)
    assert query(run.folder, "SELECT COUNT(*) FROM events") == before


@pytest.mark.parametrize(
    ("spec", "method", "why"),
    [
        (RIDGE | {"data": {"preprocessing": "unknown"}}, "closed_form", "records no figures of rounds"),
        (ROUNDS | {"groups": {"count": 2, "rounds": 2}}, "sifu", "models of groups"),
    ],
    ids=["closed form", "groups"],
)
def test_a_request_that_is_not_exact_keeps_figures_of_heads_and_groups(
    tmp_path: Path, spec: dict[str, Any], method: str, why: str
) -> None:
    run = sifu.train(spec, run=tmp_path / "run", clients=federation(TRUTH))
    run.forget([f"c{GONE}"], method=method)
    with pytest.raises(InputError, match=why):
        run.purge(figures=True)


def test_what_an_ordinary_purge_erases_is_not_given_up(tmp_path: Path) -> None:
    """A purge of all figures keeps what recomputing closed-form certificates needs."""
    run = sifu.train(RIDGE, run=tmp_path / "run", clients=federation(TRUTH))
    run.forget([f"c{GONE}"], "gone", retention="strict")
    assert run.purge(figures=True).figures == COUNTS
    assert run.verify().not_recomputed == {}
    assert run.certificate("gone", "auditor").body["level"] == "exact"
    assert problems(run) == []


def test_a_list_of_what_clients_reported_keeps_the_figures() -> None:
    """Figures are kept if clients reported them, because a server on Flower continues with that list."""
    spec = ROUNDS
    first = {"run": {"spec": spec, "asked": spec}, "sealed": "00"}
    request: Any = SimpleNamespace(level="proven", method="sifu")
    assert figures_policy.keeps_figures(first, [request], ["spec"], by_choice=True) == ""
    assert "reported" in figures_policy.keeps_figures(first, [request], ["reported"], by_choice=True)


def test_an_automatic_rate_that_others_set_stays(tmp_path: Path) -> None:
    spec = ROUNDS | {"local": {"rate": "auto", "steps": 2}}
    runs = [noised(tmp_path / f"{number}", federation(number, 0), spec, sigma=0.5) for number in (7, TRUTH)]
    for run in runs:
        rate = run.spec.local.rate
        run.purge(figures=True)
        assert run.spec.local.rate == rate
        assert problems(run) == []
    differ = places_that_differ(*(run.folder for run in runs))
    assert {place for place in differ if not is_random(place)} <= {"file standing.json"}


def test_a_run_that_does_not_verify_is_not_erased(tmp_path: Path) -> None:
    run = noised(tmp_path / "run", federation(TRUTH))
    execute(run.folder, "UPDATE participation SET drift = drift / 2")
    with pytest.raises((VerificationError, RunDamagedError), match=r"nothing was erased|is damaged or was changed"):
        run.purge(figures=True)


FORGERIES = {
    "a drift": "UPDATE participation SET drift = 0.125 WHERE node = 2 AND client = 1",
    "rounding": "UPDATE nodes SET rounding = 0 WHERE node = 2",
    "the source": "UPDATE nodes SET parent = 2 WHERE kind = 'noise'",
    "sigma of a node": "UPDATE nodes SET noise_std = 0.05 WHERE kind = 'noise'",
    "sigma": "UPDATE requests SET noise_std = 0.05",
    "the level": "UPDATE requests SET level = 'exact'",
    "a charge": "INSERT INTO charges SELECT noise_node, 1, '0.1', 0.01 FROM requests",
    "smoothness": f"UPDATE clients SET smoothness = 1.5, curvature = 0 WHERE client = {GONE}",
    "a nonce": "UPDATE events SET nonce = x'' WHERE kind = 'request received'",
    "a payload": "UPDATE events SET payload = replace(payload, 'proven', 'exact') WHERE kind = 'request done'",
}


@pytest.mark.parametrize("statement", FORGERIES.values(), ids=FORGERIES)
def test_figures_put_back_are_noticed(erased: sifu.Run, statement: str) -> None:
    execute(erased.folder, statement)
    assert erased.verify().problems
    assert sifu_verifier.verify(erased.folder)


@pytest.mark.parametrize("name", ["a drift", "rounding", "the source", "sigma of a node", "a charge", "smoothness"])
def test_they_are_noticed_with_the_key_of_the_operator_too(tmp_path: Path, name: str) -> None:
    erased = noised(tmp_path / "run", federation(TRUTH), sigma="auto")
    erased.purge(figures=True)
    rebuild_chain(erased.folder)
    assert problems(erased) == []  # control: the forger's tool alone breaks nothing
    execute(erased.folder, FORGERIES[name])
    rebuild_chain(erased.folder)
    assert erased.verify().problems
    assert sifu_verifier.verify(erased.folder)


def test_the_event_as_it_was_before_is_noticed(tmp_path: Path) -> None:
    """Payload and nonce of an erased event, restored from a copy, still open its commitment and are reported."""
    run = noised(tmp_path / "run", federation(TRUTH))
    rows = query(run.folder, "SELECT payload, nonce, seq FROM events")
    certificate = query(run.folder, "SELECT * FROM certificates WHERE form = 'auditor'")[0]
    run.purge(figures=True)
    whole = copy_run(run.folder, tmp_path / "copy")
    with sqlite3.connect(run.folder / "run.db") as connection:
        connection.executemany("UPDATE events SET payload = ?, nonce = ? WHERE seq = ?", rows)
    assert any("are present again" in problem for problem in run.verify().problems)
    assert sifu_verifier.verify(run.folder)
    with sqlite3.connect(whole / "run.db") as connection:
        connection.execute("INSERT INTO certificates VALUES (?, ?, ?)", certificate)
    assert any("it is there again" in problem for problem in sifu.open_run(whole).verify().problems)
    assert sifu_verifier.verify(whole)


@pytest.mark.parametrize("kind", ["the event", "what it says"])
def test_figures_that_are_missing_without_the_event_are_noticed(tmp_path: Path, erased: sifu.Run, kind: str) -> None:
    """Even with the operator's key, figures cannot be missing without a purge event that states the erasure."""

    def edit(event: str, content: dict[str, Any]) -> None:
        if event == "purged":
            content.pop(ALL_FIGURES) if kind == "the event" else content[ALL_FIGURES].update(requests=[])

    rebuild_chain(erased.folder, edit)
    assert erased.verify().problems
    assert sifu_verifier.verify(erased.folder)


def test_figures_missing_after_the_event_are_noticed(erased: sifu.Run) -> None:
    erased.forget(["c1"], method="scratch")
    erased.forget(["c0"], "later", sigma=50)
    assert problems(erased) == []
    execute(erased.folder, "UPDATE requests SET noise_std = NULL WHERE request = 'later'")

    def edit(event: str, content: dict[str, Any]) -> None:
        if event == "rolled back" and content["request"] == "later":
            content["choice"]["noise_std"] = None

    rebuild_chain(erased.folder, edit)
    assert any("its figures are missing" in problem for problem in erased.verify().problems)
    assert any("its figures are missing" in problem for problem in sifu_verifier.verify(erased.folder))


def test_a_purge_that_leaves_a_figure_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = noised(tmp_path / "run", federation(TRUTH))
    with monkeypatch.context() as patch:
        patch.setattr(writer, "erase_figures", lambda *arguments: None)
        run.purge(figures=True)
    assert run.verify().problems
    assert sifu_verifier.verify(run.folder)
    other = noised(tmp_path / "other", federation(TRUTH))
    with monkeypatch.context() as patch:
        patch.setattr(erased_figures, "FIGURES", ("noise_std",))
        other.purge(figures=True)
    assert other.verify().problems
    assert sifu_verifier.verify(other.folder)


def test_backups_from_before_are_named_and_one_from_after_restores(tmp_path: Path) -> None:
    run = noised(tmp_path / "run", federation(TRUTH))
    run.backup(tmp_path / "before.backup")
    remains = run.purge(figures=True).remains
    assert any("before.backup" in what and "figures" in what for what, _ in remains)
    run.backup(tmp_path / "after.backup")
    sifu.restore(tmp_path / "after.backup", tmp_path / "restored")
    restored = sifu.open_run(tmp_path / "restored", clients=federation(TRUTH))
    assert problems(restored) == []
    assert list(restored.verify().not_recomputed) == ["gone"]
    assert restored.plan(["c1"], method="sifu").noise_std == 0.0


def test_commands_that_show_a_run_go_on(erased: sifu.Run, cli: Any) -> None:
    for command in (["status"], ["report"], ["requests", "list"], ["certificate", "show"], ["verify"]):
        answer = cli(*command, erased.folder, *(["gone"] if "certificate" in command else []))
        assert answer.code == 0, answer.err
    page = (erased.folder / "report" / "index.html").read_text()
    assert "these certificates can be checked by their signatures alone" in page
    assert "every level can be recomputed" not in page
    assert cli("verify", erased.folder, "--format", "json").json["not_recomputed"].keys() == {"gone"}
    audited = cli("audit", erased.folder, "--request", "gone")
    assert audited.code != 0


def test_the_command_asks_first(tmp_path: Path, cli: Any) -> None:
    run = noised(tmp_path / "run", federation(TRUTH))
    assert cli("purge", run.folder, "--figures").code != 0  # without a confirmation
    assert run.verify().not_recomputed == {}
    answer = cli("purge", run.folder, "--figures", "--yes")
    assert answer.code == 0, answer.err
    assert list(run.verify().not_recomputed) == ["gone"]


def test_nothing_is_asked_where_an_ordinary_purge_erases_the_same(tmp_path: Path, cli: Any) -> None:
    """A purge that costs no certificate its figures needs no confirmation."""
    run = sifu.train(RIDGE, run=tmp_path / "run", clients=federation(TRUTH))
    run.forget([f"c{GONE}"])
    answer = cli("purge", run.folder, "--figures")  # without any input for a prompt
    assert answer.code == 0, answer.err
    assert "No certificate of this run depends on more figures" in answer.err
    assert "Erase them?" not in answer.err
    assert run.verify().not_recomputed == {}


def starts_afresh(folder: Path, request: str) -> bool:
    """Return whether a request started from a model that no data had influenced."""
    rows = query(folder, "SELECT source_node, noise_std FROM requests WHERE request = ?", (request,))
    kinds = query(folder, "SELECT kind FROM nodes WHERE node = ?", (rows[0][0],))
    return rows[0][1] == 0.0 and (rows[0][0] is None or kinds == [("initial",)])


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 60))])
def test_random_journeys_never_add_noise_to_what_is_not_bounded(tmp_path: Path, seed: int) -> None:
    """After a purge of all figures no request starts from a trained model until a fresh start, in random sequences."""
    draw = random.Random(seed)
    run = sifu.train(ROUNDS, run=tmp_path / "run", clients=federation(TRUTH))
    names, is_bounded = [f"c{number}" for number in range(5)], True
    for _ in range(7):
        step, client = draw.choice(["forget", "forget", "records", "purge", "figures", "figures"]), draw.choice(names)
        if step in ("purge", "figures"):
            with suppress(InputError):  # nobody was forgotten yet
                run.purge(figures=step == "figures")
            with run.reader() as reader:
                is_bounded = not RunView(reader).erased_note
        elif len(names) > 2:
            terms = {
                "method": draw.choice(["sifu", "scratch", "auto"]),
                "sigma": draw.choice(["auto", 0.1, 50]),
            }
            records = {"records": [draw.randrange(8)]} if step == "records" else {}
            with suppress(InputError, NotCertifiableError):
                (outcome,) = run.forget([client], retention="strict", **terms, **records)
                fresh = starts_afresh(run.folder, outcome.request)
                assert is_bounded or fresh
                is_bounded = is_bounded or fresh
                names = [name for name in names if name != client or records]
        assert problems(run) == []


def test_the_same_command_finishes_an_interrupted_erasure(tmp_path: Path, cli: Command) -> None:
    run = noised(tmp_path / "run", federation(TRUTH))
    guesses = {label: guess(ROUNDS, tmp_path / f"guess-{label}", label) for label in range(3)}
    total, halfway = purge_killed_at(copy_run(run.folder, tmp_path / "whole"), 0, figures=True), 0
    assert total is not None
    for step in range(1, total + 1):
        folder = copy_run(run.folder, tmp_path / f"killed-{step}")
        assert purge_killed_at(folder, step, figures=True) is None
        halfway += not sifu.open_run(folder).verify().holds
        assert cli("purge", folder, "--figures", "--yes").code == 0
        assert problems(sifu.open_run(folder)) == []
        assert confirmed(folder, guesses) == set()
    assert halfway > 0  # control: some kills left a run that does not verify


def test_a_kill_at_any_step_leaves_all_or_nothing(tmp_path: Path) -> None:
    """After a kill the run does not verify until the erasure is finished; the next writing command finishes it."""
    run = noised(tmp_path / "run", federation(TRUTH))
    guesses = {label: guess(ROUNDS, tmp_path / f"guess-{label}", label) for label in range(3)}
    total = purge_killed_at(copy_run(run.folder, tmp_path / "whole"), 0, figures=True)
    assert total is not None
    assert total >= 12
    begun = 0
    for step in range(1, total + 1):
        folder = copy_run(run.folder, tmp_path / f"killed-{step}")
        assert purge_killed_at(folder, step, figures=True) is None
        left, was_erased = sifu.open_run(folder), bool(query(folder, "SELECT 1 FROM events WHERE kind = 'purged'"))
        if left.verify().holds:
            assert (confirmed(folder, guesses) == set()) == was_erased
        RunWriter.open(folder).close()  # any writing command
        assert not (folder / SCRUB_FILE).exists()
        assert problems(left) == []
        assert (confirmed(folder, guesses) == set()) == was_erased
        if not was_erased:
            assert list(left.verify().not_recomputed) == []
            left.purge(figures=True)
        assert confirmed(folder, guesses) == set()
        begun += was_erased
    assert 0 < begun < total
