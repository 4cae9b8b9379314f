"""The `sifu audit` command: verdict, JSON, files and exit codes."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from run_tools import Command, connect, state
from sifu.audit import AuditOptions, Replays, audit_run
from sifu.audit.audit_report import audit_message, draw_audit
from sifu.plots.style import figure_bytes

pytestmark = pytest.mark.long

FEW = ("--replays", 2000, "--shadows", 4, "--seed", 1)


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
    assert (own_run / "audit" / "audit.png").read_bytes().startswith(b"\x89PNG")
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


def test_controls_by_themselves(cli: Command, tmp_path: Path) -> None:
    answer = cli("audit", "--controls", "--seed", 1, "--format", "json")
    assert answer.code == 0
    assert len(answer.json["controls"]) == 4
    assert all(control["passed"] for control in answer.json["controls"])


def test_bad_input_is_a_sentence(own_run: Path, cli: Command) -> None:
    assert cli("audit", own_run, "--request", "no-such").code == 2
    assert cli("audit", own_run / "nothing-here").code in (2, 5)
    assert cli("audit", own_run, "--before", "x.safetensors").code == 2


@pytest.mark.parametrize("changed", [False, True])
def test_the_figure_says_what_was_found(own_run: Path, changed: bool) -> None:
    if changed:
        with closing(connect(own_run)) as connection:
            connection.execute("UPDATE participation SET drift = drift / 4")
    options = AuditOptions(attacks=False, replays=Replays(replays=2000, losses=0), seed=1)
    report = audit_run(own_run, options)
    assert ("contradicts" in audit_message(report) and "Nothing" not in audit_message(report)) == changed
    once, again = (figure_bytes(draw_audit(report), "png") for _ in range(2))
    assert once == again
