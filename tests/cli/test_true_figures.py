"""Figures of commands about one run, which are the same wherever they are shown."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from run_tools import Command

SEPARATE, MOST = 3, 5
SPEC = f"""
[data]
clients = 12
samples_per_client = 8
[local]
steps = 3
rate = 0.05
[groups]
count = 3
rounds = {SEPARATE}
[stop]
target = 0.0
max_rounds = {MOST}
"""


def page_of(cli: Command, run: Path) -> str:
    """Return the page of the report."""
    return Path(cli("report", run, "--format", "json").json["report"]).read_text(encoding="utf-8")


def test_rounds_are_counted_the_same_everywhere(cli: Command, tmp_path: Path) -> None:
    run, spec = tmp_path / "run", tmp_path / "spec.toml"
    spec.write_text(SPEC)
    assert cli("train", spec, "--run", run).code == 0
    for in_all, current in ((MOST, MOST), (MOST + MOST + SEPARATE, SEPARATE + MOST)):
        status = cli("status", run, "--format", "json").json
        assert (status["rounds"], status["rounds_run"]) == (current, in_all)
        plan = cli("plan", run, "--clients", "client-005", "--method", "groups", "--format", "json").json
        assert plan["rounds_so_far"] == current
        (shown,) = re.findall(r"<dt>Rounds run</dt><dd>(\d+)<small>([^<]*)", page_of(cli, run))
        assert int(shown[0]) == in_all == sum(map(int, re.findall(r"\d+", shown[1])))
        if current == MOST:  # the request trains common rounds, and the group that held the client is built again
            assert cli("forget", run, "--clients", "client-001", "--method", "groups").code == 0


def test_a_purge_changes_no_number_of_requests(own_run: Path, cli: Command) -> None:
    executed = len([row for row in cli("status", own_run, "--format", "json").json["requests"] if row["finished"]])
    for purged in (False, True):
        assert not purged or cli("purge", own_run).code == 0
        assert set(re.findall(r"After (\d+) requests", page_of(cli, own_run))) == {str(executed)}


def test_status_warns_of_what_keeps_a_run_from_going_on(own_trained: Path, own_run: Path, cli: Command) -> None:
    def warned() -> list[str]:
        answer = cli("status", own_trained, "--format", "json")
        assert answer.code == 0
        shown = "".join(cli("status", own_trained).out.split())
        assert all("".join(warning.split()) in shown for warning in answer.json["warnings"])
        return answer.json["warnings"]

    assert warned() == []
    key = own_trained / "operator.key"
    kept = key.read_bytes()
    key.write_bytes((own_run / "operator.key").read_bytes())
    assert len(warned()) == 1  # another key
    key.unlink()
    assert len(warned()) == 1  # no key
    assert cli("request", own_trained, "--clients", "client-001", "--id", "unsigned").code == 0
    assert sum("unsigned" in warning for warning in warned()) == 1
    assert cli("forget", own_trained).code != 0
    key.write_bytes(kept)
    assert len(warned()) == 1
    assert cli("forget", own_trained).code == 0
    assert "events" in warned()[0]


def test_status_warns_of_a_head_that_is_missing_or_elsewhere(
    own_trained: Path, own_run: Path, cli: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(own_trained, tmp_path / "copy"))
    witness, memory = str(tmp_path / "witness.jsonl"), str(tmp_path / "memory")
    cases = [(own_run, witness, "/dev/null", 0), (own_trained, witness, "/dev/null", 1)]
    cases += [(own_trained, "", memory, 0), (copy, "", memory, 1)]
    for number, (run, told, seen, warned) in enumerate(cases):
        monkeypatch.setenv("SIFU_WITNESS", told)
        monkeypatch.setenv("SIFU_HEADS", seen)
        assert len(cli("status", run, "--format", "json").json["warnings"]) == warned
        assert bool(cli("backup", run, tmp_path / f"{number}.zip").code) == bool(warned)
