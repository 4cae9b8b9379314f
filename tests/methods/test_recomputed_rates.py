"""Automatic local rates: derived from data, and recomputed without the forgotten clients when training restarts.

The counterfactual never had the client and computes its own rate.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
from forged_runs import execute, rebuild_chain
from run_tools import query
from sifu.audit import audit_run
from sifu.core.engine import Position
from sifu.core.ledger import canonical_json
from sifu.data import ClientData
from sifu.errors import NotCertifiableError
from sifu.run.clients_and_engine import engine_from_spec
from sifu.theory.regularity import automatic_rate
from sifu_verifier import verify

SPEC: dict[str, Any] = {
    "data": {"preprocessing": "fixed"},
    "model": {"kind": "softmax", "outputs": 3},
    "local": {"rate": "auto", "steps": 2},
    "stop": {"max_rounds": 4, "target": 0.0},
}


def some_clients(steepest: int = 2) -> list[ClientData]:
    """Return six clients of unequal sizes; one of them has longer samples than all others."""
    draw = np.random.default_rng(7)
    clients = []
    for number, samples in enumerate((5, 9, 4, 7, 6, 8)):
        x = draw.normal(size=(samples, 4)) * (3.0 if number == steepest else 1.0)
        clients.append(ClientData(f"c{number}", x, draw.integers(0, 3, samples)))
    return clients


def trained(folder: Path, spec: dict[str, Any] = SPEC, steepest: int = 2) -> sifu.Run:
    return sifu.train(spec, run=folder, clients=some_clients(steepest))


def model_of(run: sifu.Run) -> np.ndarray:
    with run.reader() as reader:
        return reader.load_model(reader.tip)


def trained_without(gone: set[str], branch: int, spec: dict[str, Any] = SPEC) -> np.ndarray:
    """Return the model of a federation that never had some clients, trained from the initial model of a branch."""
    stays = [client for client in some_clients() if client.name not in gone]
    numbers = [int(client.name[1:]) for client in stays]
    engine, resolved = engine_from_spec(sifu.Spec.from_mapping(spec), stays, None, numbers)
    model = engine.initial_model(branch)
    for place in range(resolved.stop.max_rounds):
        model = engine.run_round(model, Position(branch, place), np.arange(len(stays))).model
    return model


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"model": {"kind": "least_squares"}},
        {"local": {"rate": "auto", "steps": 3, "momentum": 0.5, "batch": 3}},
    ],
    ids=["softmax", "least squares", "momentum and batches"],
)
def test_scratch_is_that_of_a_federation_which_never_had_the_client_that_set_the_rate(
    tmp_path: Path, sections: dict[str, Any]
) -> None:
    spec = SPEC | sections
    run = trained(tmp_path / "run", spec)
    before = run.spec.local.rate
    (outcome,) = run.forget(["c2"], method="scratch", level="exact")
    assert outcome.level == "exact"
    assert run.spec.local.rate > before
    assert np.array_equal(model_of(run), trained_without({"c2"}, 1, spec))
    # Control: at the rate that the client had set, training gives another model.
    kept = spec | {"local": spec["local"] | {"rate": before}}
    assert not np.array_equal(model_of(run), trained_without({"c2"}, 1, kept))
    assert run.verify().problems == []
    assert verify(run.folder) == []
    report = audit_run(run)
    assert report.contradictions == ()
    assert [release.same_model for release in report.exact] == [True]


def test_the_next_requests_are_compared_with_the_recomputed_rate(tmp_path: Path) -> None:
    """The client that sets the recomputed rate lowers its own level; Scratch recomputes the rate; old certificates stay
    valid.
    """
    trained(tmp_path / "run").forget(["c2"], "first", method="scratch")
    run = sifu.open_run(tmp_path / "run", clients=some_clients())
    smoothness = dict(query(run.folder, "SELECT name, smoothness FROM clients WHERE name != 'c2'"))
    steepest, *others = sorted(smoothness, key=smoothness.__getitem__, reverse=True)
    assert run.plan([steepest], sigma=1.0).level == "conditional"
    assert run.plan([others[0]], sigma=1.0).level == "proven"
    run.forget([others[0]], "by-noise", sigma=1.0)
    (outcome,) = run.forget([steepest], "afresh", method="scratch")
    assert outcome.level == "exact"
    assert np.array_equal(model_of(run), trained_without({"c2", others[0], steepest}, 3))
    assert len(json.loads(dict(query(run.folder, "SELECT key, value FROM run"))["local_rates"])) == 3
    assert run.verify().problems == []
    assert verify(run.folder) == []
    for request in ("first", "by-noise", "afresh"):
        assert sifu.verify_certificate(run.folder / "certificates" / f"{request}.public.json").problems == []


def test_a_purge_of_the_rate_at_which_records_were_forgotten_contradicts_no_certificate(tmp_path: Path) -> None:
    """The request for records keeps the rate. The next request recomputes the rate, and the purge erases the first."""
    spec = SPEC | {"features": {"kind": "random_fourier", "count": 8}}
    run = trained(tmp_path / "run", spec)
    steepest = max(some_clients(), key=lambda client: float(np.linalg.norm(client.x))).name
    records, other = [client.name for client in some_clients() if client.name != steepest][:2]
    (first,) = run.forget([records], "records", method="scratch", records=[0])
    (second,) = run.forget([other], "client", method="scratch")
    assert (first.level, second.level) == ("exact", "exact")
    run.purge()
    assert run.verify().problems == []
    assert verify(run.folder) == []
    run.backup(tmp_path / "backup.zip")
    sifu.restore(tmp_path / "backup.zip", tmp_path / "restored")


def test_the_public_copy_is_the_same_whether_or_not_the_client_set_the_rate(tmp_path: Path) -> None:
    premises = []
    for steepest in (2, 3):
        run = trained(tmp_path / str(steepest), steepest=steepest)
        run.forget(["c2"], "gone", method="scratch")
        premises.append(run.certificate("gone", "public").body["premises"])
    assert premises[0] == premises[1]
    assert {row["case"] for row in premises[0] if row["name"] == "hyper-parameters"} == {"anew"}


def test_training_that_was_killed_goes_on_at_the_recomputed_rate(tmp_path: Path, monkeypatch: Any) -> None:
    run = trained(tmp_path / "run")

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr("sifu.requests.worker.Worker._retrain", killed)
        with pytest.raises(KeyboardInterrupt):
            run.forget(["c2"], method="scratch")
    again = sifu.open_run(run.folder, clients=[client for client in some_clients() if client.name != "c2"])
    again.forget()
    assert np.array_equal(model_of(again), trained_without({"c2"}, 1))
    assert again.verify().problems == []


def test_an_engine_that_was_handed_over_keeps_its_rate_so_nothing_is_rolled_back(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    handed_over = sifu.open_run(run.folder, engine=run.engine())
    with pytest.raises(NotCertifiableError, match=r"has 0\.\d+: open the run with its clients' data"):
        handed_over.forget(["c2"], "waits", method="scratch")
    (outcome,) = handed_over.forget(["c0"], method="scratch")  # the rate stays the same, so this engine is accepted
    assert outcome.level == "exact"
    assert run.verify().problems == []


@pytest.mark.parametrize("factor", [0.5, 1.001, 2.0])
def test_both_verifiers_recompute_the_rate_from_the_smoothness_of_those_who_stay(tmp_path: Path, factor: float) -> None:
    run = trained(tmp_path / "run")
    run.forget(["c2"], "gone", method="scratch")

    def edit(kind: str, content: dict[str, Any]) -> None:
        if kind == "rolled back":
            rates = content["local_rates"]
            content["local_rates"] = {node: rate * factor if int(node) else rate for node, rate in rates.items()}
            forged.append(canonical_json(content["local_rates"]).decode())

    forged: list[str] = []
    rebuild_chain(run.folder, edit)
    execute(run.folder, f"UPDATE run SET value = '{forged[0]}' WHERE key = 'local_rates'")
    assert any("local_rates is recorded as" in problem for problem in run.verify().problems)
    assert any("local rates" in problem for problem in verify(run.folder))


def test_clients_without_any_slope_get_a_rate_that_no_client_decides(tmp_path: Path) -> None:
    """Only c2 has nonzero samples, so without it every rate is certified."""
    clients = [
        client if client.name == "c2" else ClientData(client.name, client.x * 0.0, client.y)
        for client in some_clients()
    ]
    spec = SPEC | {"model": {"kind": "least_squares", "outputs": 1}}
    assert automatic_rate(np.array([np.inf, np.inf]), "softmax") is None
    run = sifu.train(spec, run=tmp_path / "run", clients=clients)
    (outcome,) = run.forget(["c2"], method="scratch")
    assert outcome.level == "exact"
    assert run.verify().problems == []
    assert verify(run.folder) == []
