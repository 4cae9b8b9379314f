"""Closed-form heads over Flower's messages have the bits of the embedded engine, with and without masks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flower_federation import small_spec
from flower_heads import NODE, embedded_sum, head_of, head_spec, kept_sum, last_solve, sound, unless
from flwr.app import ArrayRecord
from served_runs import Federation, new_key

import sifu
import sifu_verifier
from sifu.core.spec import Spec
from sifu.engines.flower.client import client_app
from sifu.engines.flower.wire import PREPARE_STATISTICS
from sifu.engines.ready import ReadyClient
from sifu.requests.client_list import ask_for_change, fingerprint_of_file
from sifu.run.clients_and_engine import clients_from_spec
from sifu.store.reader import RunReader


@pytest.mark.parametrize("masked", [True, False])
def test_whoever_is_away_is_in_the_head_when_it_comes_back(tmp_path: Path, masked: bool) -> None:
    fed = Federation(tmp_path, head_spec(), masked_statistics=masked)
    fed.grid.trouble[NODE[6]] = lambda message: (
        fed.grid.answer(message) if message.metadata.message_type.startswith("query") else None
    )
    fed.serve()
    assert last_solve(fed.run_folder)["absent"] == [6]
    others = [client for client in fed.data if client.name != "client-006"]
    assert kept_sum(fed.run_folder).digest() == embedded_sum(fed.spec, others).digest()
    sound(fed.run_folder)
    del fed.grid.trouble[NODE[6]]
    fed.grid.sent.clear()
    fed.serve()
    assert "absent" not in last_solve(fed.run_folder)
    assert kept_sum(fed.run_folder).digest() == embedded_sum(fed.spec, fed.data).digest()
    metadata = [message.metadata for message in fed.grid.sent if message.metadata.message_type.startswith("train")]
    # A set, because clients that ask for ledger links are sent the message twice.
    training = {(sent.message_type, sent.dst_node_id) for sent in metadata}
    assert len(training) == (16 if masked else 1)  # with masks, all clients send again
    sound(fed.run_folder)
    fed.grid.sent.clear()
    fed.serve()
    assert not [message for message in fed.grid.sent if message.metadata.message_type.startswith("train")]


def test_a_client_that_never_answers_does_not_keep_the_server_busy(tmp_path: Path) -> None:
    fed = Federation(tmp_path, head_spec())
    fed.grid.trouble[NODE[6]] = unless(PREPARE_STATISTICS, fed.grid)
    fed.serve()
    training = [message for message in fed.grid.sent if message.metadata.message_type == PREPARE_STATISTICS]
    assert len(training) == 16  # first, and again because its node is there
    with RunReader(fed.run_folder) as reader:
        assert len([event for event in reader.events() if "solve" in event.content]) == 1


def test_a_forged_absence_is_noticed(tmp_path: Path) -> None:
    from forged_runs import rebuild_chain

    fed = Federation(tmp_path, head_spec())
    fed.serve()

    def edit(kind: str, content: dict[str, Any]) -> None:
        if "solve" in content:
            content["solve"]["absent"] = [2]

    rebuild_chain(fed.run_folder, edit)
    assert any("solved from the wrong clients" in line for line in sifu.open_run(fed.run_folder).verify().problems)
    assert sifu_verifier.verify(fed.run_folder) != []


@pytest.mark.parametrize("masked", [True, False])
def test_joining_and_leaving_give_the_bits_of_those_who_are_there(tmp_path: Path, masked: bool) -> None:
    fed = Federation(tmp_path, head_spec(), masked_statistics=masked)
    fed.serve()
    lost = fed.data[1]
    path, pem = new_key(tmp_path, "again")
    # To delete two records, the client is forgotten and joins again under another name and key.
    left = ReadyClient("hospital-again", lost.x[2:], lost.y[2:])
    fed.grid.add(123, client_app(lambda context: left), pem)
    sifu.open_run(fed.run_folder).request([lost.name], "gone")
    ask_for_change(fed.run_folder, {"do": "add", "name": "hospital-again", "key": fingerprint_of_file(path)})
    assert fed.serve() == ["gone"]
    staying = [client for client in fed.data if client is not lost]
    assert kept_sum(fed.run_folder).digest() == embedded_sum(fed.spec, [*staying, left]).digest()
    sound(fed.run_folder)


@pytest.mark.parametrize("task", ["regression", "multi_label"])
def test_other_tasks(tmp_path: Path, task: str) -> None:
    ridge = {"task": task, "regularisation": 1e-6} | ({"shift": 0.0} if task == "regression" else {})
    spec = small_spec(model={"kind": "ridge", "outputs": 2}, ridge=ridge, data={"preprocessing": "fixed"})
    fed = Federation(tmp_path, spec)
    generator = np.random.default_rng(0)
    for node in list(fed.grid.apps):
        x = generator.normal(size=(20, 3))
        y = x @ np.array([[1.0, -1.0], [0.5, 0.0], [0.0, 2.0]])
        own = ReadyClient("a", x, (y > 0).astype(np.int64) if task == "multi_label" else y)
        fed.grid.apps[node] = client_app(lambda context, own=own: own)
    fed.serve()
    if task == "regression":
        weights = head_of(fed.run_folder).reshape(4, 2)
        np.testing.assert_allclose(weights[:3], [[1.0, -1.0], [0.5, 0.0], [0.0, 2.0]], atol=1e-3)
    sound(fed.run_folder)


def test_a_softmax_head_on_features_is_the_embedded_one(tmp_path: Path) -> None:
    """Clients compute their own features; model, source node and level agree with the embedded engine."""
    spec = small_spec(
        features={"kind": "random_fourier", "count": 16, "bandwidth": 3.0},
        data={"preprocessing": "fixed"},
        privacy={"sigma": 0.12},
    )
    embedded = sifu.train(spec, run=tmp_path / "embedded")
    fed = Federation(tmp_path, spec)
    samples = clients_from_spec(replace(spec, features=Spec().features))
    for node, client in zip(list(fed.grid.apps), samples, strict=True):
        own = ReadyClient(client.name, client.x, client.y, cache=tmp_path / client.name)
        fed.grid.apps[node] = client_app(lambda context, own=own: own)
    fed.serve()
    assert [len(list((tmp_path / client.name).iterdir())) for client in samples] == [1] * 8
    with sifu.open_run(fed.run_folder).reader() as first, embedded.reader() as second:
        np.testing.assert_allclose(first.load_model(first.tip), second.load_model(second.tip), rtol=0, atol=1e-11)
        assert first.facts["features"] == second.facts["features"] != ""
    name = fed.data[3].name
    plan, expected = sifu.open_run(fed.run_folder).plan([name]), embedded.plan([name])
    assert (plan.source_node, plan.level) == (expected.source_node, expected.level)
    assert json.dumps([premise.status for premise in plan.premises if premise.name == "features"]) == '["met"]'
    sound(fed.run_folder)


def arrays_sent(fed: Federation) -> list[bytes]:
    """Return the bytes of all arrays sent to nodes."""
    records = [record for message in fed.grid.sent for record in message.content.values()]
    return [array.data for record in records if isinstance(record, ArrayRecord) for array in record.values()]


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_with_noise_on_releases_no_node_is_sent_the_solved_head(tmp_path: Path, noise: float) -> None:
    """In the positive control without noise, the nodes are sent the solved head for evaluation."""
    sections = {"release": {"noise": noise}, "ridge": {"regularisation": 0.05}, "keep": {"statistics": "clients"}}
    fed = Federation(tmp_path, head_spec(**sections), masked_statistics=False)
    fed.serve()
    heads = [head_of(fed.run_folder)]
    sifu.open_run(fed.run_folder).request([fed.data[2].name], "r0")
    assert fed.serve() == ["r0"]
    heads.append(head_of(fed.run_folder))
    solved = [np.ascontiguousarray(head[:8]).tobytes() for head in heads]
    assert any(part in sent for sent in arrays_sent(fed) for part in solved) == (noise == 0.0)
    sound(fed.run_folder)
    run = sifu.open_run(fed.run_folder)
    assert ("before_after" in run.certificate("r0").body) == (noise > 0.0)
    # The server keeps rows of these clients, so it also knows the distance of a single record.
    assert (run.plan([fed.data[3].name], records=[0]).before_after is not None) == (noise > 0.0)
