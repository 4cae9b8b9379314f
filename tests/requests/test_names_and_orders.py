"""Forged names, orders and fields, written by a stranger or a dishonest operator.

The first half adds a trigger under a table's name, replaces a model, and uses names that lead out of the folder. In the
second half the forger rebuilds and signs the whole chain.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sifu
from forged_runs import add_event, execute, rebuild_chain, replace_certificate
from run_tools import connect, query, small_spec
from sifu.api import verify_run
from sifu.checking.stored_models import agree, differing
from sifu.errors import RunDamagedError
from sifu.run.run_view import RunView
from sifu.store.files import certificate_path
from sifu.store.keys import sign
from sifu.store.writer import RunWriter


def problems(folder: Path) -> str:
    return "\n".join(verify_run(folder).problems)


# -- planted triggers, models and names --------------------------------------------------------------------------------


def plant_trigger(folder: Path, name: str, body: str) -> None:
    """Write a trigger with the name of a table into the database file, before that table."""
    connection = sqlite3.connect(folder / "run.db", isolation_level=None)
    connection.execute(f"CREATE TRIGGER {name} {body}")
    rows = connection.execute("SELECT * FROM sqlite_master ORDER BY rowid").fetchall()
    place = next(k for k, row in enumerate(rows) if row[:2] == ("table", name))
    rows.insert(place, rows.pop())
    connection.execute("PRAGMA writable_schema=ON")
    connection.execute("DELETE FROM sqlite_master")
    connection.executemany("INSERT INTO sqlite_master VALUES (?, ?, ?, ?, ?)", rows)
    connection.execute("PRAGMA writable_schema=RESET")
    connection.close()


def test_a_trigger_cannot_hide_behind_the_name_of_a_table(own_trained: Path) -> None:
    plant_trigger(
        own_trained, "requests", "AFTER INSERT ON participation BEGIN UPDATE participation SET drift = 0; END"
    )
    assert "database: 'requests' is not as sifu makes it" in problems(own_trained)
    with pytest.raises(RunDamagedError, match="as sifu makes it"):
        sifu.open_run(own_trained).forget(["client-000"])


@pytest.mark.parametrize("node", [44, 36])
def test_a_model_is_not_put_in_place_of_another(own_run: Path, node: int) -> None:
    """An added event that may record models, with the digest of a file that was never trained, is found."""
    content = bytearray((own_run / "models" / f"{node}.safetensors").read_bytes())
    content[-1] ^= 1
    (own_run / "models" / f"{node}.safetensors").write_bytes(content)
    row = dict(
        zip(
            ("node", "kept", "bytes", "nonce", "psi_max"),
            query(own_run, "SELECT node, kept, bytes, nonce, psi_max FROM models WHERE node = ?", (node,))[0],
            strict=True,
        )
    )
    add_event(own_run, "evaluation", {"models": [row | {"digest": hashlib.sha256(content).hexdigest()}]})
    assert f"records other models of nodes [{node}]" in problems(own_run)


def test_figures_of_earlier_models_are_not_written_over(own_run: Path) -> None:
    row = {"node": 8, "subset": "active", "samples": 120, "accuracy": 0.99, "loss": 0.01}
    add_event(own_run, "evaluation", {"evaluations": [row]})
    assert "an evaluation of another model than the current one" in problems(own_run)


def test_a_request_id_does_not_lead_out_of_the_folder(own_run: Path) -> None:
    """A certificate whose request id leads out of the folder is refused, and no file is written there."""
    execute(own_run, "INSERT INTO certificates VALUES ('../../planted', 'public', 'content of a stranger')")
    with pytest.raises(RunDamagedError, match="planted"):
        RunWriter.open(own_run)
    assert not (own_run.parent / "planted.public.json").exists()
    assert "planted" in problems(own_run)


def test_a_request_received_by_an_unusable_id_is_named(own_run: Path) -> None:
    (row,) = query(own_run, "SELECT payload FROM events WHERE kind = 'request received' ORDER BY seq DESC LIMIT 1")
    add_event(
        own_run,
        "request received",
        json.loads(row[0]) | {"request": json.loads(row[0])["request"] | {"request": "../x"}},
    )
    assert "which is not a usable id" in problems(own_run)


# -- rebuilt and signed chains -----------------------------------------------------------------------------------------


def test_a_request_has_the_order_in_which_it_was_carried_out(
    own_trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise covers clients that asked at its order or before, so a false order 9 would also cover later requests."""
    run = sifu.open_run(own_trained)
    for check in ("sifu.api.run_folder.check_integrity", "sifu.store.writer.check_record"):
        monkeypatch.setattr(check, lambda reader: None)  # these checks would stop the forger here
    monkeypatch.setattr(RunView, "next_order", 9)
    run.forget(["client-000"], "first", sigma=0.05)
    monkeypatch.setattr(RunView, "next_order", 2)
    run.forget(["client-001"], "second", sigma=0.05)
    monkeypatch.undo()
    (level,) = query(own_trained, "SELECT level FROM requests WHERE request = 'second'")[0]
    assert level == "exact"  # the forger's false claim
    assert "names order 9" in problems(own_trained)


