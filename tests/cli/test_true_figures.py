"""Figures of commands about one run, which are the same wherever they are shown."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import runs
from run_tools import Command, query
from sifu.core.certificate_words import words_of


def page_of(cli: Command, run: Path) -> str:
    """Return the page of the report."""
    return Path(cli("report", run, "--format", "json").json["report"]).read_text(encoding="utf-8")


def test_rounds_are_counted_the_same_everywhere(cli: Command, tmp_path: Path) -> None:
    run = runs.own("groups", tmp_path)
    separate = query(run, "SELECT branch, MAX(position) FROM nodes WHERE kind = 'group' GROUP BY branch")
    nodes = {node: rest for node, *rest in query(run, "SELECT node, parent, kind FROM nodes")}
    in_all = sum(rounds for _, rounds in separate) + sum(kind == "round" for _, kind in nodes.values())
    path, node = [], int(query(run, "SELECT value FROM run WHERE key = 'tip'")[0][0])
    while node is not None:
        node, kind = nodes[node]
        path.append(kind)
    current = path.count("round") + (dict(separate)[0] if "merge" in path else 0)
    assert {"merge", "round"} < set(path)
    assert len(separate) > 1  # some groups were built again
    status = cli("status", run, "--format", "json").json
    assert (status["rounds"], status["rounds_run"]) == (current, in_all)
    client = next(row["name"] for row in status["clients"] if row["state"] == "active")
    plan = cli("plan", run, "--clients", client, "--method", "groups", "--format", "json").json
    assert plan["rounds_so_far"] == current
    (shown,) = re.findall(r"<dt>Rounds run</dt><dd>(\d+)<small>([^<]*)", page_of(cli, run))
    assert int(shown[0]) == in_all == sum(map(int, re.findall(r"\d+", shown[1])))


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
    assert "key" in warned()[0]


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


def test_a_report_of_heads_repeats_no_sentence_and_shows_no_empty_card(cli: Command, tmp_path: Path) -> None:
    run = runs.own("closed_form", tmp_path)
    assert cli("forget", run, "--clients", "client-000").code == 0
    page = page_of(cli, run)
    done = [request["request"] for request in cli("status", run, "--format", "json").json["requests"]]
    words = [words_of(cli("certificate", run, request, "--format", "json").json["body"]) for request in done]
    different = [said for number, said in enumerate(words) if said not in words[:number]]
    assert page.count("<article>") == len(different) < len(done) == page.count('id="request-')
    assert "<dd>–" not in page
