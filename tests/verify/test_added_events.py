"""Added events, well chained, signed and with their rows: only those that sifu itself writes are accepted.

The forger has the key in the folder, so verification must know what each kind of event may do. In the second half the
forger also signs certificates again and lies in records that they do not show.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sifu
import sifu_verifier
from forged_runs import add_event, execute, rebuild_chain, resign_everything
from run_tools import query
from sifu.api import verify_run
from sifu.errors import RunDamagedError
from sifu.run.run_view import RunView
from sifu.theory.rollback import Subject


def value(folder: Path, key: str) -> Any:
    return json.loads(query(folder, "SELECT value FROM run WHERE key = ?", (key,))[0][0])


def model_again(folder: Path, node: int) -> dict[str, Any]:
    """Write a model under the number of an erased one; return its entry for an event."""
    content = (folder / "models" / "44.safetensors").read_bytes()
    (folder / "models" / f"{node}.safetensors").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    return {"node": node, "kept": 1, "bytes": len(content), "digest": digest, "nonce": "00" * 32, "psi_max": 0.0}


ADDED: dict[str, tuple[Callable[[Path], tuple[str, dict[str, Any]]], str]] = {
    "facts of training, in an event of no kind": (
        lambda f: ("note", {"run": {"facts": value(f, "facts") | {"smooth_model": True}}}),
        "of a kind that sifu does not write",
    ),
    "facts of training, in an event of ours": (
        lambda f: ("evaluation", {"run": {"facts": value(f, "facts")}}),
        "changes facts",
    ),
    "another spec": (lambda f: ("training done", {"run": {"spec": value(f, "spec")}}), "changes spec"),
    "a run created again": (lambda f: ("run created", {"run": {"phase": "training"}}), "only the first event"),
    "an erased model": (lambda f: ("evaluation", {"models": [model_again(f, 21)]}), "records 21 again"),
    "a model of no node": (lambda f: ("evaluation", {"models": [model_again(f, 99)]}), "node that does not exist"),
    "a model that was cut off as the current one": (
        lambda f: ("rounds", {"models": [model_again(f, 21)], "run": {"tip": "21"}}),
        "makes node 21 the current model",
    ),
    "a phase": (lambda f: ("training done", {"run": {"phase": "training"}}), "sets the phase"),
    "an erasure of nothing": (lambda f: ("purged", {"dropped_models": [1], "subjects": []}), "erases [1]"),
    "models, in a decision": (lambda f: ("request withdrawn", {"request": "waits", "models": []}), "changes models"),
    "a client that joined without a row": (lambda f: ("client joined", {"client": "x"}), "says that there are 12"),
    "a reply refused in no round": (
        lambda f: ("incidents", {"rejections": []}),
        "changes rejections",
    ),
}


@pytest.mark.parametrize("name", ADDED)
def test_an_event_that_sifu_does_not_write_is_named(own_run: Path, name: str) -> None:
    make, expected = ADDED[name]
    kind, payload = make(own_run)
    add_event(own_run, kind, payload)
    problems = "\n".join(verify_run(own_run).problems)
    ((last,),) = query(own_run, "SELECT max(seq) FROM events")
    assert f"events: event {last} ({kind})" in problems
    assert expected in problems


def test_nothing_is_built_on_such_an_event(own_trained: Path) -> None:
    """Also without a certificate, nothing is built on a run whose facts an added event changed."""
    add_event(own_trained, "note", {"run": {"facts": value(own_trained, "facts") | {"smooth_model": False}}})
    with pytest.raises(RunDamagedError, match="does not write"):
        sifu.open_run(own_trained).forget(["client-000"])


def test_control_events_that_sifu_writes_may_be_added(own_run: Path) -> None:
    """Control: added events of kinds that sifu writes, without effect on a claim, are accepted."""
    add_event(own_run, "incidents", {"incidents": []})
    add_event(own_run, "request withdrawn", {"request": "waits", "actor": "somebody", "reason": ""})
    assert verify_run(own_run).problems == []


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER quiet AFTER INSERT ON participation BEGIN UPDATE participation SET drift = 0; END",
        "CREATE TABLE stash (content BLOB)",
        "CREATE VIEW more AS SELECT * FROM participation",
        "CREATE INDEX kept_drifts ON participation (drift)",
        "DROP VIEW weights",
        "ALTER TABLE models ADD COLUMN copy BLOB",
    ],
)
def test_the_database_holds_our_tables_and_nothing_else(own_trained: Path, statement: str) -> None:
    """A trigger would change what is written, and any other object could keep erased data."""
    execute(own_trained, statement)
    assert "database: " in "\n".join(verify_run(own_trained).problems)
    assert " TABLE " in statement or sifu_verifier.verify(own_trained)
    with pytest.raises(RunDamagedError, match="as sifu makes it"):
        sifu.open_run(own_trained).forget(["client-000"])


# -- with certificates signed again ------------------------------------------------------------------------------------

Groups = Callable[[tuple[Subject, ...]], tuple[Subject, ...]]


@pytest.mark.parametrize(
    "groups",
    [
        lambda subjects: (replace(subjects[0], clients=(0, 1)),),
        lambda subjects: (replace(subjects[0], clients=(0,)),),
        lambda subjects: (replace(subjects[0], clients=(0, 2)),),
        lambda subjects: (replace(subjects[0], clients=()),),
    ],
    ids=["both as one", "one of two", "another one", "nobody"],
)
def test_who_is_hidden_is_who_asked(own_trained: Path, monkeypatch: pytest.MonkeyPatch, groups: Groups) -> None:
    """Two clients asked; hiding others, or both as one, is found."""
    honest = RunView.new_subjects
    monkeypatch.setattr(RunView, "new_subjects", lambda *arguments: groups(honest(*arguments)))
    sifu.open_run(own_trained).forget(["client-000", "client-001"], "both", sigma=0.05)
    monkeypatch.undo()
    assert "request both: it hides the clients" in "\n".join(verify_run(own_trained).problems)


@pytest.mark.parametrize("which", ["source", "noised", "final"])
def test_a_certificate_commits_to_the_models_of_its_request(own_run: Path, which: str) -> None:
    """A recorded digest of another node in the certified models is found, although its commitment opens."""
    recorded = {
        model["node"]: model["digest"]
        for (payload,) in query(own_run, "SELECT payload FROM events")
        for model in json.loads(payload).get("models", [])
    }

    def edit(kind: str, content: dict[str, Any]) -> None:
        if kind == "request done" and content["request"] == "strictly":
            content["certified_models"][which] |= {"node": 18, "digest": recorded[18]}

    rebuild_chain(own_run, edit)
    resign_everything(own_run)
    assert "which are not the request's" in "\n".join(verify_run(own_run).problems)


def test_a_certificate_names_the_event_before_it(own_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate that names an early event is reported, because it would not cover the later ones."""
    from sifu.requests.certification import RecordedRequest

    real = RecordedRequest.auditor_form

    def naming_the_first(self: RecordedRequest, models: Any, ledger: Any, *given: Any) -> Any:
        return real(self, models, self.reader.events()[0], *given)

    monkeypatch.setattr(RecordedRequest, "auditor_form", naming_the_first)
    sifu.open_run(own_run).forget(["client-006"], "late", method="scratch")
    monkeypatch.undo()
    assert "ledger.seq says 1" in "\n".join(verify_run(own_run).problems)