def test_a_participant_was_a_client_by_then(own_trained: Path) -> None:
    """A participant must have joined before the round; otherwise the claims about the clients known
    then would miss it.
    """
    count = 12
    execute(own_trained, f"INSERT INTO participation VALUES (3, {count}, 10, 0.0)")
    execute(
        own_trained,
        f"INSERT INTO clients SELECT {count}, 'late', samples, local_steps, expansion FROM clients WHERE client = 0",
    )
    rebuild_chain(own_trained)
    assert "records a participant beyond the 12 clients" in problems(own_trained)


def reissued(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]], form: str = "public") -> str:
    """Return the findings of verification after the certificate `strictly` was changed and signed again."""
    public = dict(connect(folder).execute("SELECT key, value FROM run"))["public_key"]
    body = json.loads(certificate_path(folder, "strictly", form).read_text())["body"]
    replace_certificate(
        folder, "strictly", form, json.dumps(sign(folder, change(body), public), indent=1, sort_keys=True)
    )
    return problems(folder)


HIDDEN: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "another client, the right one under its path": lambda body: (
        body | {"clients": ["client-009"], "clients[0]": "client-004"}
    ),
    "another ledger, the right one under its path": lambda body: (
        body
        | {
            "ledger": {"seq": 1, "head": "00"},
            "ledger.seq": body["ledger"]["seq"],
            "ledger.head": body["ledger"]["head"],
        }
    ),
    "a figure as text": lambda body: body | {"epsilon": str(body["epsilon"])},
    "one for true": lambda body: body | {"untouched": int(body["untouched"])},
    "nothing under a new name": lambda body: body | {"also": {}},
    "null under a new name": lambda body: body | {"also": None},
    "null left out": lambda body: {key: value for key, value in body.items() if key != "records"},
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_certificate_is_compared_as_it_is_built(own_run: Path, name: str) -> None:
    assert "certificate strictly (public): " in reissued(own_run, HIDDEN[name])


def test_names_that_look_like_numbers_are_names(tmp_path: Path) -> None:
    """Clients 1 and 01 are different, and a certificate of one does not hold for the other."""
    from dataclasses import replace

    from sifu.core.spec import Spec
    from sifu.run.clients_and_engine import clients_from_spec

    spec = small_spec(stop={"max_rounds": 3})
    clients = [
        replace(client, name=str(number)) for number, client in enumerate(clients_from_spec(Spec.from_mapping(spec)))
    ]
    run = sifu.train(spec, run=tmp_path / "run", clients=clients)
    run.forget(["1"], "strictly", sigma=0.1)
    assert problems(run.folder) == ""
    assert "clients[0] says '01', recomputed '1'" in reissued(run.folder, lambda body: body | {"clients": ["01"]})


def test_a_request_that_is_done_has_both_certificates(own_run: Path) -> None:
    def edit(kind: str, content: dict[str, Any]) -> None:
        if kind == "request done" and content["request"] == "strictly":
            del content["certificates"]["public"]

    execute(own_run, "DELETE FROM certificates WHERE request = 'strictly' AND form = 'public'")
    certificate_path(own_run, "strictly", "public").unlink()
    rebuild_chain(own_run, edit)
    assert "issues the certificates ['auditor']" in problems(own_run)


@pytest.mark.parametrize(
    ("first", "other", "same"),
    [
        (1.0, 1.0 + 1e-12, True), (1, 1.0, True), (0.0, 1e-300, False), (float("inf"), 1.0, False),
        (float("inf"), float("inf"), True), (True, 1, False), (True, True, True), ("1", "1.0", False), ("1", 1, False),
        (None, 0, False), (None, None, True),
    ],
)  # fmt: skip
def test_what_counts_as_the_same(first: Any, other: Any, same: bool) -> None:
    assert agree(first, other) is same
    assert agree(other, first) is same
    assert (list(differing({"a": [first]}, {"a": [other]})) == []) is same


def test_noise_that_was_recorded_but_not_added_is_noticed(own_trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an operator signs for noise but adds none, the models on disk are too close to each other."""
    import sifu.methods.base as method

    assert hasattr(method, "noised_model")
    monkeypatch.setattr(method, "noised_model", lambda view, plan, model: model)
    sifu.open_run(own_trained).forget(["client-000"], sigma=0.05)
    monkeypatch.undo()
    assert "from the one it was made from; by its record" in problems(own_trained)


@pytest.mark.parametrize(
    "change",
    [lambda text: text.replace('{"', '{"actor":"somebody else","', 1), lambda text: text.replace(":", ": ", 1)],
)
def test_an_event_is_written_one_way_only(own_run: Path, change: Callable[[str], str]) -> None:
    """An event that is not canonical JSON is refused: other programs may read a duplicate key differently."""
    from sifu.core.ledger import chain, commit

    connection = connect(own_run)
    seq, time, kind, payload, nonce = connection.execute(
        "SELECT seq, time, kind, payload, nonce FROM events ORDER BY seq DESC LIMIT 1"
    ).fetchone()
    (before,) = connection.execute("SELECT hash FROM events WHERE seq = ?", (seq - 1,)).fetchone()
    commitment = commit(nonce, change(payload).encode())
    link = chain(before, seq, time, kind, commitment)
    connection.execute(
        "UPDATE events SET payload = ?, commitment = ?, hash = ? WHERE seq = ?",
        (change(payload), commitment, link, seq),
    )
    connection.execute("UPDATE run SET value = ? WHERE key = 'head'", (f"{seq}:{link.hex()}",))
    connection.close()
    assert "is not written as canonical JSON" in problems(own_run)
