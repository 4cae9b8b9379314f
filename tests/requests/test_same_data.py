"""Runs continue only with their original data: other data, and the same rows in another order, are refused."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
import sifu_verifier
from run_tools import Command, query
from sifu.api import restore
from sifu.core.certificate_words import words_of
from sifu.data import ClientData
from sifu.data.dataset import sample_digest
from sifu.errors import InputError
from sifu.requests.worker import Worker
from sifu.run.clients_and_engine import engine_from_spec
from sifu.store.reader import RunReader
from sifu.store.salts import SALTS_FILE, read_salts, recorded_digests, salted_sample_digest

DATA = {"data": {"preprocessing": "fixed"}}
SPECS: dict[str, dict[str, Any]] = {
    "ridge": DATA | {"model": {"kind": "ridge", "outputs": 3}, "ridge": {"regularisation": 0.01}},
    "ridge that keeps the sum": DATA
    | {
        "model": {"kind": "ridge", "outputs": 3},
        "ridge": {"regularisation": 0.01},
        "keep": {"statistics": "sum"},
    },
    "rounds": DATA
    | {
        "model": {"kind": "softmax", "outputs": 3},
        "local": {"rate": 0.05, "steps": 2},
        "stop": {"max_rounds": 3, "target": 0.0},
    },
    "features": DATA
    | {
        "model": {"kind": "softmax", "outputs": 3},
        "features": {"kind": "random_fourier", "count": 6},
        "local": {"rate": 0.05, "steps": 2},
        "stop": {"max_rounds": 3, "target": 0.0},
    },
}


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the spec of one kind of run."""
    return SPECS[request.param]


def some_clients(seed: int = 0) -> list[ClientData]:
    generator = np.random.default_rng(seed)
    return [ClientData(f"c{number}", generator.normal(size=(8, 4)), np.arange(8) % 3) for number in range(4)]


def in_order(client: ClientData, rows: Any) -> ClientData:
    return ClientData(client.name, client.x[rows], client.y[rows])


def fine(run: sifu.Run) -> bool:
    """Return whether both verifiers find no problem."""
    return run.verify().problems == [] == sifu_verifier.verify(run.folder)


@pytest.mark.parametrize("records", [(), (0, 4)], ids=["client", "records"])
def test_rows_in_another_order_are_refused(tmp_path: Path, spec: dict[str, Any], records: tuple[int, ...]) -> None:
    clients = some_clients()
    sifu.train(spec, run=tmp_path / "run", clients=clients)
    events = query(tmp_path / "run", "SELECT COUNT(*) FROM events")
    sorted_again = [*clients[:2], in_order(clients[2], np.arange(8)[::-1]), clients[3]]
    run = sifu.open_run(tmp_path / "run", clients=sorted_again)
    for _ in range(2):  # a second attempt is refused too
        with pytest.raises(InputError, match="client 'c2' are not those the run was made with: the order"):
            run.forget(["c1"], **({"records": list(records)} if records else {}))
    assert query(tmp_path / "run", "SELECT COUNT(*) FROM events") == events
    again = sifu.open_run(tmp_path / "run", clients=clients)
    again.forget(["c1"], **({"records": list(records)} if records else {}))
    assert fine(again)


def test_other_samples_or_labels_of_the_same_size_are_refused(tmp_path: Path) -> None:
    clients = some_clients()
    sifu.train(SPECS["ridge"], run=tmp_path / "run", clients=clients)
    first, *rest = clients
    relabelled = ClientData("c0", first.x, np.roll(first.y, 1))
    nudged = ClientData("c0", np.nextafter(first.x, np.inf), first.y)
    for others in (some_clients(seed=9), [relabelled, *rest], [nudged, *rest]):
        with pytest.raises(InputError, match="client 'c0' are not those the run was made with"):
            sifu.open_run(tmp_path / "run", clients=others).forget(["c1"])


