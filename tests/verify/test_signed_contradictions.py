"""Records that an operator signed again although they contradict themselves: both verifiers report each of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sifu
import sifu_verifier
from forged_runs import Edit, execute, rebuild_chain, replace_certificate, resign_everything
from run_tools import copy_run, query, small_spec
from sifu.api import verify_run
from sifu.store.keys import sign


@pytest.fixture(scope="module")
def solved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a closed-form run in which a client forgot a record and rejoined, and another client left."""
    folder = tmp_path_factory.mktemp("solved") / "run"
    run = sifu.train(small_spec(model={"kind": "ridge"}, ridge={"regularisation": 0.01}), run=folder)
    run.forget(["client-002"], "record", records=[0])
    run.forget(["client-003"], "client")
    return folder


@pytest.fixture
def solved(solved_run: Path, tmp_path: Path) -> Path:
    return copy_run(solved_run, tmp_path / "run")


def on(kind: str, change: Callable[[dict[str, Any]], Any]) -> Edit:
    """Return an edit of the payloads of this kind of event."""
    return lambda found, content: change(content) and None if found == kind else None


def of_another_node(content: dict[str, Any]) -> None:
    """Change the node of a sum that the next solve replaces, so that the tables stay as they are."""
    if content["request"] == "record":
        content["statistics"][0]["node"] += 1


EDITS: dict[str, tuple[Edit | str, str]] = {
    "training ended at another node": (on("training done", lambda content: content.update(node=0)), "names node 0"),
    "no phase": (on("rolled back", lambda content: content["run"].pop("phase")), "sets the phase to 'None'"),
    "a file erased twice": (
        on("rolled back", lambda content: content["dropped_statistics"].append(content["dropped_statistics"][-1])),
        "is named twice",
    ),
    "a sum of another node": (on("rolled back", of_another_node), "is not that of its node"),
    "another penalty": (on("rounds", lambda content: content.update(relative_penalty=0.5)), "solved with r = 0.5"),
    "another name": (on("client joined", lambda content: content.update(client="x")), "in the place of x"),
    "a bounded solve": (
        "UPDATE nodes SET mean_shift = 1.0 WHERE node = 1",
        "node 1 is a solve, but has a finite drift",
    ),
    "a small drift": ("UPDATE participation SET drift = 0.0 WHERE node = 1 AND client = 0", "has a finite drift"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_signed_contradiction_is_reported(solved: Path, name: str) -> None:
    edit, expected = EDITS[name]
    if isinstance(edit, str):
        execute(solved, edit)
    rebuild_chain(solved, None if isinstance(edit, str) else edit)
    resign_everything(solved)
    problems = "\n".join(verify_run(solved).problems)
    assert expected in problems
    assert bool(problems) == bool(expected)
    assert bool(sifu_verifier.verify(solved)) == bool(expected)


def earlier(body: dict[str, Any]) -> None:
    body["issued"] = body["received"][:4].replace("2", "1") + body["issued"][4:]


def later(body: dict[str, Any]) -> None:
    body["issued"] = "2999" + body["issued"][4:]


def better(body: dict[str, Any]) -> None:
    body["premises"][-1] |= {"status": "met", "case": "met"}


def shorter(body: dict[str, Any]) -> None:
    body["premises"].pop()


@pytest.mark.parametrize("change", [None, earlier, later, better, shorter])
@pytest.mark.parametrize("form", ["public", "auditor"])
def test_a_false_statement_in_a_signed_certificate_is_reported(
    solved: Path, change: Callable[[dict[str, Any]], None] | None, form: str
) -> None:
    """The certificate of the last event is changed, so that the chain before it stays as it is."""
    ((content,),) = query(solved, "SELECT content FROM certificates WHERE request = 'client' AND form = ?", (form,))
    certificate = json.loads(content)
    if change is not None:
        change(certificate["body"])
    text = json.dumps(sign(solved, certificate["body"], certificate["public_key"]), indent=1, sort_keys=True)
    replace_certificate(solved, "client", form, text)
    assert bool(verify_run(solved).problems) == (change is not None)
    assert bool(sifu_verifier.verify(solved)) == (change is not None)
