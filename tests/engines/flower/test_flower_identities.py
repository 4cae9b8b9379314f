"""Keys of nodes: who takes part, who may request what, and refusals without keys or TLS."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from deployment import make_node_key
from flower_federation import HASTY
from served_runs import SPEC, Federation, new_key

import sifu
from sifu.errors import InputError, NoClientResponseError
from sifu.requests.client_list import ask_for_change, fingerprint_of_file, listed_clients, run_id
from sifu.requests.messages import sign_request
from sifu.server.flower_app import serve_on_flower
from sifu.store.writer import RunWriter


def test_certified_runs_refuse_without_keys_and_demos_are_capped(tmp_path: Path) -> None:
    fed = Federation(tmp_path, SPEC, keyed=False)
    strict = replace(fed.settings, insecure_identity=False)
    with pytest.raises(InputError, match="sifu clients add"):
        serve_on_flower(fed.grid, strict, patience=HASTY)
    assert not (fed.run_folder / "run.db").exists()
    fed.settings = replace(fed.settings, clients=12)
    fed.serve()
    run = sifu.open_run(fed.run_folder)
    name = fed.data[0].name
    for method in ("sifu", "scratch"):
        plan = run.plan([name], method=method)
        assert plan.level == "conditional"
        assert any(premise.name == "identity" and premise.status == "assumed" for premise in plan.premises)
    with pytest.raises(InputError, match="sifu clients add"):
        serve_on_flower(fed.grid, strict, patience=HASTY)


def test_a_server_without_tls_is_refused(tmp_path: Path) -> None:
    fed = Federation(tmp_path, SPEC)
    fed.grid._insecure = True  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="--insecure"):
        fed.serve()


def test_unknown_and_blocked_keys_take_no_part(tmp_path: Path) -> None:
    fed = Federation(tmp_path, SPEC)
    names = [client.name for client in fed.data]
    _, stranger = new_key(tmp_path, "stranger")
    fed.grid.add(4321, fed.grid.apps[fed.nodes[names[0]]], stranger)
    fed.serve({("training", 5): lambda: ask_for_change(fed.run_folder, {"do": "block", "name": names[4]})})
    assert "stranger" not in fed.contacted()
    reader = sifu.open_run(fed.run_folder).reader()
    part = reader.participation()
    rounds_of = {client: int((part.clients == client).sum()) for client in range(12)}
    reader.close()
    assert rounds_of[4] == 5
    assert {count for client, count in rounds_of.items() if client != 4} == {14}
    assert sifu.open_run(fed.run_folder).verify().problems == []


def test_the_list_of_clients_changes_only_as_it_may(tmp_path: Path) -> None:
    fed = Federation(tmp_path, SPEC)
    names = [client.name for client in fed.data]
    other, pem = new_key(tmp_path, "other")
    key = fingerprint_of_file(other)
    taken = listed_clients(fed.run_folder)[0].key
    with pytest.raises(InputError, match="belongs to"):
        ask_for_change(fed.run_folder, {"do": "add", "name": "new", "key": taken})
    with pytest.raises(InputError, match="--replace"):
        ask_for_change(fed.run_folder, {"do": "add", "name": names[0], "key": key})
    fed.serve()
    assert not (fed.run_folder / "clients.json").exists()
    assert [client.name for client in listed_clients(fed.run_folder)] == names
    sifu.open_run(fed.run_folder).request([names[1]], "one")
    with pytest.raises(InputError, match="asked to be forgotten"):
        ask_for_change(fed.run_folder, {"do": "replace", "name": names[1], "key": key})
    ask_for_change(fed.run_folder, {"do": "replace", "name": names[3], "key": key})
    fed.grid.sent.clear()
    assert fed.serve() == ["one"]
    assert names[3] not in fed.contacted()  # its node still uses the old key
    fed.grid.keys[fed.nodes[names[3]]] = pem
    sifu.open_run(fed.run_folder).request([names[2]], "two")
    assert fed.serve() == ["two"]
    assert names[3] in fed.contacted()
    assert sifu.open_run(fed.run_folder).verify().problems == []


def test_a_node_whose_key_names_a_clients_key_too_is_a_stranger(tmp_path: Path) -> None:
    """SuperLink checks signatures with the first registered key of a node, so the client list must ignore a second one.

    An unreadable key must not end the server either, because anyone may register one.
    """
    fed = Federation(tmp_path, SPEC)
    victim = fed.nodes[fed.data[0].name]
    app, key = fed.grid.apps[victim], fed.grid.keys[victim]
    _, mine = new_key(tmp_path, "intruder")
    bent = mine.replace(b"-----BEGIN PUBLIC KEY-----\n", b"-----BEGIN PUBLIC KEY-----\nA: b\n\n")
    for number, strange in enumerate((bent + key, b"\x00", b"")):
        fed.grid.add(5 + number, app, strange)
    fed.grid.apps.pop(victim)
    with pytest.raises(NoClientResponseError, match="still missing"):
        fed.serve()
    fed.grid.add(victim, app, key)
    fed.serve()
    assert fed.contacted() == set(fed.nodes)


def test_a_client_asks_for_itself_and_for_nobody_else(tmp_path: Path) -> None:
    fed = Federation(tmp_path, SPEC)
    names = [client.name for client in fed.data]
    fed.serve()
    for name in ("mine", "strange"):
        make_node_key(tmp_path / name)
    key = fingerprint_of_file(tmp_path / "mine.pub")
    ask_for_change(fed.run_folder, {"do": "replace", "name": names[6], "key": key})
    run, number = sifu.open_run(fed.run_folder), run_id(fed.run_folder)
    good = sign_request(tmp_path / "mine", names[6], number, "own")
    bent = json.loads(json.dumps(good))
    bent["body"]["request"] = "other"
    for statement, match in (
        (sign_request(tmp_path / "mine", names[5], number, "a"), "to be forgotten itself"),
        (sign_request(tmp_path / "strange", names[6], number, "b"), "not on the list"),
        (sign_request(tmp_path / "mine", names[6], "another", "c"), "another run"),
        (bent, "signature does not match"),
    ):
        with pytest.raises(InputError, match=match):
            run.request_signed(statement)
    busy = RunWriter.open(fed.run_folder)
    try:  # the running server will refuse it, and the sender is told at once
        with pytest.raises(InputError, match=r"to be forgotten itself\. The running server will refuse it"):
            run.request_signed(sign_request(tmp_path / "mine", names[5], number, "a"))
    finally:
        busy.close()
    assert run.request_signed(good) == "own"
    assert run.request_signed(good) == "own"
    reader = run.reader()
    kinds = [event.kind for event in reader.events()]
    assert [request.clients for request in reader.requests()] == [(names[6],)]
    reader.close()
    assert kinds.count("letter refused") == 5
    assert [refusal.what for refusal in run.status().refused] == [
        f"signed {name}" for name in ("a", "b", "c", "other", "a")
    ]
    assert run.verify().problems == []
