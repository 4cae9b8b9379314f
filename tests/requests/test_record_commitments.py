"""Commitments to the identities of records: the person can check them, and nobody else can open them."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

import sifu
import sifu_verifier
from forged_runs import rebuild_chain
from run_tools import Command
from sifu.core.record_commitments import new_nonces, record_commitment
from sifu.errors import InputError
from sifu.store.inbox import messages


@pytest.fixture
def run(tmp_path: Path) -> sifu.Run:
    rows = [
        f"P{number:03},{'south' if number % 2 else 'north'},{number / 7:.3f},{number % 3 % 2}" for number in range(40)
    ]
    (tmp_path / "heart.csv").write_text("patient,hospital,marker,ill\n" + "\n".join(rows) + "\n")
    data = {
        "name": "table", "partition": "given", "file": str(tmp_path / "heart.csv"), "label": "ill", "classes": "0,1",
        "client": "hospital", "id": "patient", "preprocessing": "fixed",
    }  # fmt: skip
    return sifu.train({"data": data, "model": {"kind": "ridge"}}, run=tmp_path / "run")


def test_the_formula_is_that_of_the_documentation() -> None:
    named = b'{"client":"south","identity":"P003","request":"r1","run":"ab"}'
    expected = hashlib.sha256(bytes.fromhex("07" * 32) + named).hexdigest()
    assert record_commitment("ab", "r1", "south", "P003", "07" * 32) == expected


def test_the_person_checks_the_public_certificate(run: sifu.Run, cli: Command) -> None:
    answer = cli("forget", run.folder, "--client", "south", "--records", "P003,P009", "--format", "json").json
    nonces, request = answer["nonces"], answer["requests"][0]["request"]
    assert set(nonces) == {"P003", "P009"}
    file = run.folder / "certificates" / f"{request}.public.json"
    assert all(nonce not in path.read_text("latin-1") for nonce in nonces.values()
               for path in run.folder.rglob("*") if path.is_file())  # fmt: skip
    for identity, nonce in nonces.items():
        assert cli("verify", file, "--record", identity, "--nonce", nonce).code == 0
    for identity, nonce in (("P005", nonces["P003"]), ("P003", nonces["P009"]), ("P003", "00" * 32)):
        assert cli("verify", file, "--record", identity, "--nonce", nonce).code == 3
    assert cli("verify", file, "--record", "P003", "--nonce", "none").code == 2
    asked = ("verify", file, "--record", "P003", "--nonce", nonces["P003"])
    own, values = run.keys().public_keys[-1].key, cli(*asked, "--format", "json").json
    assert (values["named"], values["holds"], values["public_key"]) == (True, True, own)
    assert set(cli("verify", file).out.splitlines()) < set(cli(*asked).out.splitlines())
    for key, code in ((own, 0), ("00" * 32, 3)):
        assert (
            cli(*asked, "--public-key", key).code == cli(*asked, "--public-key", key, "--format", "json").code == code
        )
    body = json.loads(file.read_text())["body"]
    assert len(body["commitments"]["records"]) == 2
    assert "P003" not in file.read_text()
    assert run.verify().problems == [] == sifu_verifier.verify(run.folder)


def test_control_a_forged_certificate_names_no_record(run: sifu.Run, cli: Command, tmp_path: Path) -> None:
    nonces = new_nonces(["P003"])
    run.forget(["south"], "r1", records=["P003"], nonces=nonces)
    file = run.folder / "certificates" / "r1.public.json"
    content = json.loads(file.read_text())
    forged = record_commitment(content["body"]["run"], "r1", "south", "P005", nonces["P003"])
    content["body"]["commitments"]["records"] = [forged]
    (tmp_path / "forged.json").write_text(json.dumps(content))
    checked = ("verify", tmp_path / "forged.json", "--record", "P005", "--nonce", nonces["P003"])
    assert cli(*checked).code == 3


def test_control_other_commitments_in_the_ledger_are_found(run: sifu.Run) -> None:
    run.forget(["south"], "r1", records=["P003"], nonces=new_nonces(["P003"]))

    def other_commitments(kind: str, content: dict[str, Any]) -> None:
        if kind == "request received":
            content["commitments"] = ["0" * 64]

    rebuild_chain(run.folder, other_commitments)
    assert run.verify().problems
    assert sifu_verifier.verify(run.folder)


def test_a_request_in_the_inbox_keeps_its_commitments(run: sifu.Run) -> None:
    nonces = new_nonces(["P003", "P009"])
    with run.writer():  # another process is writing
        sifu.Run(run.folder).request(["south"], "r1", records=["P003", "P009"], nonces=nonces)
    (message,) = messages(run.folder)
    assert message.content is not None
    assert not set(nonces.values()) & set(map(str, message.content.values()))
    run.forget()
    assert run.committed("r1", nonces) == nonces
    assert len(run.certificate("r1").body["commitments"]["records"]) == 2


def test_filed_again_the_first_nonces_count(run: sifu.Run) -> None:
    first, second = new_nonces(["P003"]), new_nonces(["P003"])
    for nonces in (first, second):
        run.request(["south"], "r1", records=["P003"], nonces=nonces)
    assert (run.committed("r1", first), run.committed("r1", second)) == (first, {})
    with pytest.raises(InputError, match="2 nonces were given for 1 records"):
        run.request(["north"], records=["P002"], nonces=new_nonces(["P002", "P004"]))


def test_approvers_see_identities_while_the_request_waits(run: sifu.Run) -> None:
    run.request(["south"], "r1", records=["P009", "P003"])
    assert run.record_identities("r1") == ("P003", "P009")
    run.forget()
    assert run.record_identities("r1") == ()


def test_a_command_that_is_cut_off_has_shown_the_nonces(
    run: sifu.Run, cli: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run keeps no nonce, so an interrupted command has shown the nonces before the commitment."""

    def cut_off(*_: Any) -> None:
        raise InputError("cut off")

    with monkeypatch.context() as patched:
        patched.setattr("sifu.requests.worker.issue_certificates", cut_off)
        answer = cli("forget", run.folder, "--client", "south", "--records", "P003", "--format", "json")
    assert answer.code == 2
    (nonce,) = re.findall(r"P003: ([0-9a-f]{64})", answer.err)
    run.forget()
    file = run.folder / "certificates" / "r1.public.json"
    assert cli("verify", file, "--record", "P003", "--nonce", nonce).code == 0


