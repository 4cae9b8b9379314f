"""The commands of the officer's page run, and its statements hold."""

from __future__ import annotations

import re
import shlex
import shutil
import zipfile
from pathlib import Path

import pytest

import sifu
from run_tools import Command
from sifu.api.submitted import examine
from sifu.errors import InputError
from sifu.store.inbox import SUBMITTED, post

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]
TABLE = Path("heart.csv")


def blocks(page: str, language: str) -> list[str]:
    """Return the page's code blocks in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), flags=re.S | re.M)


def delete_rows(pattern: str) -> None:
    """Delete the table's lines that match the pattern."""
    lines = TABLE.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if not re.search(pattern, line)]
    assert len(kept) < len(lines)
    TABLE.write_text("".join(kept), encoding="utf-8")


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Command) -> Command:
    """Write the table of docs/your-csv.md and its proposed spec into an empty folder; return the command."""
    monkeypatch.chdir(tmp_path)
    (example,) = blocks("docs/your-csv.md", "python")
    exec(example, {})
    assert cli("init", "heart.toml", "--from", TABLE).code == 0
    return cli


def train(cli: Command, *options: str) -> None:
    """Train `heart-run` with the declaration that docs/your-csv.md asks for."""
    answer = cli("train", "heart.toml", "--run", "heart-run", "--set", "data.preprocessing=fixed", *options)
    assert answer.code == 0, answer.err


def held_out_identity() -> str:
    """Return the identity of a patient of south whose row is held out for testing."""
    run = sifu.open_run("heart-run")
    for number in range(60, 120):
        try:
            run.plan(["south"], records=[f"P{number:04}"])
        except InputError:
            return f"P{number:04}"
    raise AssertionError("no row of south is held out")


def test_the_commands_of_the_page_run(table: Command) -> None:
    train(table, "--set", "requests.approval=one")
    commands = [line for block in blocks("docs/dpo.md", "sh") for line in block.splitlines()]
    assert len(commands) == 9
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "sifu"
        answer = table(*arguments)
        assert answer.code == 0, f"{command}\n{answer.err}"
    assert Path("case-1.json").exists()


def test_rows_of_those_who_left_are_not_needed(table: Command) -> None:
    train(table)
    held_out = held_out_identity()
    assert table("forget", "heart-run", "--client", "west").code == 0
    delete_rows(",west,")
    assert table("forget", "heart-run", "--client", "south", "--records", "P0061").code == 0
    delete_rows("^P0061,")
    assert table("forget", "heart-run", "--client", "south", "--records", "P0064").code == 0
    delete_rows(f"^{held_out},")
    assert table("forget", "heart-run", "--client", "south", "--records", "P0066").code == 0
    TABLE.unlink()
    assert table("forget", "heart-run", "--client", "north").code == 0
    assert table("verify", "heart-run").code == 0


def test_rows_that_are_needed_are_missed(table: Command) -> None:
    """Negative control: deleting rows that the page tells the reader to keep has consequences."""
    train(table)
    complete = TABLE.read_text(encoding="utf-8")
    delete_rows("^P0061,")
    answer = table("forget", "heart-run", "--client", "west")
    assert answer.code == 0
    assert "no accuracy is measured" in answer.err
    assert table("forget", "heart-run", "--client", "south", "--records", "P0064").code != 0
    TABLE.write_text(complete, encoding="utf-8")
    assert table("forget", "heart-run", "--client", "south", "--records", "P0064").code == 0
    TABLE.unlink()
    assert table("forget", "heart-run", "--client", "south", "--records", "P0061").code != 0


WAYS = [
    ("closed_form", ["keep.statistics=sum"]),
    ("scratch", ["model.kind=logistic", "stop.max_rounds=4"]),
    ("groups", ["model.kind=logistic", "stop.max_rounds=4", "groups.count=2", "groups.rounds=2"]),
    ("sifu", ["model.kind=logistic", "stop.max_rounds=4"]),
]
"""Methods that need rows of those who stay, each with the options of its run."""


@pytest.mark.parametrize(("method", "options"), WAYS)
def test_a_closed_hospital_is_forgotten_without_its_rows_and_with_those_who_stay(
    table: Command, method: str, options: list[str]
) -> None:
    train(table, *(part for option in options for part in ("--set", option)))
    again = "scratch" if method == "groups" else method  # the second request hits both groups
    delete_rows(",west,")
    assert table("request", "heart-run", "--client", "west", "--method", method).code == 0
    assert table("forget", "heart-run").code == 0
    assert table("verify", "heart-run").code == 0
    assert table("forget", "heart-run", "--client", "south", "--method", again).code == 0
    TABLE.unlink()
    assert table("forget", "heart-run", "--client", "north", "--method", again).code != 0


