"""Clients with forgotten records continue under another name; later requests cover all their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import sifu
import sifu_verifier
from run_tools import query
from sifu.data import ClientData
from sifu.run import clients_view, psi_of_everyone
from sifu.store.reader import RunReader, chain_of, plain_name

SPEC: dict[str, Any] = {
    "data": {"preprocessing": "fixed"},
    "model": {"kind": "softmax", "outputs": 3},
    "local": {"rate": 0.05, "steps": 2},
    "stop": {"max_rounds": 5, "target": 0.0},
}


def table_clients(seed: int = 0) -> list[ClientData]:
    generator = np.random.default_rng(seed)
    clients = []
    for number in range(5):
        y = generator.integers(0, 3, 6 + number)
        clients.append(ClientData(f"c{number}", generator.normal(size=(y.size, 4)) + np.eye(4)[y], y))
    return clients


@contextmanager
def names_as_different_clients() -> Iterator[None]:
    """Make the mistake under test: count the rest of a client as a new client."""

    def alone(reader: RunReader, client: int) -> tuple[int, ...]:
        return (client,)

    with mock.patch.object(clients_view, "chain_of", alone), mock.patch.object(psi_of_everyone, "chain_of", alone):
        yield


def took_part(folder: Path, node: int, names: Sequence[str]) -> bool:
    """Return whether one of these names took part in a round on the path to a node."""
    parents = dict(query(folder, "SELECT node, parent FROM nodes"))
    path = [node]
    while parents[path[-1]] is not None:
        path.append(parents[path[-1]])
    rows = query(folder, "SELECT node, name FROM participation JOIN clients USING (client)")
    return any(row in path and name in names for row, name in rows)


def is_false(folder: Path, request: str, names: Sequence[str]) -> bool:
    """Return whether a request is certified as exact although its client took part in the released model."""
    sql = f"SELECT level, final_node FROM requests WHERE request = '{request}'"
    ((level, final),) = query(folder, sql)
    return bool(level == "exact" and took_part(folder, final, names))


def fine(run: sifu.Run) -> bool:
    alone = [sifu.verify(file).problems for file in (run.folder / "certificates").glob("*.json")]
    return run.verify().problems == [] == sifu_verifier.verify(run.folder) and not any(alone)


def records_then_client(folder: Path, first: str, **terms: Any) -> sifu.Run:
    run = sifu.train(SPEC, run=folder, clients=table_clients())
    run.forget(["c3"], records=[0, 2], method=first, level="none", sigma=0.5)
    run.forget(["c3"], "whole", **terms)
    return run


@pytest.mark.parametrize("first", ["sifu", "scratch"])
@pytest.mark.parametrize("method", ["auto", "sifu"])
def test_a_whole_client_is_forgotten_under_all_of_its_names(tmp_path: Path, first: str, method: str) -> None:
    run = records_then_client(tmp_path / "run", first, method=method)
    assert not is_false(run.folder, "whole", ["c3", "c3~2"])
    assert query(run.folder, "SELECT clients FROM subjects WHERE request = 'whole'") == [("[3,5]",)]
    assert fine(run)


def test_control_names_as_different_clients_make_exact_false_and_both_verifiers_say_so(tmp_path: Path) -> None:
    with names_as_different_clients():
        run = records_then_client(tmp_path / "run", "sifu")
        assert is_false(run.folder, "whole", ["c3", "c3~2"])
        assert run.verify().problems == []
    (problem, *_) = run.verify().problems
    assert "it hides the clients [(5,)], but was asked to forget [(3, 5)]" in problem
    assert any("subjects" in problem for problem in sifu_verifier.verify(run.folder))


def current_model(run: sifu.Run) -> np.ndarray:
    with run.reader() as reader:
        return reader.load_model(reader.tip)


class NoNoise:
    """A source of zeros, so that a run with noise and one without differ only in their clients."""

    def standard_normal(self, size: int) -> np.ndarray:
        return np.zeros(size)


@pytest.mark.parametrize(("names", "holds"), [(nullcontext, True), (names_as_different_clients, False)])
def test_psi_bounds_the_distance_to_a_federation_that_never_had_the_client(
    tmp_path: Path, names: Callable[[], AbstractContextManager[None]], holds: bool
) -> None:
    """Five rounds with c3 and five with c3 less a record, against ten rounds of a federation without c3.

    Negative control: counted as two clients, Psi of the whole client is too small.
    """
    clients = table_clients()
    with names():
        run = sifu.train(SPEC, run=tmp_path / "run", clients=clients, noise=NoNoise())
        run.forget(["c3"], records=[1], method="sifu", sigma=1000.0, level="none")
        source = current_model(run)
        run.forget(["c3"], "whole", method="sifu", sigma=1000.0, level="none")
        (subject,) = run.certificate("whole", "auditor").body["subjects"]
    spec = SPEC | {"stop": {"max_rounds": 10, "target": 0.0}}
    never = sifu.train(spec, run=tmp_path / "never", clients=[client for client in clients if client.name != "c3"])
    distance = float(np.linalg.norm(source - current_model(never)))
    assert subject["psi"] / 4.0 < distance
    assert (distance <= subject["psi"]) == holds


def test_a_second_request_for_records_hides_the_first_training_too(tmp_path: Path) -> None:
    run = sifu.train(SPEC, run=tmp_path / "run", clients=table_clients())
    for request, row in (("one", 0), ("two", 1), ("three", 2)):
        run.forget(["c3"], request, records=[row], method="sifu", sigma=0.5)
        ((sigma, final),) = query(run.folder, f"SELECT noise_std, final_node FROM requests WHERE request = '{request}'")
        assert sigma > 0.0 or not took_part(run.folder, final, ["c3"])
    subjects = [clients for (clients,) in query(run.folder, "SELECT clients FROM subjects ORDER BY subject")]
    assert subjects == ["[3]", "[3,5]", "[3,5,6]"]
    assert fine(run)
    with names_as_different_clients():
        other = sifu.train(SPEC, run=tmp_path / "apart", clients=table_clients())
        for request, row in (("one", 0), ("two", 1)):
            other.forget(["c3"], request, records=[row], method="sifu", sigma=0.5)
    assert not fine(other)


def test_status_shows_what_a_client_did_under_all_of_its_names(tmp_path: Path) -> None:
    run = sifu.train(SPEC, run=tmp_path / "run", clients=table_clients())
    before = {client.name: client.psi for client in run.status().clients}
    run.forget(["c3"], records=[0], method="sifu", sigma=1000.0, level="none")
    after = {client.name: client.psi for client in run.status().clients}
    assert after["c3"] > before["c3"] > 0.0


def test_a_client_has_the_name_that_it_first_joined_under(tmp_path: Path) -> None:
    clients = [*table_clients(), ClientData("c9~2", *_some_rows())]
    run = sifu.train(SPEC, run=tmp_path / "run", clients=clients)
    run.forget(["c3"], records=[0], method="scratch")
    run.forget(["c3"], records=[1], method="scratch")
    with run.reader() as reader:
        assert [chain_of(reader, client) for client in (3, 6, 7)] == [(3,), (3, 6), (3, 6, 7)]
        assert [plain_name(reader, client) for client in (3, 6, 7)] == ["c3"] * 3
        assert plain_name(reader, 5) == "c9~2"  # a user's own name that only looks like an internal one


def _some_rows() -> tuple[np.ndarray, np.ndarray]:
    return np.eye(4)[:3] * 2.0, np.arange(3)
