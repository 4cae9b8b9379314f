"""The commands of the data-protection officer's page run, and its statements about rows hold."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import sifu
from run_tools import Command
from sifu.errors import InputError

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
    assert len(commands) == 8
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "sifu"
        answer = table(*arguments)
        assert answer.code == 0, f"{command}\n{answer.err}"
    assert Path("case-1.zip").exists()


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


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("closed_form", ["keep.statistics=sum"]),
        ("scratch", ["model.kind=logistic", "stop.max_rounds=4"]),
        ("groups", ["model.kind=logistic", "stop.max_rounds=4", "groups.count=2", "groups.rounds=2"]),
        ("sifu", ["model.kind=logistic", "stop.max_rounds=4"]),
    ],
)
def test_other_ways_need_the_rows_of_those_who_stay(table: Command, method: str, options: list[str]) -> None:
    train(table, *(part for option in options for part in ("--set", option)))
    again = "scratch" if method == "groups" else method  # the second request hits both groups
    assert table("forget", "heart-run", "--client", "west", "--method", method).code == 0
    delete_rows(",west,")
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
