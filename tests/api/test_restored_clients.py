"""Restores of old backups: a forgotten client's updates, statistics and group model never come back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import sifu
from forged_runs import rebuild_chain
from run_tools import query, spec_for
from sifu.api import restore
from sifu.errors import InputError
from sifu_verifier import verify

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "updates": (spec_for("sifu"), {"method": "sifu", "sigma": 0.5}),
    "statistics": (spec_for("closed_form"), {"method": "closed_form"}),
    "group_models": (spec_for("groups", stop={"target": 0.0, "max_rounds": 4}), {"method": "groups"}),
}


def holding(folder: Path, what: str, client: int) -> list[str]:
    """Return the files that contain a client's contribution."""
    if what == "group_models":
        rows = query(folder, "SELECT m.node, g.members FROM models m JOIN group_models g ON m.node = g.node")
        return [str(node) for node, members in rows if client in json.loads(members)]
    rows = query(folder, f"SELECT file, clients FROM {what}")
    return [file for file, clients in rows if client in {int(number) for number in json.loads(clients)}]


@pytest.mark.parametrize("what", CASES)
def test_what_a_forgotten_client_had_stored_does_not_come_back(tmp_path: Path, what: str) -> None:
    spec, terms = CASES[what]
    run = sifu.train(spec, run=tmp_path / "run")
    assert holding(run.folder, what, 3)
    run.backup(tmp_path / "old.zip")
    run.forget(["client-003"], "since", level="none", **terms)
    certificate = run.folder / "certificates" / "since.public.json"
    back = tmp_path / "back"
    restore(tmp_path / "old.zip", back, certificates=[certificate])
    assert holding(back, what, 3) == []
    names = {path.name for path in (back / ("models" if what == "group_models" else what)).iterdir()}
    tracked = query(back, "SELECT node FROM models" if what == "group_models" else f"SELECT file FROM {what}")
    ending = ".safetensors" if what == "group_models" else ""
    assert names == {f"{name}{ending}" for (name,) in tracked}
    again = sifu.open_run(back)
    assert again.verify().problems == []
    assert verify(back) == []
    # The level in the certificate is not recorded as a required level.
    assert again.request_record("since").status.terms.level in (None, "none")
    # The client holds the certificate, so no decision can undo the forgotten request.
    for decision in ("withdrawn", "refused"):
        with pytest.raises(InputError, match=f"was executed before the run was restored.*cannot be {decision}"):
            again.decide("since", decision, "a mistake")
    # The other clients lost nothing: the request can be executed again, and so can later ones.
    (outcome,) = again.forget()
    assert outcome.request == "since"
    again.forget(["client-005"], level="none", **terms)
    assert again.verify().problems == []
    assert verify(back) == []


def test_a_restoration_that_erased_too_little_is_found(tmp_path: Path) -> None:
    """Negative control: the event is rewritten, with the operator's key, to state that fewer statistics were erased."""
    spec, terms = CASES["statistics"]
    run = sifu.train(spec, run=tmp_path / "run")
    run.backup(tmp_path / "old.zip")
    run.forget(["client-003"], "since", **terms)
    back = tmp_path / "back"
    restore(tmp_path / "old.zip", back, certificates=[run.folder / "certificates" / "since.public.json"])

    def erase_less(kind: str, content: dict[str, Any]) -> None:
        if kind == "restored":
            content["dropped_statistics"] = content["dropped_statistics"][:1]

    rebuild_chain(back, erase_less)
    assert any("did not erase the statistics" in problem for problem in sifu.open_run(back).verify().problems)
    assert any("statistics erased" in problem for problem in verify(back))


@pytest.mark.parametrize("decision", ["withdrawn", "refused"])
def test_an_end_of_a_restored_request_is_found(tmp_path: Path, decision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forged end of a restored request lets its client come back, although it holds a certificate."""
    spec, terms = CASES["statistics"]
    run = sifu.train(spec, run=tmp_path / "run")
    run.backup(tmp_path / "old.zip")
    run.forget(["client-003"], "since", **terms)
    back = tmp_path / "back"
    restore(tmp_path / "old.zip", back, certificates=[run.folder / "certificates" / "since.public.json"])
    again = sifu.open_run(back)
    again.request(["client-005"], "later", **terms)
    again.decide("later", decision, "a mistake")  # negative control: not restored
    assert again.verify().problems == verify(back) == []
    monkeypatch.setattr("sifu.requests.request_record.restored_requests", lambda reader: set())
    again.decide("since", decision, "a mistake")
    expected = f"(request {decision}) ends request since, which was executed before the run was restored"
    assert [expected in problem for problem in again.verify().problems] == [True]
    assert ["ends since, which was executed before a restore" in problem for problem in verify(back)] == [True]