@pytest.mark.parametrize("command", ["request", "forget"])
def test_a_command_shows_the_nonces_of_a_request_that_was_filed_and_of_no_other(
    run: sifu.Run, cli: Command, command: str
) -> None:
    shown = re.compile(r"(P00[0-9]): ([0-9a-f]{64})")
    refused = cli(command, run.folder, "--client", "south", "--records", "P003,P004")  # P004 is in north
    assert refused.code == 2
    refusals = [refused, cli(command, run.folder, "--client", "south", "--records", "P003", "--epsilon", "-1")]
    assert [shown.findall(answer.out + answer.err) for answer in refusals] == [[], []]
    first = cli(command, run.folder, "--client", "south", "--records", "P003,P009")
    nonces = dict(shown.findall(first.out))
    assert set(nonces) == {"P003", "P009"}
    assert "Give each person the nonce" in first.out
    run.forget()
    file = run.folder / "certificates" / "r1.public.json"
    assert cli("verify", file, "--record", "P009", "--nonce", nonces["P009"]).code == 0


def test_a_request_that_is_filed_again_shows_no_other_nonces(run: sifu.Run, cli: Command) -> None:
    ask = ("request", run.folder, "--client", "south", "--records", "P003,P009", "--id", "r1")
    first, again = cli(*ask), cli(*ask)
    found = [len(re.findall(r"P00[39]: [0-9a-f]{64}", answer.out + answer.err)) for answer in (first, again)]
    assert found == [2, 0]
    assert "when the request was first filed count" in again.out


def test_lists_have_the_number_of_records_and_not_their_rows(run: sifu.Run, cli: Command) -> None:
    run.request(["south"], "r1", records=["P009", "P003"])
    for command in ((run.folder,), (run.folder, "r1")):
        (listed,) = cli("requests", *command, "--format", "json").json["requests"]
        assert (listed["records"], listed["terms"]["records"]) == (2, 2)
        assert listed.get("identities", ["P003", "P009"]) == ["P003", "P009"]
