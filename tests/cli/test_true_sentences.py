"""Sentences of the commands, which claim nothing that is not true."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

import runs
from run_tools import Command, query
from sifu.store.files import LOCK_FILE, WriterLock, certificate_path
from sifu.store.keys import sign
from sifu.store.reader import RunReader
from sifu_verifier import verify
from sifu_verifier.command import main
from sifu_verifier.verification import on_record


def file_of(run: Path, cli: Command, tmp_path: Path) -> Path:
    certificate = cli("certificate", run, "to-the-middle", "--format", "json").json
    path = tmp_path / "certificate.json"
    path.write_text(json.dumps(certificate))
    return path


@pytest.mark.parametrize("bundled", [False, True])
@pytest.mark.parametrize("change", [{}, {"clients": ["client-007"]}, {"epsilon": 0.001}])
def test_a_certificate_handed_in_is_the_recorded_one_or_a_finding(
    own_run: Path, cli: Command, tmp_path: Path, change: dict[str, object], bundled: bool
) -> None:
    path = file_of(own_run, cli, tmp_path)
    body = json.loads(path.read_text())["body"] | change
    with RunReader(own_run) as reader:
        certificate = sign(own_run, body, reader.value("public_key"))
    path.write_text(json.dumps({"certificate": certificate} if bundled else certificate))
    answer = cli("verify", own_run, "--head", path)
    assert answer.code == (3 if change else 0)
    if change:
        assert str(path) in answer.err


def test_noise_is_trusted_to_be_the_operators(cli: Command) -> None:
    for run, request in ((runs.run("requests"), "to-the-middle"), (runs.run("releases"), "first")):
        body = cli("certificate", run, request, "--format", "json").json["body"]
        assert {"trusted"} == {premise["status"] for premise in body["premises"] if premise["name"] == "noise"}
        assert verify(run) == []


def test_verify_names_the_requests_whose_models_were_erased(own_run: Path, cli: Command) -> None:
    answer = cli("verify", own_run)
    rest = {"to-the-middle", "from-scratch", "both-together", "strictly"}
    assert answer.code == 0
    verified = cli("verify", own_run, "--format", "json").json
    named = {request["request"]: request["recomputed"] for request in verified["requests"]}
    assert {request for request, recomputed in named.items() if not recomputed} == set(on_record(own_run)) == rest
    assert all(request in answer.out for request in rest)


@pytest.mark.parametrize("name", runs.BUILT_BY)
def test_both_verifiers_name_the_requests_that_rest_on_the_record(cli: Command, name: str) -> None:
    """A request is recomputed while its models are there, and no figure over all releases is among its statements."""
    run = runs.run(name)
    requests = cli("verify", run, "--format", "json").json["requests"]
    rest = [line["request"] for line in requests if not line["recomputed"]]
    assert sorted(on_record(run)) == sorted(rest)
    assert not requests or (requests[-1]["request"] in rest) == (name in ("requests", "releases"))


@pytest.mark.parametrize(("name", "request_id"), [("loop", "meanwhile"), ("masked", "first")])
def test_of_a_run_in_use_no_more_is_said_than_was_checked(
    cli: Command, tmp_path: Path, name: str, request_id: str
) -> None:
    run = runs.own(name, tmp_path)
    for holder in (WriterLock(run / LOCK_FILE), nullcontext()):
        with holder as lock:
            values, answer = cli("verify", run, "--format", "json").json, cli("verify", run)
            bundle = cli("certificate", run, request_id, "--bundle", tmp_path / "bundle.json")
        assert [values["in_use"], not values["requests"][0]["recomputed"]] == [lock is not None] * 2
        assert answer.code == 0
        assert ("Verified" in answer.out) == (lock is None)
        assert bundle.code == (0 if lock is None else 5)


def test_verify_says_what_it_covers_and_nothing_that_the_run_lacks(own_trained: Path, cli: Command) -> None:
    assert cli("forget", own_trained, "--clients", "client-001").code == 0
    certificate = certificate_path(own_trained, "r1", "public")
    assert cli("request", own_trained, "--clients", "client-002", "--id", "later").code == 0
    answer = cli("verify", own_trained, "--head", certificate)
    values = cli("verify", own_trained, "--head", certificate, "--format", "json").json
    rows = query(own_trained, "SELECT seq, time FROM events ORDER BY seq DESC LIMIT 1")
    assert [(values["events"], values["last_event"])] == rows
    signed = json.loads(certificate.read_text())["body"]["ledger"]["seq"]
    assert values["heads"] == {str(certificate): signed}
    assert signed < values["events"]
    assert [line["request"] for line in values["requests"]] == ["r1"]
    for figure in (values["events"], values["last_event"], signed):
        assert str(figure) in answer.out
    assert "approvals" not in answer.out
    assert "groups" not in answer.out
    (conclusion,) = [line for line in answer.out.splitlines() if line.startswith("Verified")]
    assert answer.out.splitlines()[-1] == conclusion


def test_the_other_verifier_asks_for_the_key(own_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certificate = certificate_path(own_run, "strictly", "public")
    key = json.loads(certificate.read_text())["public_key"]
    assert main(["certificate", str(certificate)]) == 0
    assert "all good" not in capsys.readouterr().out
    assert main(["certificate", str(certificate), "--public-key", key]) == 0
    assert "all good" in capsys.readouterr().out


def test_an_intact_backup_from_before_a_new_key_is_not_called_damaged(
    own_trained: Path, heads: Path, cli: Command, tmp_path: Path
) -> None:
    assert cli("backup", own_trained, tmp_path / "old.zip").code == 0
    assert cli("key", "--rotate", own_trained).code == 0
    refused = cli("restore", tmp_path / "old.zip", tmp_path / "back")
    assert refused.code == 2
    assert "--accept-older" in refused.err
    assert "damaged" not in refused.err
    assert cli("restore", tmp_path / "old.zip", tmp_path / "back", "--accept-older").code == 0
