"""Restores with certificates: what a certificate states is forgotten again, whatever happened to its request's id."""

from __future__ import annotations

import itertools
import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import sifu
from run_tools import query, spec_for
from sifu.errors import InputError
from sifu_verifier import verify

CLIENTS = tuple(f"client-{number:03}" for number in range(12))


def trained(folder: Path, **sections: Any) -> sifu.Run:
    return sifu.train(spec_for("closed_form", **sections), run=folder)


def certificate(run: sifu.Run, request: str) -> Path:
    return run.folder / "certificates" / f"{request}.public.json"


def restored(run: sifu.Run, file: Path, *given: Path, whole_clients: bool = False) -> sifu.Run:
    """Back the run up, and return a run restored from the backup with the certificates given."""
    run.backup(file)
    folder = file.with_suffix("")
    sifu.restore(file, folder, certificates=given, whole_clients=whole_clients)
    return sifu.open_run(folder)


def solved_with(run: sifu.Run) -> set[str]:
    """Return the clients in the head, which must verify; `run` is brought up to date first."""
    run.release()
    assert run.verify().problems == verify(run.folder) == []
    (clients,) = query(run.folder, "SELECT clients FROM statistics WHERE file LIKE '%sum%'")[0]
    with run.reader() as reader:
        return {reader.clients()[client].name for client in json.loads(clients)}


@pytest.mark.parametrize("meanwhile", ["done", "waiting", "withdrawn"])
def test_an_id_that_a_restored_run_used_again_hides_no_certificate(tmp_path: Path, meanwhile: str) -> None:
    """The first restore lacked the certificate, and the run gave its id to a request of another client."""
    run = trained(tmp_path / "run")
    first = restored(run, tmp_path / "first.zip")
    run.forget(["client-003"])
    if meanwhile == "done":
        assert first.forget(["client-005"])[0].request == "r1"
    else:
        assert first.request(["client-005"]) == "r1"
    if meanwhile == "withdrawn":
        first.decide("r1", "withdrawn", "a mistake")
    second = restored(first, tmp_path / "second.zip", certificate(run, "r1"))
    stay = set(CLIENTS) - {"client-003"} - ({"client-005"} if meanwhile != "withdrawn" else set())
    assert solved_with(second) == stay
    second.forget()
    assert solved_with(second) == stay
    with pytest.raises(InputError, match="can no longer be withdrawn"):
        second.decide("r1-2", "withdrawn", "a mistake")


def test_a_request_that_was_withdrawn_in_one_copy_and_executed_in_another(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    run.request(["client-003"], "leave")
    first = restored(run, tmp_path / "first.zip")
    run.forget()
    first.decide("leave", "withdrawn", "a mistake")
    assert solved_with(first) == set(CLIENTS)  # negative control: nothing says that the client was forgotten
    second = restored(first, tmp_path / "second.zip", certificate(run, "leave"))
    assert solved_with(second) == set(CLIENTS) - {"client-003"}
    second.forget()
    assert solved_with(second) == set(CLIENTS) - {"client-003"}


def test_a_request_that_was_running_without_a_head_cannot_be_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tmp_path / "run")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("sifu.requests.worker.Worker._finish", killed)
        with pytest.raises(KeyboardInterrupt):
            run.forget(["client-003"], "leave")
    control = restored(run, tmp_path / "control.zip")
    control.decide("leave", "withdrawn", "a mistake")  # negative control: without the certificate it may be
    assert solved_with(control) == set(CLIENTS)
    run.backup(tmp_path / "running.zip")
    run.forget()
    sifu.restore(tmp_path / "running.zip", tmp_path / "back", certificates=[certificate(run, "leave")])
    back = sifu.open_run(tmp_path / "back")
    with pytest.raises(InputError, match="executed before the run was restored"):
        back.decide("leave", "withdrawn", "a mistake")
    back.forget()
    assert solved_with(back) == set(CLIENTS) - {"client-003"}


def test_certificates_of_records_and_then_of_the_whole_client(tmp_path: Path) -> None:
    """Two open requests for one client could never both be executed, nor withdrawn."""
    run = trained(tmp_path / "run")
    run.request(["client-003"], "records", records=[0, 1])
    run.backup(tmp_path / "waiting.zip")
    run.forget()
    run.forget(["client-003", "client-005"], "both")
    given = [certificate(run, request) for request in ("records", "both")]
    for number, chosen in enumerate((given, given[::-1], given[1:])):
        folder = tmp_path / str(number)
        assert sifu.restore(tmp_path / "waiting.zip", folder, certificates=chosen).requests == ("both",)
        back = sifu.open_run(folder)
        assert solved_with(back) == set(CLIENTS) - {"client-003", "client-005"}
        assert [outcome.request for outcome in back.forget()] == ["both"]
        assert solved_with(back) == set(CLIENTS) - {"client-003", "client-005"}