def test_a_held_out_record_and_the_last_client_are_refused(table: Command) -> None:
    train(table)
    refused = table("request", "heart-run", "--client", "south", "--records", held_out_identity())
    assert refused.code != 0
    assert "that it trained on" in refused.err
    assert table("forget", "heart-run", "--client", "north,south,west").code == 0
    refused = table("request", "heart-run", "--client", "east")
    assert refused.code != 0
    assert "delete the run's folder" in refused.err


def test_the_last_trained_patient_of_a_hospital_is_a_request_for_the_hospital(table: Command) -> None:
    lines = TABLE.read_text(encoding="utf-8").splitlines(keepends=True)
    seen = [line for line in lines if ",west," not in line]
    TABLE.write_text("".join([*seen, *(line for line in lines if ",west," in line)][: len(seen) + 2]), encoding="utf-8")
    train(table, "--set", "data.held_out=0")
    refused = table("request", "heart-run", "--client", "west", "--records", "P0180,P0181")
    assert refused.code != 0
    assert "forget the client instead" in refused.err
    assert table("forget", "heart-run", "--client", "west", "--records", "P0180").code == 0
    assert table("request", "heart-run", "--client", "west", "--records", "P0181").code != 0
    assert table("forget", "heart-run", "--client", "west").code == 0


def test_a_request_covers_all_rows_of_a_person_and_names_the_person_while_it_waits(table: Command) -> None:
    lines = TABLE.read_text(encoding="utf-8").splitlines(keepends=True)
    TABLE.write_text("".join(re.sub("^P0062,", "P0061,", line) for line in lines), encoding="utf-8")
    train(table, "--set", "data.held_out=0")
    assert table("request", "heart-run", "--client", "south", "--records", "P0061", "--id", "case-1").code == 0
    shown = table("requests", "heart-run", "case-1").out
    assert "2 records of south" in shown
    assert "identities: P0061" in shown
    assert table("forget", "heart-run").code == 0
    assert "P0061" not in table("requests", "heart-run", "case-1").out


def test_a_restored_backup_names_the_requests_of_certificates_that_came_later(table: Command) -> None:
    train(table)
    assert table("backup", "heart-run", "backup.zip").code == 0
    assert table("forget", "heart-run", "--client", "west").code == 0
    assert table("forget", "heart-run", "--client", "south", "--records", "P0061").code == 0
    whole, records = (f"heart-run/certificates/r{number}.public.json" for number in (1, 2))
    restored = table("restore", "backup.zip", "first", "--certificate", whole, "--certificate", records)
    assert restored.code == 0
    assert "file it again with sifu forget DIR --clients west" in restored.out
    assert "if their rows still exist" in restored.out
    assert "to be executed" not in table("status", "first").out
    assert table("forget", "first", "--clients", "west").code == 0
    assert "file it again" not in table("restore", "backup.zip", "second").out


def test_an_approved_request_can_be_withdrawn_but_an_executed_one_can_neither_be_undone_nor_repeated(
    table: Command,
) -> None:
    train(table, "--set", "requests.approval=one")
    decide = ("decide", "heart-run")
    for case in ("wrong", "right"):
        assert table("request", "heart-run", "--client", "west", "--id", case, "--actor", "maria").code == 0
        assert table(*decide, case, "approve", "--actor", "jon").code == 0
        if case == "wrong":
            assert table(*decide, case, "withdraw", "--actor", "jon").code == 0
    assert table("forget", "heart-run").code == 0
    assert table(*decide, "right", "withdraw", "--actor", "jon").code != 0
    assert "already forgotten" in table("request", "heart-run", "--client", "west", "--level", "exact").err


def test_a_corrected_row_joins_as_a_new_client(table: Command) -> None:
    train(table)
    assert table("forget", "heart-run", "--client", "south", "--records", "P0061").code == 0
    lines = TABLE.read_text(encoding="utf-8").splitlines(keepends=True)
    row = next(line for line in lines if line.startswith("P0061,"))
    Path("right.csv").write_text(lines[0] + re.sub("^P0061,south,[0-9]+", "P0061,corrected,44", row), encoding="utf-8")
    assert table("join", "heart-run", "--file", "right.csv").code == 0
    assert table("verify", "heart-run").code == 0


