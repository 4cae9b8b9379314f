"""Records of clients that stay: forgotten exactly with kept statistics, otherwise by leaving and joining again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sifu
import sifu_verifier
from forged_runs import rebuild_chain
from run_tools import Command, query, state
from sifu.core.closed_form_engine import recorded_fixed_point
from sifu.data import ClientData
from sifu.errors import InputError
from sifu.requests.worker import Worker
from sifu.store.reader import RunReader
from sifu.store.statistics_files import read_statistics
from sifu.theory.closed_form import Statistics, Targets, statistics_of

TABLE: dict[str, Any] = {
    "data": {"preprocessing": "fixed"},
    "model": {"kind": "ridge", "outputs": 3},
    "features": {"norm": 8.0},
    "ridge": {"regularisation": 0.01},
}
ROUNDS: dict[str, Any] = {
    "data": {"preprocessing": "fixed"},
    "model": {"kind": "softmax", "outputs": 3},
    "local": {"rate": 0.05, "steps": 2},
    "stop": {"max_rounds": 4, "target": 0.0},
}


def table_clients(count: int, seed: int = 0) -> list[ClientData]:
    """Return clients of unequal size whose classes are Gaussian clusters."""
    generator = np.random.default_rng(seed)
    clients = []
    for number in range(count):
        y = generator.integers(0, 3, int(generator.integers(4, 12)))
        clients.append(ClientData(f"c{number}", generator.normal(size=(y.size, 4)) + np.eye(4)[y], y))
    return clients


def without(client: ClientData, rows: list[int], name: str | None = None) -> ClientData:
    stays = np.setdiff1d(np.arange(client.samples), rows)
    return ClientData(name or client.name, client.x[stays], client.y[stays])


def kept_sum(folder: Path) -> Statistics:
    with RunReader(folder) as reader:
        row = next(row for row in reader.statistics().values() if row.is_sum)
        return read_statistics(folder, row, recorded_fixed_point(sifu.Spec.from_mapping(reader.spec), reader.layout))


def fine(run: sifu.Run) -> bool:
    """Return whether both verifiers find no problem."""
    return run.verify().problems == [] == sifu_verifier.verify(run.folder)


@pytest.mark.parametrize("keep", ["clients", "sum"])
def test_records_leave_no_bit_in_a_closed_form(tmp_path: Path, keep: str) -> None:
    clients, spec = table_clients(5), TABLE | {"keep": {"statistics": keep}}
    run = sifu.train(spec, run=tmp_path / "run", clients=clients)
    before = {path.name: path.read_bytes() for path in (tmp_path / "run" / "statistics").iterdir()}
    (outcome,) = run.forget(["c3"], records=[2, 0])
    assert (outcome.level, outcome.records, outcome.rounds) == ("exact", 2, 0 if keep == "clients" else 1)
    sifu.train(spec, run=tmp_path / "never", clients=[without(c, [0, 2]) if c.name == "c3" else c for c in clients])
    assert kept_sum(tmp_path / "run") == kept_sum(tmp_path / "never")
    now = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    gone = {"1.sum.statistics"} | ({"1.3.rows.statistics"} if keep == "clients" else set())
    assert all(before[name] not in now for name in gone)
    assert fine(run)
    # Rows keep their numbers, and the client keeps the name that its operator knows.
    reopened = sifu.open_run(tmp_path / "run", clients=clients)
    reopened.forget(["c3"], records=[1])
    never = [without(c, [0, 1, 2]) if c.name == "c3" else c for c in clients]
    sifu.train(spec, run=tmp_path / "never again", clients=never)
    assert kept_sum(tmp_path / "run") == kept_sum(tmp_path / "never again")
    # The owner may have deleted the rows from its source.
    later = sifu.open_run(tmp_path / "run", clients=never)
    later.forget(["c0"])
    sifu.train(spec, run=tmp_path / "without both", clients=never[1:])
    assert kept_sum(tmp_path / "run") == kept_sum(tmp_path / "without both")
    assert fine(later)


STEPS = st.lists(
    st.tuples(st.sampled_from(["leave", "join", "records", "lose"]), st.integers(0, 99), st.integers(0, 99)),
    min_size=1,
    max_size=6,
)


@pytest.mark.long
@pytest.mark.parametrize("keep", ["clients", "sum"])
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1000), steps=STEPS)
def test_any_sequence_gives_the_bits_of_a_federation_that_never_had_what_was_removed(
    tmp_path_factory: pytest.TempPathFactory, keep: str, seed: int, steps: list[tuple[str, int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("sequence")
    everyone, spec = table_clients(9, seed), TABLE | {"keep": {"statistics": keep}}
    given_clients, gone, removed = everyone[:5], set[str](), dict[str, set[int]]()
    sifu.train(spec, run=folder / "run", clients=given_clients)
    for kind, which, row in steps:
        staying = [client for client in given_clients if client.name not in gone]
        client = staying[which % len(staying)]
        run = sifu.open_run(folder / "run", clients=given_clients)
        if kind == "leave" and len(staying) > 1:
            run.forget([client.name])
            gone.add(client.name)
        elif kind == "join" and len(given_clients) < len(everyone):
            given_clients = everyone[: len(given_clients) + 1]
            sifu.open_run(folder / "run", clients=given_clients).join()
        elif kind in ("records", "lose"):
            left = sorted(set(range(client.samples)) - removed.get(client.name, set()))
            rows = {left[row % len(left)], left[(3 * row + 1) % len(left)]}
            if len(rows) < len(left):
                (outcome,) = run.forget([client.name], records=sorted(rows))
                assert (outcome.level, outcome.records) == ("exact", len(rows))
                removed.setdefault(client.name, set()).update(rows)
    never = [without(c, sorted(removed.get(c.name, ()))) for c in given_clients if c.name not in gone]
    if len(never) > 1:
        sifu.train(spec, run=folder / "never", clients=never)
        assert kept_sum(folder / "run") == kept_sum(folder / "never")
    else:
        fixed = kept_sum(folder / "run").fixed
        phi = never[0].x * np.minimum(1.0, 8.0 / np.linalg.norm(never[0].x, axis=1))[:, None]
        assert (
            kept_sum(folder / "run").samples
            == statistics_of(fixed, phi, Targets("classification", 3).encode(never[0].y)).samples
        )
    assert sifu.open_run(folder / "run", clients=given_clients).verify().problems == []


class Killed(BaseException):
    pass


@pytest.mark.parametrize("spec", [TABLE, ROUNDS], ids=["closed form", "rounds"])
@pytest.mark.parametrize("place", ["before it joined", "after it joined"])
def test_an_interrupted_request_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any], place: str
) -> None:
    clients = table_clients(5)
    run = sifu.train(spec, run=tmp_path / "run", clients=clients)
    with monkeypatch.context() as patched:
        patched.setattr(Worker, "_join_again" if place.startswith("before") else "_retrain", _kill)
        with pytest.raises(Killed):
            run.forget(["c1"], records=[1])
    again = sifu.open_run(tmp_path / "run", clients=clients)
    assert again.status().phase == "retraining"
    (outcome,) = again.forget(["c1"], records=[1])
    assert (outcome.request, outcome.records) == ("r1", 1)
    assert query(tmp_path / "run", "SELECT COUNT(*) FROM clients") == [(6,)]
    assert fine(again)


def _kill(*_: object) -> None:
    raise Killed


def test_what_is_refused(tmp_path: Path) -> None:
    clients = table_clients(4)
    run = sifu.train(TABLE, run=tmp_path / "run", clients=clients)
    size = clients[1].samples
    run.forget(["c1"], records=[0])
    before = state(tmp_path / "run")
    for rows, names, why in (
        ([size], ["c1"], f"rows 0 to {size - 1} and has no row {size}"),
        ([1, 1], ["c1"], "named 2 times"),
        ([0, 1], ["c1"], "row 0 of client c1 was already forgotten"),
        (list(range(1, size)), ["c1"], "forget the client instead"),
        ([], ["c1"], "no records are named"),
        ([-1], ["c1"], "found -1"),
        ([0.5], ["c1"], "found 0.5"),
        ("12", ["c1"], "list of identities or row numbers"),
        ([1], ["c1", "c2"], "2 clients are named"),
    ):
        for ask in (run.plan, run.request, run.forget):
            with pytest.raises(InputError, match=why):
                ask(names, records=rows)  # type: ignore[operator]
    assert state(tmp_path / "run") == before
    fewer = [clients[0], without(clients[1], [3, 4]), *clients[2:]]
    with pytest.raises(InputError, match="give all of them"):
        sifu.open_run(tmp_path / "run", clients=fewer).forget(["c0"])


def test_the_certificate_says_how_many_and_nothing_that_identifies_them(tmp_path: Path, cli: Command) -> None:
    runs = []
    for number, rows in enumerate(([1, 3], [0, 2])):
        clients = table_clients(4)
        run = sifu.train(TABLE, run=tmp_path / f"run-{number}", clients=clients)
        run.forget(["c2"], records=rows)
        runs.append(run)
        for form in ("public", "auditor"):
            body = run.certificate("r1", form).body  # type: ignore[arg-type]
            assert (body["records"], body["clients"]) == (2, ["c2"])
            answer = cli("verify", run.folder / "certificates" / f"r1.{form}.json")
            assert answer.code == 0, answer.err
    private = {"commitments", "issued", "ledger", "run", "received", "carried_out"}
    first, second = (
        {name: value for name, value in run.certificate("r1").body.items() if name not in private} for run in runs
    )
    assert first == second
    told = cli("certificate", runs[0].folder, "r1", "--public").out
    assert "to forget 2 records of c2" in " ".join(told.split())


@pytest.mark.parametrize(
    ("what", "edit"),
    {
        "another number of rows": lambda content: content["request"].update(records=[1, 2, 3]),
        "a row that is not there": lambda content: content["request"].update(records=[1, 500]),
        "no rows at all": lambda content: content["request"].update(records=[]),
    }.items(),
)
def test_a_forged_list_of_rows_is_noticed(tmp_path: Path, what: str, edit: Any) -> None:
    run = sifu.train(TABLE, run=tmp_path / "run", clients=table_clients(4))
    run.forget(["c2"], records=[1, 2])

    def change(kind: str, content: dict[str, Any]) -> None:
        if kind == "request received":
            edit(content)

    rebuild_chain(run.folder, change)
    assert run.verify().problems, what
    assert sifu_verifier.verify(run.folder), what


def test_on_the_command_line(tmp_path: Path, cli: Command) -> None:
    folder, spec = tmp_path / "run", tmp_path / "spec.toml"
    spec.write_text('[data]\nname = "digits"\nclients = 6\n[model]\nkind = "ridge"\n[features]\nkind = "none"\n')
    assert cli("train", spec, "--run", folder).code == 0
    rows = tmp_path / "rows.txt"
    rows.write_text("4 # asked on Monday\n\n0\n")
    plan = cli("plan", folder, "--client", "client-002", "--records", rows)
    assert "2 records of client-002" in plan.out
    assert "stays with its remaining records" in plan.out
    request = cli("request", folder, "--client", "client-002", "--records", rows, "--format", "json")
    assert json.loads(request.out)["records"] == 2
    assert "row numbers" not in cli("purge", folder).out  # nothing was forgotten yet
    assert "r1: 2 records of client-002; received; until" in cli("requests", folder).out
    assert "2 records of" in cli("requests", folder, "--pending").out  # the name may be on the next line
    public = sifu.Run(folder).request_records()[0].to_public_mapping()
    assert (public["clients"], public["records"]) == (1, 2)
    done = cli("forget", folder, "--format", "json")
    assert json.loads(done.out)["requests"][0]["records"] == 2
    assert cli("verify", folder).code == 0
    assert "row numbers of the records that requests name" in cli("purge", folder).out
    again = cli("forget", folder, "--client", "client-002", "--records", rows)
    assert again.code == 2
    assert "was already forgotten" in again.err
    for text, why in (("x\n", "line 1"), ("", "names no record"), ("-3", "line 1")):
        rows.write_text(text)
        answer = cli("forget", folder, "--client", "client-002", "--records", rows)
        assert answer.code == 2
        assert why in answer.err
    assert "add --client NAME" in cli("forget", folder, "--records", rows).err
