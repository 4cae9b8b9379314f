"""Clients in a released model: pending requests leave out exactly what they name, and unapproved ones nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
import sifu_verifier
from release_journeys import release_journey
from run_tools import SameNoise
from sifu.data import ClientData
from sifu.run.run_view import RunView

pytestmark = pytest.mark.usefixtures("same_groups")
METHODS = ("closed_form", "scratch", "sifu", "groups")


def table_clients(count: int = 6) -> list[ClientData]:
    """Return clients of unequal size whose classes are Gaussian clusters."""
    generator = np.random.default_rng(39)
    clients = []
    for number in range(count):
        y = generator.integers(0, 3, int(generator.integers(5, 12)))
        clients.append(ClientData(f"c{number}", generator.normal(size=(y.size, 4)) + np.eye(4)[y], y))
    return clients


def spec_of(method: str, approval: str = "none", **keep: Any) -> dict[str, Any]:
    """Return the spec of a small run for requests by `method`."""
    common: dict[str, Any] = {"data": {"preprocessing": "fixed"}, "requests": {"approval": approval}}
    if method == "closed_form":
        ridge = {"model": {"kind": "ridge", "outputs": 3}, "ridge": {"regularisation": 0.01}}
        return common | ridge | {"features": {"norm": 8.0}, "keep": keep}
    spec = common | {
        "model": {"kind": "softmax", "outputs": 3},
        "local": {"rate": 0.05, "steps": 2},
        "stop": {"max_rounds": 4, "target": 0.0},
    }
    return spec | {"groups": {"count": 2, "rounds": 2}} if method == "groups" else spec


def started(folder: Path, method: str, approval: str = "none", **keep: Any) -> sifu.Run:
    return sifu.train(spec_of(method, approval, **keep), run=folder, clients=table_clients(), noise=SameNoise())


def terms_of(method: str) -> dict[str, Any]:
    return {} if method == "closed_form" else {"method": method, "level": "none"}


def model_of(run: sifu.Run) -> bytes:
    with run.reader() as reader:
        return bytes(reader.load_model(reader.tip).tobytes())


def taken_part(run: sifu.Run, client: int) -> set[int]:
    """Return the nodes whose rounds a client took part in."""
    with run.reader() as reader:
        return set(reader.participation([client]).nodes.tolist())


def is_fine(run: sifu.Run) -> bool:
    """Return whether both verifiers find no problem."""
    return run.verify().problems == [] == sifu_verifier.verify(run.folder)


def execute(run: sifu.Run, client: str, method: str, approval: str = "none") -> None:
    """File, approve and execute a request for one client."""
    name = run.request([client], f"of-{client}", actor="Zoe", **terms_of(method))
    if approval == "one":
        run.decide(name, "approved", actor="Ann")
    run.forget(request=name)


@pytest.mark.parametrize("records", [[1, 4], None])
@pytest.mark.parametrize("method", METHODS)
def test_an_unapproved_request_changes_no_other_release(tmp_path: Path, method: str, records: list[int] | None) -> None:
    run, twin = (started(tmp_path / name, method, "one") for name in ("run", "twin"))
    named = {"records": records} if records else {}
    pending = run.request(["c2"], actor="Zoe", **named, **terms_of(method))
    for either in (run, twin):
        execute(either, "c4", method, "one")
    assert model_of(run) == model_of(twin)
    assert "c2" in {client.name for client in run.status().clients if client.state == "active"}
    run.decide(pending, "refused", "not hers", actor="Ann")
    assert run.update().rounds == 0  # no client was left out, so none comes back
    assert model_of(run) == model_of(twin)
    assert is_fine(run)


@pytest.mark.parametrize("method", ["closed_form", "scratch", "sifu"])  # groups are built again between requests
def test_approved_records_leave_out_exactly_these_records(tmp_path: Path, method: str) -> None:
    run, twin = (started(tmp_path / name, method) for name in ("run", "twin"))
    run.request(["c2"], "first", records=[1, 4], **terms_of(method))
    execute(run, "c4", method)
    twin.request(["c2"], "first", records=[1, 4], **terms_of(method))
    twin.request(["c4"], "of-c4", **terms_of(method))
    twin.forget(request="first")
    twin.forget(request="of-c4")
    assert model_of(run) == model_of(twin)
    assert [record.status for record in run.request_records()] == ["done", "done"]
    assert is_fine(run)


def test_the_head_without_approved_records_is_that_of_a_fresh_run(tmp_path: Path) -> None:
    run = started(tmp_path / "run", "closed_form")
    run.request(["c2"], records=[1, 4])
    execute(run, "c4", "closed_form")
    left = [client for client in table_clients() if client.name != "c4"]
    stays = np.setdiff1d(np.arange(left[2].samples), [1, 4])
    left[2] = ClientData("c2", left[2].x[stays], left[2].y[stays])
    assert model_of(run) == model_of(sifu.train(spec_of("closed_form"), run=tmp_path / "fresh", clients=left))


@pytest.mark.parametrize("decision", ["refused", "withdrawn"])
@pytest.mark.parametrize("keep", ["clients", "sum"])
def test_a_refused_client_is_in_the_next_head(tmp_path: Path, keep: str, decision: str) -> None:
    run = started(tmp_path / "run", "closed_form", "one", statistics=keep)
    pending = run.request(["c2"], actor="Zoe")
    run.decide(pending, "approved", actor="Ann")
    execute(run, "c4", "closed_form", "one")

    def fresh(*gone: str) -> bytes:
        stay = [client for client in table_clients() if client.name not in gone]
        spec = spec_of("closed_form", "one", statistics=keep)
        return model_of(sifu.train(spec, run=tmp_path / f"without{'-'.join(gone)}", clients=stay))

    assert model_of(run) == fresh("c2", "c4")  # approved and pending requests are left out
    run.decide(pending, decision, "not hers", actor="Bob")
    released = run.update()
    assert (released.rounds, released.returned, released.left_out) == (1, ("c2",), ())
    assert model_of(run) == fresh("c4")
    assert run.update().rounds == 0
    assert is_fine(run)


@pytest.mark.parametrize("method", ["scratch", "sifu", "groups"])
def test_a_withdrawn_client_takes_part_again_from_then_on(tmp_path: Path, method: str) -> None:
    run = started(tmp_path / "run", method)
    pending = run.request(["c2"], **terms_of(method))
    execute(run, "c4", method)
    before = taken_part(run, 2)
    run.decide(pending, "withdrawn")
    assert run.update().rounds == 0
    execute(run, "c5", method)
    assert taken_part(run, 2) - before
    assert is_fine(run)


def test_the_next_request_brings_a_withdrawn_client_back_at_once(tmp_path: Path) -> None:
    run, twin = (started(tmp_path / name, "scratch") for name in ("run", "twin"))
    pending = run.request(["c2"], **terms_of("scratch"))
    for either in (run, twin):
        execute(either, "c4", "scratch")
    run.decide(pending, "withdrawn")
    assert model_of(run) != model_of(twin)
    for either in (run, twin):
        execute(either, "c5", "scratch")
    assert model_of(run) == model_of(twin)
    assert run.update().rounds == 0


def test_release_leaves_out_approved_clients_and_brings_newcomers_in(tmp_path: Path) -> None:
    run = started(tmp_path / "run", "closed_form")
    run.request(["c1"])
    released = run.update()
    assert (released.rounds, released.clients, released.left_out) == (1, 5, ("c1",))
    stay = [client for client in table_clients() if client.name != "c1"]
    assert model_of(run) == model_of(sifu.train(spec_of("closed_form"), run=tmp_path / "fresh", clients=stay))
    (outcome,) = run.forget()
    assert outcome.level == "exact"
    assert is_fine(run)


def test_records_that_cannot_be_executed_hold_up_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, twin = (started(tmp_path / name, "sifu") for name in ("run", "twin"))
    run.request(["c2"], "never", records=[1], method="sifu", sigma=100.0, level="exact")
    for either in (run, twin):
        execute(either, "c4", "sifu")
    assert "never keeps waiting, and its client stays in" in caplog.text
    assert model_of(run) == model_of(twin)
    assert run.request_record("never").status == "received"


def test_a_join_executes_approved_records(tmp_path: Path) -> None:
    clients = table_clients()
    run = sifu.train(spec_of("closed_form"), run=tmp_path / "run", clients=clients[:5])
    run.request(["c2"], "first", records=[1, 4])
    run = sifu.open_run(tmp_path / "run", clients=clients)
    assert run.join() == ["c5"]
    assert run.request_record("first").status == "done"
    stays = np.setdiff1d(np.arange(clients[2].samples), [1, 4])
    clients[2] = ClientData("c2", clients[2].x[stays], clients[2].y[stays])
    assert model_of(run) == model_of(sifu.train(spec_of("closed_form"), run=tmp_path / "fresh", clients=clients))


def test_approvers_see_what_else_is_left_out(tmp_path: Path) -> None:
    run = started(tmp_path / "run", "closed_form", "one")
    first, second = run.request(["c2"], records=[1, 4], actor="Zoe"), run.request(["c3"], actor="Zoe")
    own = run.request(["c4"], actor="Zoe")
    assert not any("left out by pending" in note for note in run.plan_of(own).notes)  # no request is approved yet
    for request in (first, second):
        run.decide(request, "approved", actor="Ann")
    wanted = f"also left out by pending requests: 2 records of c2 (request {first}); c3 (request {second})"
    assert wanted in run.plan_of(own).notes


@pytest.mark.parametrize("seed", range(4))
def test_releases_of_random_journeys_are_those_of_fresh_runs(tmp_path: Path, seed: int) -> None:
    journey = release_journey(seed, tmp_path)
    assert journey.compared > 0
    assert sifu_verifier.verify(journey.folder) == []


def test_control_a_request_that_leaves_out_too_much_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def everyone_asking(view: RunView) -> set[int]:
        return {view.index_of[name] for row in view.requests if row.waits for name in row.clients}

    monkeypatch.setattr(RunView, "left_out", property(everyone_asking))
    with pytest.raises(AssertionError, match=r"the release is not that of|left out clients"):
        release_journey(0, tmp_path)
