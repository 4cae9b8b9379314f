"""Clients that join a closed-form head, from Python or from a file, also with additional records; and refused joins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
import sifu_verifier
from made_statistics import made_statistics
from run_tools import Command, query, state
from sifu.core.closed_form_engine import recorded_fixed_point
from sifu.data import ClientData
from sifu.engines.sim.embedded_heads import ClosedFormFederation
from sifu.errors import InputError, RoundRejectedError
from sifu.run.closed_form_round import RecordedSolve
from sifu.store.reader import RunReader
from sifu.store.statistics_files import read_statistics
from sifu.theory.closed_form import FixedPoint, Statistics, total

TABLE: dict[str, Any] = {
    "data": {"preprocessing": "fixed"},
    "model": {"kind": "ridge", "outputs": 3},
    "features": {"norm": 8.0},
    "ridge": {"regularisation": 0.01},
}


def table_clients(count: int) -> list[ClientData]:
    generator = np.random.default_rng(0)
    clients = []
    for number in range(count):
        y = generator.integers(0, 3, 6 + number)
        clients.append(ClientData(f"c{number}", generator.normal(size=(y.size, 4)) + np.eye(4)[y], y))
    return clients


def kept_sum(folder: Path) -> Statistics:
    with RunReader(folder) as reader:
        row = next(row for row in reader.statistics().values() if row.is_sum)
        return read_statistics(folder, row, recorded_fixed_point(sifu.Spec.from_mapping(reader.spec), reader.layout))


@pytest.mark.parametrize("keep", ["clients", "sum"])
def test_joining_from_a_file_on_the_command_line(tmp_path: Path, keep: str, cli: Command) -> None:
    """The run records the file: if it keeps only the sum, a later request reads the newcomer's data again."""
    clients = table_clients(5)
    founders = tmp_path / "founders.npz"
    np.savez(
        founders,
        x=np.concatenate([client.x for client in clients[:3]]),
        y=np.concatenate([client.y for client in clients[:3]]),
        client=np.repeat([client.name for client in clients[:3]], [client.samples for client in clients[:3]]),
    )
    spec = tmp_path / "spec.toml"
    spec.write_text(
        f'[data]\nname = "npz"\nfile = "{founders}"\npartition = "given"\npreprocessing = "fixed"\n'
        f'[model]\nkind = "ridge"\noutputs = 3\n[features]\nnorm = 8.0\n[ridge]\nregularisation = 0.01\n'
        f'[keep]\nstatistics = "{keep}"\n'
    )
    folder = tmp_path / "run"
    assert cli("train", spec, "--run", folder).code == 0
    np.savez(tmp_path / "c3.npz", x=clients[3].x, y=clients[3].y)
    answer = cli("join", folder, "--name", "c3", "--file", tmp_path / "c3.npz", "--format", "json")
    assert json.loads(answer.out)["joined"] == ["c3"], answer.err
    assert (
        json.loads(cli("join", folder, "--name", "c3", "--file", tmp_path / "c3.npz", "--format", "json").out)["joined"]
        == []
    )
    np.savez(tmp_path / "c4.npz", x=clients[4].x, y=clients[4].y, client=np.repeat("c4", clients[4].samples))
    assert cli("join", folder, "--file", tmp_path / "c4.npz").code == 0
    assert cli("forget", folder, "--client", "c1").code == 0
    sifu.train(TABLE, run=tmp_path / "never", clients=[clients[number] for number in (0, 2, 3, 4)])
    assert kept_sum(folder) == kept_sum(tmp_path / "never")
    assert sifu.Run(folder).verify().problems == []
    assert sifu_verifier.verify(folder) == []
    before = state(folder)
    for arguments, why in (
        (("--name", "c0", "--file", tmp_path / "c3.npz"), "already sent its statistics"),
        (("--name", "c1", "--file", tmp_path / "c3.npz"), "asked to be forgotten"),
        (("--file", tmp_path / "c3.npz"), "--name NAME"),
        (("--name", "c9", "--file", tmp_path / "c4.npz"), "leave --name out"),
        (("--name", "c9", "--file", tmp_path / "none.npz"), "none.npz"),
    ):
        refused = cli("join", folder, *arguments)
        assert refused.code == 2, arguments
        assert why in refused.err
        assert refused.err.count("\n") == 1
    assert state(folder) == before


def test_records_that_a_client_gained_join_under_another_name(tmp_path: Path) -> None:
    clients = table_clients(4)
    half = clients[1].samples // 2
    first = ClientData("c1", clients[1].x[:half], clients[1].y[:half])
    gained = ClientData("c1-more", clients[1].x[half:], clients[1].y[half:])
    sifu.train(TABLE, run=tmp_path / "run", clients=[clients[0], first, *clients[2:]])
    sifu.open_run(tmp_path / "run", clients=[clients[0], first, *clients[2:], gained]).join()
    sifu.train(TABLE, run=tmp_path / "all", clients=clients)
    assert kept_sum(tmp_path / "run") == kept_sum(tmp_path / "all")