def test_a_stolen_key_is_replaced(table: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both the operator and the thief can change the key: whoever knows the new one refuses the thief's."""
    train(table)
    assert table("forget", "heart-run", "--client", "west").code == 0
    certificate = Path("before.json")
    certificate.write_bytes(Path("heart-run/certificates/r1.public.json").read_bytes())
    old = key_of(table, "heart-run")
    shutil.copytree("heart-run", "stolen")
    monkeypatch.setenv("SIFU_PASSPHRASE", "a passphrase")
    assert table("key", "--rotate", "heart-run").code == 0
    assert table("certificate", "heart-run", "r1", "--bundle", "again.json").code == 0
    new = key_of(table, "heart-run")
    for file, key in ((certificate, old), ("again.json", new)):
        assert table("verify", file, "--public-key", key).code == 0
    assert table("verify", certificate, "--public-key", new).code != 0
    monkeypatch.setenv("SIFU_HEADS", str(Path("thief.heads").resolve()))
    assert table("key", "--rotate", "stolen").code == 0
    assert table("verify", "stolen", "--public-key", old).code == 0
    assert table("verify", "stolen", "--public-key", new).code != 0


def key_of(cli: Command, run: str) -> str:
    """Return the run's current public key."""
    return str(cli("key", run, "--format", "json").json["public_keys"][-1]["key"])


def test_a_forgotten_client_cannot_return_under_its_name(table: Command) -> None:
    train(table)
    lines = TABLE.read_text(encoding="utf-8").splitlines(keepends=True)
    rows = [lines[0], *(line for line in lines if ",west," in line)]
    Path("west.csv").write_text("".join(rows), encoding="utf-8")
    Path("other.csv").write_text("".join(rows).replace(",west,", ",other,"), encoding="utf-8")
    assert table("forget", "heart-run", "--client", "west").code == 0
    assert "void its certificate" in table("join", "heart-run", "--file", "west.csv").err
    assert table("join", "heart-run", "--file", "other.csv").code == 0  # the same rows are not recognised


def test_one_held_out_visit_makes_the_whole_request_fail(table: Command) -> None:
    train(table)
    visits = f"P0061,{held_out_identity()}"
    refused = table("request", "heart-run", "--client", "south", "--records", visits)
    assert refused.code != 0
    assert "or the row is kept for testing" in refused.err
    unknown = table("request", "heart-run", "--client", "south", "--records", "P9999")
    assert "or the row is kept for testing" in unknown.err
    assert table("requests", "heart-run", "--pending", "--format", "json").json["requests"] == []


def test_a_backup_is_not_encrypted_with_the_key(table: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIFU_PASSPHRASE", "a passphrase")
    train(table)
    assert table("backup", "heart-run", "backup.zip").code == 0
    with zipfile.ZipFile("backup.zip") as backup:
        assert b"ENCRYPTED" in backup.read("operator.key")
        assert backup.read("run.db").startswith(b"SQLite format 3")


def test_a_run_without_its_key_verifies_and_cannot_execute(table: Command) -> None:
    train(table)
    assert table("forget", "heart-run", "--client", "west").code == 0
    Path("heart-run/operator.key").unlink()
    assert table("verify", "heart-run").code == 0
    assert table("export", "heart-run", "--model", "model.safetensors").code == 0
    assert table("request", "heart-run", "--client", "south").code == 0
    assert table("forget", "heart-run").code != 0


def test_after_a_restore_deleted_rows_cost_the_whole_hospital(table: Command) -> None:
    train(table)
    assert table("backup", "heart-run", "backup.zip").code == 0
    assert table("forget", "heart-run", "--client", "south", "--records", "P0061").code == 0
    delete_rows("^P0061,")
    assert table("restore", "backup.zip", "whole").code == 0
    assert table("forget", "whole", "--client", "south", "--records", "P0061").code != 0
    assert table("forget", "whole", "--client", "south").code == 0
    lines = TABLE.read_text(encoding="utf-8").splitlines(keepends=True)
    rest = [lines[0], *(line.replace(",south,", ",southern,") for line in lines if ",south," in line)]
    Path("southern.csv").write_text("".join(rest), encoding="utf-8")
    assert table("join", "whole", "--file", "southern.csv").code == 0
    assert table("verify", "whole").code == 0


def test_a_refused_console_submission_leaves_no_identity(table: Command) -> None:
    train(table)
    terms = {"records": ["P9999"]}
    content = {"request": "case-1", "clients": ["south"], "deadline_days": 30, "actor": "ann", "terms": terms}
    post(Path("heart-run"), SUBMITTED, "case-1", content | {"nonces": {"P9999": "00" * 32}})
    assert examine(sifu.open_run("heart-run"), "otto").keys() == {"case-1"}
    assert b"letter refused" in Path("heart-run/run.db").read_bytes()
    assert [path for path in Path("heart-run").rglob("*") if path.is_file() and b"P9999" in path.read_bytes()] == []