def test_a_table_that_was_sorted_again(tmp_path: Path, cli: Command) -> None:
    """With a re-sorted table the wrong patients would be forgotten under an exact certificate, so it is refused."""
    table, rows, spec, folder = (tmp_path / name for name in ("table.csv", "rows.txt", "spec.toml", "run"))
    lines = [
        [client.name, str(label), *map(repr, sample.tolist())]
        for client in some_clients()
        for sample, label in zip(client.x, client.y, strict=True)
    ]

    def write(content: list[list[str]]) -> None:
        with table.open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows([["site", "label", "a", "b", "c", "d"], *content])

    write(lines)
    rows.write_text("0\n4\n")
    spec.write_text(
        f'[data]\nname = "table"\nfile = "{table}"\nclient = "site"\npartition = "given"\npreprocessing = "fixed"\n'
        '[model]\nkind = "ridge"\noutputs = 3\n'
    )
    assert cli("train", spec, "--run", folder).code == 0
    write(sorted(lines, key=lambda line: line[2]))
    answer = cli("forget", folder, "--client", "c1", "--records", rows)
    assert answer.code == 2
    assert "Put the data back as they were" in " ".join(answer.err.split())
    write(lines)
    assert cli("forget", folder, "--client", "c1", "--records", rows).code == 0
    write([line for number, line in enumerate(lines) if number not in (8, 12)])  # the owner also deleted these rows
    assert cli("forget", folder, "--client", "c3").code == 0


def test_what_is_left_after_records_is_checked_too(tmp_path: Path, spec: dict[str, Any]) -> None:
    clients = some_clients()
    run = sifu.train(spec, run=tmp_path / "run", clients=clients)
    run.forget(["c1"], records=[0, 4])
    assert sorted(read_salts(run.folder)) == [0, 2, 3, 4]
    left = in_order(clients[1], [1, 2, 3, 5, 6, 7])
    for same in (clients[1], left):  # with the forgotten rows, or without them
        sifu.open_run(tmp_path / "run", clients=[clients[0], same, *clients[2:]]).engine()
    for other in (in_order(clients[1], np.arange(8)[::-1]), in_order(left, [1, 0, 2, 3, 4, 5])):
        with pytest.raises(InputError, match="not those the run was made with") as refused:
            sifu.open_run(tmp_path / "run", clients=[clients[0], other, *clients[2:]]).engine()
        assert "c1~2" in str(refused.value)
    again = sifu.open_run(tmp_path / "run", clients=clients)
    again.forget(["c1"], records=[2])
    assert sorted(read_salts(run.folder)) == [0, 2, 3, 5]
    assert fine(again)


def test_an_interrupted_request_for_records_goes_on_with_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = some_clients()
    run = sifu.train(SPECS["ridge"], run=tmp_path / "run", clients=clients)

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Worker, "_join_again", kill)
        with pytest.raises(KeyboardInterrupt):
            run.forget(["c1"], records=[1])
    assert fine(run)
    sorted_again = [clients[0], in_order(clients[1], np.arange(8)[::-1]), *clients[2:]]
    with pytest.raises(InputError, match="client 'c1' are not those"):
        sifu.open_run(tmp_path / "run", clients=sorted_again).forget()
    again = sifu.open_run(tmp_path / "run", clients=clients)
    again.forget()
    assert 1 not in read_salts(run.folder)
    assert fine(again)


def test_clients_that_join_and_runs_that_are_restored(tmp_path: Path) -> None:
    clients = some_clients()
    sifu.train(SPECS["ridge"], run=tmp_path / "run", clients=clients[:3])
    run = sifu.open_run(tmp_path / "run", clients=clients)
    assert run.join() == ["c3"]
    run.backup(tmp_path / "backup")
    restore(tmp_path / "backup", tmp_path / "again")
    sorted_again = [*clients[:3], in_order(clients[3], np.arange(8)[::-1])]
    with pytest.raises(InputError, match="client 'c3' are not those"):
        sifu.open_run(tmp_path / "again", clients=sorted_again).forget(["c0"])
    again = sifu.open_run(tmp_path / "again", clients=clients)
    again.forget(["c0"])
    assert fine(again)


def test_forgotten_samples_do_not_join_again_under_another_name(tmp_path: Path) -> None:
    """Forgotten samples under a new name are refused: they would give the old head, with a
    certificate that denies it.
    """
    clients = some_clients()
    run = sifu.train(SPECS["ridge"], run=tmp_path / "run", clients=clients[:3])
    run.forget(["c0"])
    before = run.status()
    with pytest.raises(InputError, match="back has the samples of c0, which was forgotten"):
        sifu.open_run(tmp_path / "run", clients=[*clients[:3], replace(clients[0], name="back")]).join()
    assert run.status() == before
    assert sifu.open_run(tmp_path / "run", clients=clients).join() == ["c3"]
    words = words_of(run.certificate("r1").body)
    assert any("under another name, are not recognised" in sentence for sentence in words.not_covered)