def test_a_certificate_that_contradicts_an_open_request_is_refused(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    first = restored(run, tmp_path / "first.zip")
    run.forget(["client-003"], "leave")
    first.request(["client-003", "client-007"], "pair")
    first.backup(tmp_path / "second.zip")
    with pytest.raises(InputError, match=r"has the open request pair.*without this certificate, withdraw it"):
        sifu.restore(tmp_path / "second.zip", tmp_path / "back", certificates=[certificate(run, "leave")])
    assert not (tmp_path / "back").exists()


def test_a_client_that_joined_after_the_backup_does_not_prevent_a_restore(tmp_path: Path) -> None:
    dice = np.random.default_rng(0)
    data = {f"c{number}": (dice.random((8, 3)), dice.integers(0, 2, 8)) for number in range(5)}
    spec = {"model": {"kind": "ridge", "outputs": 2}, "data": {"name": "clients", "preprocessing": "fixed"}}
    run = sifu.train(spec, run=tmp_path / "run", clients={name: data[name] for name in list(data)[:4]})
    run.backup(tmp_path / "old.zip")
    run = sifu.open_run(run.folder, clients=data)
    run.join()
    run.forget(["c4", "c1"], "leave")
    assert sifu.restore(tmp_path / "old.zip", tmp_path / "back", certificates=[certificate(run, "leave")]).requests
    back = sifu.open_run(tmp_path / "back", clients={name: data[name] for name in list(data)[:4]})
    back.forget()
    assert solved_with(back) == {"c0", "c2", "c3"}


def test_records_that_were_forgotten_are_in_no_release_before_their_request_is_approved_again(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", requests={"approval": "one"})
    run.request(["client-003"], "records", actor="ann", records=[0, 1])
    run.backup(tmp_path / "waiting.zip")
    run.decide("records", "approved", actor="bob")
    run.forget()
    sifu.restore(tmp_path / "waiting.zip", tmp_path / "back", certificates=[certificate(run, "records")])
    back = sifu.open_run(tmp_path / "back")
    back.request(["client-005"], "other", actor="ann")
    back.decide("other", "approved", actor="bob")
    back.forget()
    assert solved_with(back) == set(CLIENTS) - {"client-003", "client-005"}
    back.decide("records", "approved", actor="bob")
    back.forget()
    assert len(solved_with(back)) == len(CLIENTS) - 1
    run.request(["client-005"], "other", actor="ann")
    run.decide("other", "approved", actor="bob")
    run.forget()
    heads = [load_file(each.export(tmp_path / f"{each.folder.name}.safetensors")) for each in (run, back)]
    assert all(np.array_equal(heads[0][name], heads[1][name]) for name in heads[0])


def test_records_of_a_restored_request_are_those_of_the_same_data(tmp_path: Path) -> None:
    """A restore erased the salt that the order of the rows is checked with: other rows were forgotten."""
    dice = np.random.default_rng(0)
    data = {f"c{number}": (dice.random((8, 3)), dice.integers(0, 2, 8)) for number in range(4)}
    spec = {"model": {"kind": "ridge", "outputs": 2}, "data": {"name": "clients", "preprocessing": "fixed"}}
    run = sifu.train(spec, run=tmp_path / "run", clients=data)
    run.request(["c1"], "records", records=[0, 1])
    run.backup(tmp_path / "waiting.zip")
    run.forget()
    sifu.restore(tmp_path / "waiting.zip", tmp_path / "back", certificates=[certificate(run, "records")])
    turned = data | {"c1": (data["c1"][0][::-1], data["c1"][1][::-1])}
    with pytest.raises(InputError, match="the order of its samples changed"):
        sifu.open_run(tmp_path / "back", clients=turned).forget()
    back = sifu.open_run(tmp_path / "back", clients=data)
    back.forget()
    assert back.verify().problems == verify(back.folder) == []
    assert "1" not in json.loads((back.folder / "salts.json").read_text())


def test_a_backup_holds_the_requests_in_the_inbox(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = trained(tmp_path / "run")
    with run.writer():  # another process writes to the run
        sifu.open_run(run.folder).request(["client-003"], "posted")
    anchor = run.backup(tmp_path / "whole.zip")
    assert sifu.restore(tmp_path / "whole.zip", tmp_path / "back", anchor).complete
    assert sifu.open_run(tmp_path / "back").request_record("posted").status.state == "received"
    assert caplog.messages == []
    (run.folder / "inbox" / "submitted.s-1.json").write_text("{}")
    with caplog.at_level(logging.WARNING):
        run.backup(tmp_path / "again.zip")
    assert "lacks 1 inbox messages" in caplog.text


@pytest.mark.parametrize("seed", range(4))
def test_random_copies_of_a_run_keep_what_their_certificates_state(tmp_path: Path, seed: int) -> None:
    """Copies of one run forget, wait, withdraw and are restored with all certificates that any of them issued."""
    dice, names = random.Random(seed), itertools.count()
    copies = [trained(tmp_path / "run")]
    given: dict[Path, set[str]] = {}
    for _ in range(8):
        run = dice.choice(copies)
        clients = dice.sample(CLIENTS, dice.choice((1, 1, 2)))
        terms: dict[str, Any] = {"records": [dice.randrange(10)]} if len(clients) == 1 and dice.random() < 0.4 else {}
        action = dice.choice(("forget", "request", "withdraw", "restore"))
        try:
            if action == "forget":
                request = run.forget(clients, **terms)[-1].request
                given[certificate(run, request)] = set() if terms else set(clients)
            elif action == "request":
                run.request(clients, **terms)
            elif action == "withdraw":
                waiting = [each.status.request for each in run.request_records() if each.status.state == "received"]
                run.decide(dice.choice(waiting or ["none"]), "withdrawn", "a mistake")
            else:
                copies.append(restored(run, tmp_path / f"{next(names)}.zip", *given, whole_clients=True))
        except InputError:  # clients that are forgotten or wait already, and contradictions
            continue
    for run in copies:
        try:
            back = restored(run, tmp_path / f"{next(names)}.zip", *given, whole_clients=True)
        except InputError as error:
            if "open request" not in str(error):
                raise
            continue
        gone = set().union(*given.values())
        assert solved_with(back).isdisjoint(gone)
        back.forget()
        assert solved_with(back).isdisjoint(gone)
        assert all(each.status.state != "received" for each in back.request_records())
