"""Whole runs over Flower's messages: agreement with the embedded engine, requests during training, and kills."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from served_runs import SPEC, Federation, new_key

import sifu
from sifu.errors import InputError, NoClientResponseError


def test_requests_that_arrive_during_training_are_executed_and_training_goes_on(tmp_path: Path) -> None:
    fed = Federation(tmp_path, replace(SPEC, model=replace(SPEC.model, outputs=10)))
    names = [client.name for client in fed.data]

    def ask(client: str, id: str | None) -> None:
        fed.grid.sent.clear()
        other = sifu.open_run(fed.run_folder)
        posted = other.request([client], id)
        assert other.request_record(posted).status == "posted"
        assert posted == (id or posted)
        assert other.request([client], posted) == posted  # posting the same request again changes nothing
        with pytest.raises(InputError, match="other terms"):
            other.request([names[9]], posted)

    done = fed.serve(
        {
            ("training", 4): lambda: ask(names[2], "first"),
            ("retraining first", 3): lambda: ask(names[5], None),
        }
    )
    assert len(done) == 2
    assert done[0] == "first"
    run = sifu.open_run(fed.run_folder)
    outcomes = run.outcomes()
    assert [outcome.clients for outcome in outcomes] == [(names[2],), (names[5],)]
    assert {outcome.level for outcome in outcomes} <= {"proven", "exact", "conditional"}
    assert run.verify().problems == []
    assert not list((fed.run_folder / "inbox").iterdir())
    for path in (fed.run_folder / "certificates").iterdir():
        assert sifu.api.verify_certificate(path).problems == []
    # After the second request arrived, neither client was sent a message.
    assert fed.contacted() <= set(names) - {names[2], names[5]}
    reader = run.reader()
    kinds = [event.kind for event in reader.events()]
    reader.close()
    assert kinds.index("rolled back") < len(kinds) - 1 - kinds[::-1].index("request received")
    # The same holds after a restart with the nodes still there and a new key for the node of a forgotten client.
    _, fresh = new_key(tmp_path, "fresh")
    fed.grid.add(1234, fed.grid.apps[fed.nodes[names[2]]], fresh)
    fed.grid.sent.clear()
    run.request([names[7]], "third")
    assert fed.serve() == ["third"]
    assert fed.contacted() == set(names) - {names[2], names[5], names[7]}
    assert sifu.open_run(fed.run_folder).verify().problems == []


def test_a_message_outlives_its_server_and_counts_once(tmp_path: Path) -> None:
    fed = Federation(tmp_path, SPEC)
    names = [client.name for client in fed.data]

    class KilledError(Exception):
        pass

    def die() -> None:
        sifu.open_run(fed.run_folder).request([names[1]], "late")
        raise KilledError

    with pytest.raises(KilledError):
        fed.serve({("training", 3): die})
    assert [path.name for path in (fed.run_folder / "inbox").iterdir()] == ["request.late.json"]
    message = (fed.run_folder / "inbox" / "request.late.json").read_bytes()
    assert fed.serve() == ["late"]
    # A kill between the event and the deletion leaves the message in the inbox.
    (fed.run_folder / "inbox" / "request.late.json").write_bytes(message)
    assert fed.serve() == []
    assert len(sifu.open_run(fed.run_folder).outcomes()) == 1
    assert sifu.open_run(fed.run_folder).verify().problems == []


def test_a_message_that_cannot_be_received_is_refused_and_recorded(tmp_path: Path) -> None:
    fed = Federation(tmp_path, SPEC)
    fed.serve()
    inbox = fed.run_folder / "inbox"
    inbox.mkdir(exist_ok=True)
    (inbox / "request.broken.json").write_bytes(b"{")
    (inbox / "mischief.x.json").write_bytes(b"{}")
    assert fed.serve() == []
    assert not list(inbox.iterdir())
    reader = sifu.open_run(fed.run_folder).reader()
    refused = [json.loads(event.payload)["letter"] for event in reader.events() if event.kind == "letter refused"]
    reader.close()
    assert sorted(refused) == ["broken", "x"]
    assert sifu.open_run(fed.run_folder).verify().problems == []


def test_a_server_goes_on_with_clients_missing_and_records_it(tmp_path: Path) -> None:
    fed = Federation(tmp_path, SPEC)
    gone = fed.nodes[fed.data[0].name]
    app, key = fed.grid.apps[gone], fed.grid.keys[gone]
    del fed.grid.apps[gone]
    with pytest.raises(NoClientResponseError, match="still missing"):
        fed.serve()
    fed.grid.add(gone, app, key)
    fed.serve({("training", 6): lambda: fed.grid.apps.pop(gone)})
    reader = sifu.open_run(fed.run_folder).reader()
    told = [json.loads(event.payload)["incidents"] for event in reader.events() if event.kind == "incidents"]
    reader.close()
    assert [incident["round"] for many in told for incident in many] == [*range(6, 14)]
    assert told[0][0]["client"] == fed.data[0].name
    assert sifu.open_run(fed.run_folder).verify().problems == []
