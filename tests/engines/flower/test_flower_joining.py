"""Clients that join a run on Flower after its first round."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from served_runs import SPEC, Federation, psi_of

import sifu
from sifu.engines.ready import ReadyClient
from sifu.requests.client_list import ask_for_change, fingerprint_of_file, listed_clients
from sifu.server import flower_clients
from sifu.theory.tracking import client_increments


def joined_federation(folder: Path, phase: str = "training", third: object = None) -> tuple[Federation, str]:
    """Make a run of eleven clients; a twelfth is added after round 5 of a phase, and its node after round 7."""
    spec = replace(SPEC, data=replace(SPEC.data, preprocessing="fixed"))
    fed = Federation(folder, spec)
    late = fed.data[11].name
    node, app = fed.nodes[late], fed.grid.apps.pop(fed.nodes[late])
    pem = fed.grid.keys[node]
    (folder / "run" / "clients.json").unlink()
    for client in fed.data[:11]:
        ask_for_change(
            fed.run_folder,
            {"do": "add", "name": client.name, "key": fingerprint_of_file(folder / f"{client.name}.pub")},
        )

    def add() -> None:
        key = fingerprint_of_file(folder / f"{late}.pub")
        assert not ask_for_change(fed.run_folder, {"do": "add", "name": late, "key": key})

    fed.serve({("training", 3): third, (phase, 5): add, (phase, 7): lambda: fed.grid.add(node, app, pem)})
    return fed, late


def test_a_client_joins_later_and_takes_part_from_then_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_clients, "LOOK_FOR_NEWCOMERS", 0.0)
    first = "client-000"

    def forget_first() -> None:
        sifu.open_run(tmp_path / "run").request([first], "early")

    fed, late = joined_federation(tmp_path, "retraining early", forget_first)
    run = sifu.open_run(fed.run_folder)
    reader = run.reader()
    assert [client.name for client in reader.clients()] == [client.name for client in fed.data]
    assert len(reader.joined()) == 1
    part = reader.participation()
    took_part = set(part.nodes[part.clients == 11].tolist())
    kinds = [event.kind for event in reader.events()]
    reader.close()
    assert kinds.count("client joined") == 1
    # The request was executed with eleven clients, and its certificate stays valid.
    assert run.outcomes()[0].clients == (first,)
    assert took_part
    assert run.verify().problems == []
    for path in (fed.run_folder / "certificates").iterdir():
        assert sifu.api.verify_certificate(path).problems == []
    # A restarted server knows the newcomer; returning to a model from before it joined forgets it exactly.
    plan = run.plan([late], sigma=1e-9)
    assert plan.level == "exact"
    assert plan.source_node < min(took_part)
    run.request([late], "late", sigma=1e-9)
    assert fed.serve() == ["late"]
    assert sifu.open_run(fed.run_folder).verify().problems == []


def test_psi_of_everyone_is_the_same_as_if_the_newcomer_had_been_absent_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower_clients, "LOOK_FOR_NEWCOMERS", 0.0)
    fed, _ = joined_federation(tmp_path)
    reader = sifu.open_run(fed.run_folder).reader()
    part = reader.participation()
    rounds = [part.between(node, node) for node in range(1, 15)]
    sizes = [row.clients.size for row in rounds]
    psi = np.zeros(12)
    for taken_part in rounds:
        total = int(taken_part.samples.sum())
        psi[taken_part.clients] += client_increments(taken_part.samples, taken_part.drifts, total, 0.0)
    reader.close()
    assert set(sizes) == {11, 12}
    np.testing.assert_allclose(psi_of(fed.run_folder), psi, rtol=1e-6)


def test_a_newcomer_with_an_impossible_expansion_is_refused_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower_clients, "LOOK_FOR_NEWCOMERS", 0.0)
    usual = ReadyClient.profile

    def shrinking(self: ReadyClient, question: object) -> object:
        profile = usual(self, question)  # type: ignore[arg-type]
        return replace(profile, expansion=0.5) if self.name == "client-011" else profile

    monkeypatch.setattr(ReadyClient, "profile", shrinking)
    fed, late = joined_federation(tmp_path)
    reader = sifu.open_run(fed.run_folder).reader()
    refused = [json.loads(event.payload) for event in reader.events() if event.kind == "client refused"]
    assert [(incident["client"], "expansion" in incident["reason"]) for incident in refused] == [(late, True)]
    assert len(reader.clients()) == 11
    reader.close()
    assert late not in {client.name for client in listed_clients(fed.run_folder)}
    assert sifu.open_run(fed.run_folder).verify().problems == []
