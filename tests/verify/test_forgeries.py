"""Forgers who recompute every hash, without and with the key, and forgeries that no check of the folder alone can find.

The chain of hashes protects only against accidents; signatures protect against someone without the key who rebuilds it.
Against the key's holder, certificates protect: their statements must follow from the record.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from forged_runs import execute, rebuild_chain, replace_certificate, resign_everything
from run_tools import connect, query
from sifu.api import verify_run
from sifu.core.ledger import canonical_json
from sifu.store.files import certificate_path
from sifu.store.keys import create_key, sign


def problems(folder: Path) -> str:
    sentences = verify_run(folder).problems
    assert sentences, "the forgery was not caught"
    return "\n".join(sentences)


def test_rebuilding_an_honest_chain_changes_nothing(own_run: Path) -> None:
    rebuild_chain(own_run)
    assert verify_run(own_run).problems == []


@pytest.mark.parametrize("factor", [0.5, 0.999, 1.001, 2.0])
def test_a_smaller_drift_with_a_rebuilt_chain_no_longer_recomputes(own_run: Path, factor: float) -> None:
    """A client was charged for a round: its Psi, charge and certificate do not follow from the new drift."""
    ((subject, clients, source),) = query(
        own_run,
        "SELECT subject, clients, source_node FROM subjects JOIN requests USING (request) WHERE request = 'strictly'",
    )
    client = json.loads(clients)[0]
    last = f"SELECT MAX(node) FROM participation WHERE client = {client} AND node <= {source}"
    where = f"client = {client} AND node = ({last})"
    execute(own_run, f"UPDATE participation SET drift = drift * {factor} WHERE {where}")
    rebuild_chain(own_run)
    text = problems(own_run)
    assert f"request strictly: the charge of subject {subject}" in text
    assert "certificate strictly (auditor): psi says" in text
    assert "ledger.head" in text


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("UPDATE nodes SET mean_shift = mean_shift * 0.5 WHERE node = 3", "ledger.head"),
        ("UPDATE nodes SET rounding = 0.0", "psi says|ledger.head"),
        ("UPDATE nodes SET samples = samples + 10 WHERE node = 3", "the sums of node 3"),
        ("UPDATE nodes SET factor_max = 0.5 WHERE node = 3", "the sums of node 3"),
        ("UPDATE nodes SET noise_std = 9.0 WHERE node = 9", "ledger.head"),
        ("UPDATE nodes SET parent = 17 WHERE node = 37", "round node 37 does not follow"),
        ("UPDATE clients SET expansion = expansion * 0.1", "safe steps cannot have"),
        ("UPDATE clients SET samples = samples + 1 WHERE client = 8", "another number of samples"),
        (
            "INSERT INTO participation (node, client, samples, drift) VALUES (44, 4, 10, 0.0)",
            "client client-004 was forgotten at node 36",
        ),
        ("DELETE FROM participation WHERE client = 4 AND node > 18", "the sums of node 19"),
    ],
)
def test_edited_scalars_with_a_rebuilt_chain_are_caught(own_run: Path, statement: str, expected: str) -> None:
    execute(own_run, statement)
    rebuild_chain(own_run)
    text = problems(own_run)
    assert any(word in text for word in expected.split("|")), text


@pytest.mark.parametrize(
    ("column", "value", "name"),
    [
        ("epsilon", 5.0, "epsilon"),
        ("delta", 0.05, "delta"),
        ("retention", "strict", "retention"),
        ("clients", ["client-011"], "client"),
    ],
)
def test_edited_terms_with_a_rebuilt_chain_are_caught(own_run: Path, column: str, value: Any, name: str) -> None:
    """Changed terms of the first request, in the ledger and in its table, are found."""

    def edit(kind: str, content: dict[str, Any]) -> None:
        if kind == "request received" and content["request"]["request"] == "to-the-middle":
            content["request"][column] = value

    connection = connect(own_run)
    terms = "UPDATE requests SET terms = json_set(terms, ?, json(?)) WHERE request = 'to-the-middle'"
    connection.execute(terms, (f"$.{column}", canonical_json(value).decode()))
    connection.close()
    rebuild_chain(own_run, edit)
    text = problems(own_run)
    assert "to-the-middle" in text
    assert name in text


def test_a_lower_noise_and_its_charge_with_a_rebuilt_chain_are_caught(own_run: Path) -> None:
    def edit(kind: str, content: dict[str, Any]) -> None:
        if kind == "rolled back" and content["request"] == "strictly":
            content["choice"]["noise_std"] = 0.012

    execute(
        own_run,
        "UPDATE requests SET noise_std = 0.012 WHERE request = 'strictly'",
        "UPDATE nodes SET noise_std = 0.012 WHERE node = 36",
    )
    rebuild_chain(own_run, edit)
    text = problems(own_run)
    assert "more than" in text  # the charge exceeds the budget
    assert "certificate strictly (auditor): sigma says" in text


@pytest.mark.parametrize(("request_id", "level"), [("to-the-middle", "exact"), ("strictly", "none")])
def test_a_written_level_is_recomputed(own_run: Path, request_id: str, level: str) -> None:
    def edit(kind: str, content: dict[str, Any]) -> None:
        if kind == "request done" and content["request"] == request_id:
            content["level"] = level

    execute(own_run, f"UPDATE requests SET level = '{level}' WHERE request = '{request_id}'")
    rebuild_chain(own_run, edit)
    assert f"request {request_id}: its level is recorded as '{level}'" in problems(own_run)


def test_a_certificate_signed_by_another_key_is_caught(own_run: Path, tmp_path: Path) -> None:
    """Content, ledger and file agree, but a stranger signed: the ledger names the run's own key."""
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    public = create_key(stranger)
    content = json.loads(certificate_path(own_run, "strictly", "public").read_text())
    text = json.dumps(sign(stranger, content["body"] | {"epsilon": 1.0}, public), indent=1, sort_keys=True)
    replace_certificate(own_run, "strictly", "public", text)
    sentences = problems(own_run)
    assert "the signature of certificate strictly (public) does not hold" in sentences


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epsilon", 1.0),
        ("sigma", 5.0),
        ("psi", 0.0),
        ("level", "exact"),
        ("clients", ["client-009"]),
        ("start", "fresh"),
        ("erased_nodes", []),
        ("remaining_nodes", []),
        ("rounds", 1),
    ],
)
def test_even_the_key_does_not_make_a_false_statement_recompute(own_run: Path, name: str, value: Any) -> None:
    """A signed statement that does not follow from the recorded scalars is found."""
    public = dict(connect(own_run).execute("SELECT key, value FROM run"))["public_key"]
    content = json.loads(certificate_path(own_run, "strictly", "auditor").read_text())
    text = json.dumps(sign(own_run, content["body"] | {name: value}, public), indent=1, sort_keys=True)
    replace_certificate(own_run, "strictly", "auditor", text)
    assert f"certificate strictly (auditor): {name}" in problems(own_run)