def _with(sent: Statistics, **other: Any) -> Statistics:
    fields = {name: getattr(sent, name) for name in ("fixed", "gram", "cross", "samples", "target_energy")}
    return made_statistics(**(fields | other))


def _indefinite(sent: Statistics) -> Statistics:
    """Return statistics whose Gram matrix is indefinite: the products of three features contradict each other."""
    gram = sent.gram.copy()
    size = int(min(gram[0, 0], gram[1, 1], gram[2, 2]) * 0.9)
    for row, column, sign in ((0, 1, 1), (0, 2, 1), (1, 2, -1)):
        gram[row, column] = gram[column, row] = sign * size
    return _with(sent, gram=gram)


def _out_of_bounds(sent: Statistics) -> Statistics:
    gram = sent.gram.copy()
    gram[0, 0] += 2**50
    return _with(sent, gram=gram)


def _other_map(sent: Statistics) -> Statistics:
    return _with(sent, fixed=FixedPoint(sent.fixed.features, sent.fixed.outputs, norm=sent.fixed.norm, feature_bits=12))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_indefinite, "impossible statistics (G has a negative direction)"),
        (_out_of_bounds, "impossible statistics (the trace of G is larger than samples of the agreed norm can give)"),
        (_other_map, "wrong samples"),
        (lambda sent: _with(sent, samples=sent.samples + 1), "wrong samples"),
        (lambda sent: _with(sent, target_energy=-1), "impossible statistics (the target energy is negative"),
    ],
)
def test_a_newcomer_that_sends_what_no_data_can_have_is_refused_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, why: str
) -> None:
    clients = table_clients(4)
    sifu.train(TABLE, run=tmp_path / "run", clients=clients[:3])
    honest = ClosedFormFederation.sent_by
    monkeypatch.setattr(
        ClosedFormFederation,
        "sent_by",
        lambda self, client: change(total(self.fixed, [honest(self, client)])) if client == 3 else honest(self, client),
    )
    before = kept_sum(tmp_path / "run")
    with pytest.raises(RoundRejectedError) as refusal:
        sifu.open_run(tmp_path / "run", clients=clients).join()
    assert f"client 'c3' were refused and nothing was changed: {why}" in str(refusal.value)
    assert kept_sum(tmp_path / "run") == before
    assert query(tmp_path / "run", "SELECT COUNT(*) FROM participation WHERE client = 3") == [(0,)]


def test_a_sum_beyond_int64_is_refused_before_it_is_formed() -> None:
    fixed = FixedPoint(features=1, outputs=1)
    huge = np.full((2, 2), 2**62, dtype=np.int64)
    part = made_statistics(fixed, huge, np.zeros((2, 1), dtype=np.int64), 1, 0)
    with pytest.raises(InputError, match="beyond int64"):
        part + part


def test_another_feature_map_and_a_second_name_are_refused(tmp_path: Path) -> None:
    clients = table_clients(4)
    sifu.train(TABLE, run=tmp_path / "run", clients=clients[:3])
    wider = [ClientData(client.name, np.hstack([client.x, client.x]), client.y) for client in clients]
    with pytest.raises(InputError, match="feature map"):
        sifu.open_run(tmp_path / "run", clients=wider).join()
    twice = [*clients[:3], ClientData("c0", clients[3].x, clients[3].y)]
    with pytest.raises(InputError, match="same name"):
        sifu.open_run(tmp_path / "run", clients=twice).join()


def test_the_same_file_may_be_the_data_of_two_names(tmp_path: Path, cli: Command) -> None:
    """One file can be joined under two names, and forgetting one of them leaves the other."""
    clients = table_clients(3)
    np.savez(tmp_path / "all.npz", x=clients[0].x, y=clients[0].y, client=np.arange(clients[0].samples) % 2)
    np.savez(tmp_path / "more.npz", x=clients[2].x, y=clients[2].y)
    settings = {"data.name": "npz", "data.file": tmp_path / "all.npz", "data.partition": "given"}
    settings |= {"data.preprocessing": "fixed", "model.kind": "ridge", "model.outputs": 3}
    (tmp_path / "spec.toml").write_text("")
    folder = tmp_path / "run"
    given = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    assert cli("train", tmp_path / "spec.toml", "--run", folder, *given).code == 0
    for name in ("b", "b-more"):
        assert cli("join", folder, "--name", name, "--file", tmp_path / "more.npz").code == 0
    assert cli("forget", folder, "--client", "b").code == 0
    left = [ClientData(str(k), clients[0].x[k::2], clients[0].y[k::2]) for k in range(2)]
    never = {"data": {"preprocessing": "fixed"}, "model": {"kind": "ridge", "outputs": 3}}
    sifu.train(never, run=tmp_path / "never", clients=[*left, ClientData("b-more", clients[2].x, clients[2].y)])
    assert kept_sum(folder) == kept_sum(tmp_path / "never")