def test_digests_are_salted_and_the_salt_goes_with_the_client(tmp_path: Path) -> None:
    """Nothing in the folder confirms a guess of the forgotten client's data; a restored salt is reported."""
    clients = some_clients()
    run = sifu.train(SPECS["ridge"], run=tmp_path / "run", clients=clients)
    digests, salts = [sample_digest(client) for client in clients], read_salts(run.folder)
    with RunReader(run.folder) as reader:
        recorded = recorded_digests(reader)
    assert recorded == {client: salted_sample_digest(salts[client], digests[client]) for client in range(4)}
    sifu.open_run(tmp_path / "run", clients=clients).forget(["c1"])
    assert sorted(read_salts(run.folder)) == [0, 2, 3]
    erased = [salts[1].encode(), bytes.fromhex(salts[1])]
    unsalted = [form for digest in digests for form in (digest.encode(), bytes.fromhex(digest))]
    for path in (path for path in run.folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        assert not any(secret in content for secret in (*erased, *unsalted)), path.name
    for certificate in (run.folder / "certificates").iterdir():
        assert not any(digest in certificate.read_text() for digest in recorded.values())
    (run.folder / SALTS_FILE).write_text(json.dumps(salts))
    assert any("salts.json holds the salts of c1" in problem for problem in run.verify().problems)
    assert sifu_verifier.verify(run.folder) != []


def test_without_the_salts_nobody_guesses(tmp_path: Path) -> None:
    clients = some_clients()
    run = sifu.train(SPECS["ridge"], run=tmp_path / "run", clients=clients)
    (run.folder / SALTS_FILE).unlink()
    assert fine(run)  # certificates do not depend on the salts
    (note,) = run.verify().notes
    assert "lacks the salts of 4 clients; certificates hold" in note
    with pytest.raises(InputError, match=r"the file back from a backup.*train the clients that stay in a new folder"):
        sifu.open_run(tmp_path / "run", clients=clients).forget(["c1"])
    # The remedy in the message works.
    stay = [client for client in clients if client.name != "c1"]
    again = sifu.train(SPECS["ridge"], run=tmp_path / "again", clients=stay)
    assert fine(again)
    again.forget(["c2"])
    assert fine(again)
    assert again.verify().notes == []  # the salt of a forgotten client does not count as missing


@pytest.mark.parametrize("kind", ["rounds", "ridge"])
def test_an_engine_that_is_handed_over_has_the_same_data(tmp_path: Path, kind: str) -> None:
    """Statistics, smoothness and sample counts may agree although labels differ, so the data
    themselves are compared.
    """
    clients = some_clients()
    spec = sifu.Spec.from_mapping(SPECS[kind] | {"data": {"name": "python", "preprocessing": "fixed"}})
    relabelled = [ClientData(client.name, client.x, np.roll(client.y, 1)) for client in clients]
    engine, other = (engine_from_spec(spec, data)[0] for data in (clients, relabelled))
    begun = {"clients": clients}, {"engine": engine}
    for number, way in enumerate(begun):
        folder = tmp_path / str(number)
        sifu.train(spec, run=folder, **way)
        with pytest.raises(InputError, match="client 'c0' are not those the run was made with"):
            sifu.open_run(folder, engine=other).forget(["c1"])
        with pytest.raises(InputError, match="client 'c0' are not those the run was made with"):
            sifu.open_run(folder, clients=relabelled).forget(["c1"])
        with pytest.raises(InputError, match="does not provide those of its clients, 'c0' among them"):
            sifu.open_run(folder, engine=Closed(engine)).forget(["c1"])
        run = sifu.open_run(folder, engine=engine)
        run.forget(["c1"])
        assert fine(run)
    run = sifu.train(spec, run=tmp_path / "closed", engine=Closed(engine))
    run = sifu.open_run(run.folder, engine=Closed(engine))
    run.forget(["c1"])
    assert fine(run)


class Closed:
    """Engine that does not expose its clients' samples."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        if name == "sample_digests":
            raise AttributeError(name)
        return getattr(self._engine, name)


def test_with_another_salt_the_data_are_refused(tmp_path: Path) -> None:
    clients = some_clients()
    run = sifu.train(SPECS["ridge"], run=tmp_path / "run", clients=clients)
    salts = read_salts(run.folder)
    (run.folder / SALTS_FILE).write_text(json.dumps(salts | {1: salts[2]}))
    assert fine(run)
    with pytest.raises(InputError, match="c1"):
        sifu.open_run(tmp_path / "run", clients=clients).forget(["c0"])
