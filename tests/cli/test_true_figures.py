"""Figures of commands about one run, which are the same wherever they are shown."""

from __future__ import annotations

import re
from pathlib import Path

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