def test_several_labels_and_real_numbers_come_from_a_file(tmp_path: Path, cli: Command) -> None:
    clients = table_clients(2)
    x = np.concatenate([client.x for client in clients])
    whose = np.arange(len(x)) % 2
    (tmp_path / "spec.toml").write_text("")
    for task, y, shown in (
        ("multi_label", (x[:, :3] > 0).astype(int), "accuracy"),
        ("regression", x[:, 0] / 2.0, "mean squared error"),
    ):
        np.savez(tmp_path / f"{task}.npz", x=x, y=y, client=whose)
        settings = {"data.name": "npz", "data.file": tmp_path / f"{task}.npz", "data.partition": "given"}
        settings |= {"data.preprocessing": "fixed", "model.kind": "ridge", "ridge.task": task}
        given = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        trained = cli("train", tmp_path / "spec.toml", "--run", tmp_path / task, *given)
        assert trained.code == 0, trained.err
        assert shown in " ".join(trained.out.split()).lower()
        run = sifu.open_run(tmp_path / task)
        (outcome,) = run.forget(["1"])
        assert outcome.level == "exact"
        assert (run.evaluate("training").accuracy is None) == (task == "regression")
    np.savez(tmp_path / "wrong.npz", x=x, y=np.full((len(x), 3), 2), client=whose)
    given = ("--set", "data.name=npz", "--set", f"data.file={tmp_path / 'wrong.npz'}")
    refused = cli("train", tmp_path / "spec.toml", "--run", tmp_path / "no", *given)
    assert refused.code == 2
    assert "0 and 1 for each of 3 labels" in refused.err


@pytest.mark.parametrize("what", ["shape", "huge", "class 7", "negative", "half"])
def test_a_newcomer_that_cannot_be_used_is_refused_before_it_is_recorded(tmp_path: Path, what: str) -> None:
    clients = table_clients(4)
    x, y = clients[3].x, clients[3].y
    labels = {"class 7": 7, "negative": -1, "half": 0.5}
    misfits = {"shape": (x[:, :3], y), "huge": (x * 1e300, y)}
    sifu.train(TABLE, run=tmp_path / "run", clients=clients[:3])
    before = state(tmp_path / "run")
    given = misfits[what] if what in misfits else (x, np.full(9, labels[what]))
    with pytest.raises(InputError):
        sifu.open_run(tmp_path / "run", clients=[*clients[:3], ClientData("c3", *given)]).join()
    assert state(tmp_path / "run") == before


@pytest.mark.parametrize("keep", ["clients", "sum"])
def test_a_run_with_a_newcomer_that_cannot_be_used_goes_on_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, keep: str
) -> None:
    """An unusable newcomer is left out, named in the log, and can be forgotten."""
    clients, spec = table_clients(5), TABLE | {"keep": {"statistics": keep}}
    sifu.train(spec, run=tmp_path / "run", clients=clients[:3])
    bad = ClientData("c3", clients[3].x[:, :3], clients[3].y)
    with monkeypatch.context() as patched:
        patched.setattr(RecordedSolve, "check_newcomers", lambda self: {})
        sifu.open_run(tmp_path / "run", clients=[*clients[:3], bad]).join()
    assert "c3 joined with samples that cannot be used and is left out: samples have shape (3,)" in caplog.text
    everyone = [*clients[:3], bad, clients[4]]
    sifu.open_run(tmp_path / "run", clients=everyone).join()
    run = sifu.open_run(tmp_path / "run", clients=everyone)
    run.forget(["c1"])
    sifu.train(spec, run=tmp_path / "never", clients=[clients[number] for number in (0, 2, 4)])
    assert kept_sum(tmp_path / "run") == kept_sum(tmp_path / "never")
    run.forget(["c3"])
    assert kept_sum(tmp_path / "run") == kept_sum(tmp_path / "never")
    assert run.verify().problems == [] == sifu_verifier.verify(tmp_path / "run")


def test_negative_control_a_founder_that_cannot_be_used_stops_the_training(tmp_path: Path) -> None:
    clients = table_clients(3)
    bad = ClientData("c2", clients[2].x[:, :3], clients[2].y)
    with pytest.raises(RoundRejectedError, match=r"'c2'.*unusable samples \(samples have shape"):
        sifu.train(TABLE, run=tmp_path / "run", clients=[*clients[:2], bad])
