"""Records that an operator signed again although they contradict themselves: both verifiers report each of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import sifu
import sifu_verifier
from forged_runs import Edit, execute, rebuild_chain, replace_certificate, resign_everything
from run_tools import copy_run, query, small_spec
from sifu.api import verify_run
from sifu.errors import InputError
from sifu.store.files import certificate_path
from sifu.store.keys import create_key, sign


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


# -- a run of rounds ---------------------------------------------------------------------------------------------------


def on_request(kind: str, request: str, change: Callable[[dict[str, Any]], Any]) -> Edit:
    """Return an edit of the payload of this kind of event of a request."""
    return lambda found, content: (
        change(content) and None if found == kind and content.get("request") == request else None
    )


def _terms(content: dict[str, Any]) -> None:
    if content["request"]["request"] == "to-the-middle":
        content["request"]["epsilon"] = 5.0


FIGURES: dict[str, tuple[str, Edit | None]] = {
    "the sums of node 3": ("UPDATE nodes SET samples = samples + 10 WHERE node = 3", None),
    "the sums of node 4": ("UPDATE nodes SET factor_max = 0.5 WHERE node = 4", None),
    "the sums of node 19": ("DELETE FROM participation WHERE client = 4 AND node > 18", None),
    "round node 37 does not follow": ("UPDATE nodes SET parent = 17 WHERE node = 37", None),
    "safe steps cannot have": ("UPDATE clients SET expansion = expansion * 0.1", None),
    "another number of samples": ("UPDATE clients SET samples = samples + 1 WHERE client = 8", None),
    "client client-004 was forgotten at node 36": (
        "INSERT INTO participation (node, client, samples, drift) VALUES (44, 4, 10, 0.0)", None
    ),
    "request strictly: the charge of subject": (
        "UPDATE participation SET drift = drift * 1.001 WHERE node = 19 AND client = 4", None
    ),
    "request to-the-middle: ": (
        "UPDATE requests SET terms = json_set(terms, '$.epsilon', 5.0) WHERE request = 'to-the-middle'",
        on("request received", _terms),
    ),
    "more than": (
        "UPDATE requests SET noise_std = 0.012 WHERE request = 'strictly'; "
        "UPDATE nodes SET noise_std = 0.012 WHERE node = 36",
        on_request("rolled back", "strictly", lambda content: content["choice"].update(noise_std=0.012)),
    ),
    "its level is recorded as 'exact'": (
        "UPDATE requests SET level = 'exact' WHERE request = 'strictly'",
        on_request("request done", "strictly", lambda content: content.update(level="exact")),
    ),
    "node 9 is not the one that its choice describes": ("UPDATE nodes SET noise_std = 9.0 WHERE node = 9", None),
    "from the one it was made from; by its record": ("UPDATE nodes SET mean_shift = mean_shift * 0.9", None),
    "records noise in a round": ("UPDATE nodes SET noise_std = 5.0, request_order = 4 WHERE node = 19", None),
    "does not begin with an initial model": ("UPDATE nodes SET request_order = 9 WHERE node = 0", None),
    "node 3 has a drift that is negative": ("UPDATE participation SET drift = -drift WHERE node = 3", None),
    "node 3 has a mean shift": ("UPDATE nodes SET mean_shift = -mean_shift WHERE node = 3", None),
    "node 4 has a mean shift": ("UPDATE nodes SET rounding = -1e-13 WHERE node = 4", None),
}  # fmt: skip
"""Statements and edits of a forger who then signs every certificate again, by the finding that they lead to."""


@pytest.mark.parametrize("expected", FIGURES)
def test_figures_that_contradict_each_other_are_reported(own_run: Path, expected: str) -> None:
    statements, edit = FIGURES[expected]
    execute(own_run, *statements.split("; "))
    rebuild_chain(own_run, edit)
    with suppress(InputError):  # sifu does not sign what it cannot read
        resign_everything(own_run)
    assert expected in "\n".join(verify_run(own_run).problems)
    assert sifu_verifier.verify(own_run)


def test_control_an_honest_chain_and_figures_that_nothing_contradicts_pass(own_run: Path) -> None:
    """The operator's own figures are trusted, so other rounding errors pass if everything is signed again."""
    rebuild_chain(own_run)
    assert verify_run(own_run).problems == []
    execute(own_run, "UPDATE nodes SET rounding = rounding * 1.5 WHERE node = 44")
    rebuild_chain(own_run)
    resign_everything(own_run)
    assert verify_run(own_run).problems == sifu_verifier.verify(own_run) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epsilon", 1.0), ("sigma", 5.0), ("psi", 0.0), ("level", "exact"), ("clients", ["client-009"]),
        ("start", "fresh"), ("erased_nodes", []), ("remaining_nodes", []), ("rounds", 1),
    ],
)  # fmt: skip
def test_a_certificate_that_contradicts_the_record_is_reported(own_run: Path, name: str, value: Any) -> None:
    ((public,),) = query(own_run, "SELECT value FROM run WHERE key = 'public_key'")
    body = json.loads(certificate_path(own_run, "strictly", "auditor").read_text())["body"]
    text = json.dumps(sign(own_run, body | {name: value}, public), indent=1, sort_keys=True)
    replace_certificate(own_run, "strictly", "auditor", text)
    assert f"certificate strictly (auditor): {name}" in "\n".join(verify_run(own_run).problems)
    assert sifu_verifier.verify(own_run)


def test_a_certificate_signed_by_another_key_is_reported(own_run: Path, tmp_path: Path) -> None:
    public = create_key(tmp_path)
    body = json.loads(certificate_path(own_run, "strictly", "public").read_text())["body"]
    text = json.dumps(sign(tmp_path, body, public), indent=1, sort_keys=True)
    replace_certificate(own_run, "strictly", "public", text)
    assert "the signature of certificate strictly (public)" in "\n".join(verify_run(own_run).problems)
    assert sifu_verifier.verify(own_run)


def test_a_model_that_survives_strict_retention_is_reported(own_run: Path) -> None:
    """The forger erased one node less than the rule requires, and signed a certificate that admits it."""
    kept = 20  # client 4 took part in the round that made it, and no noise covers it
    (row,) = query(own_run, "SELECT kept, bytes, digest, nonce, psi_max FROM models WHERE node = 44")
    values = ", ".join(map(repr, row))
    execute(own_run, f"INSERT INTO models VALUES ({kept}, {values})")
    shutil.copy(own_run / "models" / "44.safetensors", own_run / "models" / f"{kept}.safetensors")

    def admit(content: dict[str, Any]) -> None:
        content["dropped_models"].remove(kept)
        content["remaining_models"] = sorted([*content["remaining_models"], kept])
        names = ("kept", "bytes", "digest", "nonce", "psi_max")
        content["models"].append({"node": kept, **dict(zip(names, row, strict=True))})

    rebuild_chain(own_run, on_request("rolled back", "strictly", admit))
    resign_everything(own_run)
    text = "\n".join(verify_run(own_run).problems)
    assert "strictly" in text
    assert str(kept) in text
    assert sifu_verifier.verify(own_run)