def test_the_key_does_not_let_a_model_survive_strict_retention(own_run: Path) -> None:
    """Under `strict` the certificate states that no model with the client's part remains.

    The forger erased one node less than the rule requires and signed a certificate that admits it in the auditor's
    lists. The public sentence is then false, so verification must recompute which nodes had to be erased.
    """
    kept = 20  # client 4 took part in the round that made it, and no noise covers it
    source = own_run / "models" / "44.safetensors"
    connection = connect(own_run)
    row = connection.execute("SELECT kept, bytes, digest, nonce, psi_max FROM models WHERE node = 44").fetchone()
    connection.execute("INSERT INTO models VALUES (?, ?, ?, ?, ?, ?)", (kept, *row))
    connection.close()
    shutil.copy(source, own_run / "models" / f"{kept}.safetensors")

    def edit(kind: str, content: dict[str, Any]) -> None:
        if kind == "rolled back" and content["request"] == "strictly":
            content["dropped_models"].remove(kept)
            content["remaining_models"] = sorted([*content["remaining_models"], kept])
            values = dict(zip(("kept", "bytes", "digest", "nonce", "psi_max"), row, strict=True))
            content["models"].append({"node": kept, **values})

    rebuild_chain(own_run, edit)
    resign_everything(own_run)
    text = problems(own_run)
    assert "strictly" in text
    assert str(kept) in text


# -- limits: forgeries that no check of the folder alone can find ------------------------------------------------------


def test_limit_whoever_holds_the_key_can_rewrite_the_scalars(own_run: Path) -> None:
    """The operator's own figures are trusted: changed rounding errors pass if everything is recomputed and signed
    again.
    """
    execute(own_run, "UPDATE nodes SET rounding = rounding * 1.5 WHERE node = 44")
    rebuild_chain(own_run)
    resign_everything(own_run)
    assert verify_run(own_run).problems == []


def test_limit_a_whole_rewrite_with_a_new_key_is_caught_by_the_memory_only(own_run: Path, heads: Path) -> None:
    verify_run(own_run)
    real_key = dict(connect(own_run).execute("SELECT key, value FROM run"))["public_key"]
    (own_run / "operator.key").unlink()
    forged = create_key(own_run)

    def edit(kind: str, content: dict[str, Any]) -> None:
        if kind == "run created":
            content["run"]["public_key"] = forged

    connection = connect(own_run)
    connection.execute("UPDATE run SET value = ? WHERE key = 'public_key'", (forged,))
    connection.close()
    rebuild_chain(own_run, edit)
    resign_everything(own_run)
    (problem,) = verify_run(own_run).problems
    assert problem.startswith("heads: ")
    heads.unlink()
    assert verify_run(own_run, real_key).problems != []
    assert verify_run(own_run).problems == []


def test_limit_the_last_event_can_be_removed_with_its_signature(own_run: Path) -> None:
    """The last event, a waiting request, can be removed with its signature: only a head kept elsewhere reveals it."""
    execute(
        own_run,
        "DELETE FROM requests WHERE request = 'waits'",
        "DELETE FROM events WHERE seq = (SELECT MAX(seq) FROM events)",
    )
    rebuild_chain(own_run)
    assert verify_run(own_run).problems == []
