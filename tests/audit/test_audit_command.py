"""The `sifu audit` command: verdict, JSON, files and exit codes."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from run_tools import Command, connect, state

pytestmark = pytest.mark.long

FEW = ("--replays", 2000, "--seed", 1)


def test_a_sound_run_passes_and_is_not_changed(own_run: Path, cli: Command) -> None:
    before = state(own_run)
    answer = cli("audit", own_run, *FEW, "--format", "json")
    assert answer.code == 0, answer.err
    assert answer.json["holds"] is True
    assert answer.json["contradictions"] == []
    assert {subject["request"] for subject in answer.json["subjects"]} == {
        "to-the-middle",
        "from-scratch",
        "both-together",
        "strictly",
    }
    assert state(own_run) == before
    assert json.loads((own_run / "audit" / "audit.json").read_bytes())["holds"] is True
    told = cli("audit", own_run, *FEW, "--no-attacks", "--output", own_run.parent / "elsewhere")
    assert told.code == 0
    assert "No contradiction" in told.out
    assert (own_run.parent / "elsewhere" / "audit.json").is_file()
    assert cli("verify", own_run).code == 0  # the audit's files do not disturb the verification of the run


def test_a_contradicted_run_exits_with_3(own_run: Path, cli: Command) -> None:
    with closing(connect(own_run)) as connection:
        connection.execute("UPDATE participation SET drift = drift / 4")
    answer = cli("audit", own_run, *FEW, "--no-attacks")
    assert answer.code == 3
    assert "above Psi" in answer.out
    assert cli("audit", own_run, *FEW, "--no-attacks", "--format", "json").code == 3


def test_bad_input_is_a_sentence(own_run: Path, cli: Command) -> None:
    assert cli("audit", own_run, "--request", "no-such").code == 2
    assert cli("audit", own_run / "nothing-here").code in (2, 5)
    assert cli("audit").code == 2
