"""Runs whose model is a ridge head: forgetting subtracts statistics and is exact to the bit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runs
import sifu
import sifu_verifier
from forged_runs import execute, rebuild_chain
from made_statistics import made_statistics
from run_tools import Command, copy_run, query, spec_for, state
from sifu.core.certificate_words import words_of
from sifu.core.closed_form_engine import recorded_fixed_point
from sifu.core.layout import ModelLayout
from sifu.core.spec import regime
from sifu.data import ClientData
from sifu.errors import InputError, RoundRejectedError
from sifu.requests.certification import solves
from sifu.store.files import stored_path
from sifu.store.reader import RunReader
from sifu.store.statistics_files import pack, read_statistics, unpack
from sifu.theory.closed_form import Statistics, fit_head, total

TABLE: dict[str, Any] = {
    "data": {"preprocessing": "fixed"},
    "model": {"kind": "ridge", "outputs": 3},
    "features": {"norm": 8.0},
    "ridge": {"regularisation": 0.01},
}


def table_clients(count: int, seed: int = 0) -> list[ClientData]:
    """Return clients of unequal size whose classes are Gaussian clusters in the plane."""
    generator = np.random.default_rng(seed)
    clients = []
    for number in range(count):
        y = generator.integers(0, 3, int(generator.integers(3, 12)))
        x = generator.normal(size=(y.size, 4)) + np.eye(4)[y]
        clients.append(ClientData(f"c{number}", x, y))
    return clients


def kept_sum(folder: Path) -> Statistics:
    """Return the sum of statistics that the current head is solved from."""
    with RunReader(folder) as reader:
        row = next(row for row in reader.statistics().values() if row.is_sum)
        return read_statistics(folder, row, recorded_fixed_point(sifu.Spec.from_mapping(reader.spec), reader.layout))


def head_of(folder: Path) -> np.ndarray[Any, Any]:
    with RunReader(folder) as reader:
        return reader.load_model(reader.tip)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a closed-form run with each client's statistics; tests only read it."""
    folder = tmp_path_factory.mktemp("closed form") / "run"
    sifu.train(spec_for("closed_form"), run=folder)
    return folder


@pytest.mark.parametrize("keep", ["clients", "sum"])
def test_joining_and_leaving_in_any_order_gives_the_bits_of_those_who_are_there(tmp_path: Path, keep: str) -> None:
    clients, spec = table_clients(9), TABLE | {"keep": {"statistics": keep}}
    run = sifu.train(spec, run=tmp_path / "run", clients=clients[:6])
    run.forget(["c1"])
    assert sifu.open_run(tmp_path / "run", clients=clients[:8]).join() == ["c6", "c7"]
    run = sifu.open_run(tmp_path / "run", clients=clients[:8])
    assert run.verify().problems == []
    run.request(["c4"], "waits")
    run.forget(["c7", "c0"], "now")
    run = sifu.open_run(tmp_path / "run", clients=clients)
    assert run.join() == ["c8"]
    assert run.join() == []
    assert query(tmp_path / "run", "SELECT COUNT(*) FROM nodes WHERE kind = 'round'") == [(5,)]
    run.forget()
    assert run.verify().problems == []
    assert sifu_verifier.verify(tmp_path / "run") == []
    sifu.train(spec, run=tmp_path / "never", clients=[clients[k] for k in (2, 3, 5, 6, 8)])
    assert kept_sum(tmp_path / "run").digest() == kept_sum(tmp_path / "never").digest()


def test_nobody_joins_a_model_trained_in_rounds_this_way(tmp_path: Path) -> None:
    run = sifu.train({"data": {"clients": 4}, "stop": {"max_rounds": 1}}, run=tmp_path / "run")
    with pytest.raises(InputError, match="softmax"):
        run.join()


def test_float64_sums_are_not_the_same_bits() -> None:
    """Negative control: the same subtraction in floating point leaves a trace of the client."""
    clients = table_clients(8)
    with_constant = [np.hstack([client.x, np.ones((len(client.x), 1))]) for client in clients]
    parts = [x.T @ x for x in with_constant]
    assert not np.array_equal(sum(parts) - parts[3], sum(part for k, part in enumerate(parts) if k != 3))


def test_the_head_is_ridge_regression(tmp_path: Path) -> None:
    """The head agrees with the textbook formula on the samples themselves, in floating point."""
    clients = table_clients(8)
    run = sifu.train(TABLE, run=tmp_path / "run", clients=clients)
    x = np.concatenate([client.x for client in clients])
    x = np.hstack([x * np.minimum(1.0, 8.0 / np.linalg.norm(x, axis=1))[:, None], np.ones((len(x), 1))])
    t = np.eye(3)[np.concatenate([client.y for client in clients])] - 1.0 / 3.0
    penalty = 0.01 * np.trace(x.T @ x) / 5
    expected = np.linalg.solve(x.T @ x + penalty * np.eye(5), x.T @ t)
    np.testing.assert_allclose(head_of(tmp_path / "run").reshape(5, 3), expected, atol=1e-4)
    assert (run.status().accuracy or 0.0) > 0.5


@pytest.mark.parametrize("task", ["regression", "multi_label"])
def test_other_tasks(tmp_path: Path, task: str) -> None:
    generator = np.random.default_rng(1)
    clients = []
    for number in range(6):
        x = generator.normal(size=(20, 3))
        y = x @ np.array([[1.0, -1.0], [0.5, 0.0], [0.0, 2.0]])
        clients.append(ClientData(f"c{number}", x, (y > 0).astype(np.int64) if task == "multi_label" else y))
    ridge = {"task": task, "regularisation": 1e-6} | ({"shift": 0.0} if task == "regression" else {})
    spec = {"data": {"preprocessing": "fixed"}, "model": {"kind": "ridge"}, "ridge": ridge}
    run = sifu.train(spec, run=tmp_path / "run", clients=clients)
    (outcome,) = run.forget(["c2"])
    assert outcome.level == "exact"
    assert run.verify().problems == []
    if task == "multi_label":
        assert (run.evaluate("training").accuracy or 0.0) > 0.7
    else:
        weights = head_of(tmp_path / "run").reshape(4, 2)
        np.testing.assert_allclose(weights[:3], [[1.0, -1.0], [0.5, 0.0], [0.0, 2.0]], atol=1e-3)


def test_counted_outputs_are_only_conditional(tmp_path: Path) -> None:
    spec = TABLE | {"model": {"kind": "ridge"}}
    run = sifu.train(spec, run=tmp_path / "run", clients=table_clients(5))
    (outcome,) = run.forget(["c0"])
    assert outcome.level == "conditional"
    assert run.verify().problems == []


def test_what_the_certificate_says(trained: Path, tmp_path: Path, cli: Command) -> None:
    folder = copy_run(trained, tmp_path / "run")
    run = sifu.open_run(folder)
    run.forget(["client-003"])
    public, auditor = (run.certificate("r1", form).body for form in ("public", "auditor"))
    assert public["level"] == "exact"
    words = words_of(public)
    assert any("Kept copies of" in sentence for sentence in words.not_covered)
    assert "statistics" in words.erased
    assert "solve" not in public
    (whole,) = (folder / "statistics").glob("*.sum.statistics")
    assert auditor["solve"]["sum"] == hashlib.sha256(whole.read_bytes()).hexdigest()
    status = {premise["name"]: premise["status"] for premise in public["premises"]}
    assert status == {"preprocessing": "met", "features": "met", "hyper-parameters": "met", "statistics": "trusted"}
    for form in ("public", "auditor"):
        answer = cli("verify", folder / "certificates" / f"r1.{form}.json")
        assert answer.code == 0, answer.err


def test_statistics_of_the_forgotten_are_gone(trained: Path, tmp_path: Path) -> None:
    folder = copy_run(trained, tmp_path / "run")
    held = {path.name: path.read_bytes() for path in (folder / "statistics").iterdir()}
    sifu.open_run(folder).forget(["client-003"], retention="strict")
    now = {path.name: path.read_bytes() for path in (folder / "statistics").iterdir()}
    gone = held.keys() - now.keys()
    assert gone == {"1.3.rows.statistics", "1.sum.statistics"}
    everything = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    for name in gone:
        assert held[name] not in everything


def test_other_methods_and_other_models_are_refused(trained: Path, tmp_path: Path) -> None:
    before = state(trained)
    for method in ("sifu", "scratch"):
        with pytest.raises(InputError, match="closed_form"):
            sifu.open_run(trained).plan(["client-001"], method=method)
        with pytest.raises(InputError, match="closed_form"):
            sifu.open_run(trained).forget(["client-001"], method=method)
    assert state(trained) == before
    with pytest.raises(InputError, match="ridge"):
        sifu.open_run(runs.run("trained")).plan(["client-001"], method="closed_form")


def test_a_client_that_sends_impossible_statistics_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sifu.engines.sim.embedded_heads import ClosedFormFederation

    honest = ClosedFormFederation.sent_by

    def hostile(self: ClosedFormFederation, client: int) -> Statistics:
        sent = total(self.fixed, [honest(self, client)])
        if client != 2:
            return sent
        gram = sent.gram.copy()
        gram[0, 0] += 1  # the diagonal no longer has the parity that integer samples give
        return made_statistics(sent.fixed, gram, sent.cross, sent.samples, sent.target_energy)

    monkeypatch.setattr(ClosedFormFederation, "sent_by", hostile)
    with pytest.raises(RoundRejectedError, match="'c2' were refused and nothing was changed: impossible statistics"):
        sifu.train(TABLE, run=tmp_path / "stopped", clients=table_clients(6))


def test_a_forged_head_or_penalty_is_noticed(trained: Path, tmp_path: Path) -> None:
    """A forger who rebuilds the whole chain still needs a head that solves the equations of the sum."""
    for number, (name, edit) in enumerate(
        {
            "relative_penalty": lambda content: content.update(relative_penalty=1.0),
            "sum": lambda content: content["solve"].update(sum="0" * 64),
            "samples": lambda content: content["solve"].update(samples=7),
        }.items()
    ):
        folder = copy_run(trained, tmp_path / f"run-{number}")

        def change(kind: str, content: dict[str, Any], edit: Any = edit) -> None:
            if "solve" in content:
                edit(content)

        rebuild_chain(folder, change)
        problems = [problem for problem in sifu.open_run(folder).verify().problems if problem.startswith("statistics")]
        assert problems, name


def test_a_forged_row_is_noticed(tmp_path: Path) -> None:
    """A forger who rebuilds the whole chain over a changed value still needs the sum of the rows."""
    clients = table_clients(3)
    sifu.train(TABLE, run=tmp_path / "run", clients=clients)
    name = min(path.name for path in (tmp_path / "run" / "statistics").glob("*.rows.statistics"))
    count = len(clients[int(name.split(".")[1])].y) * (4 + 3)
    content = stored_path(tmp_path / "run", "statistics", name).read_bytes()
    first = content.index(b"\n") + 1
    stored = unpack(content[first:-32], np.dtype("<i4"))
    assert stored.size == count
    for change in (0, 1):  # change 0 is the control: a rebuilt chain over the same values verifies
        for place in (0, count // 2, count - 1):
            folder = copy_run(tmp_path / "run", tmp_path / f"forged-{change}-{place}")
            numbers = stored.copy()
            numbers[place] += change
            forged = content[:first] + pack(numbers) + content[-32:]
            stored_path(folder, "statistics", name).write_bytes(forged)
            digest = hashlib.sha256(forged).hexdigest()
            execute(folder, f"UPDATE statistics SET digest = '{digest}' WHERE file = '{name}'")

            def edit(kind: str, event: dict[str, Any], digest: str = digest) -> None:
                for row in event.get("statistics", []):
                    if row["file"] == name:
                        row["digest"] = digest

            rebuild_chain(folder, edit)
            for problems in (sifu.open_run(folder).verify().problems, sifu_verifier.verify(folder)):
                assert any("sum" in problem for problem in problems) == bool(change), problems


def test_auto_is_a_fixed_penalty_for_wide_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TABLE | {"ridge": {"regularisation": "auto"}}
    clients = table_clients(4)
    sifu.train(spec, run=tmp_path / "narrow", clients=clients)
    monkeypatch.setattr(regime, "CROSS_VALIDATED", 3)
    sifu.train(spec, run=tmp_path / "wide", clients=clients)
    assert sifu.open_run(tmp_path / "wide").spec.ridge.regularisation == 0.01
    # A run that began with cross-validation keeps using it.
    assert sifu.open_run(tmp_path / "narrow").spec.ridge.regularisation == "auto"
    for name in ("wide", "narrow"):
        run = sifu.open_run(tmp_path / name, clients=clients)
        (outcome,) = run.forget([clients[0].name])
        assert outcome.level == "exact"
        assert run.verify().problems == []
        assert sifu_verifier.verify(tmp_path / name) == []
        with RunReader(tmp_path / name) as reader:
            penalty = solves(reader)[reader.tip]["relative_penalty"]
        assert (penalty == 0.01) == (name == "wide")


def test_backups_hold_statistics(trained: Path, tmp_path: Path) -> None:
    folder = copy_run(trained, tmp_path / "run")
    run = sifu.open_run(folder)
    run.backup(tmp_path / "backup.zip")
    run.forget(["client-003"])
    from sifu.api import restore

    restore(tmp_path / "backup.zip", tmp_path / "again")
    back = sifu.open_run(tmp_path / "again")
    back.forget(["client-003"])
    assert back.verify().problems == []
    assert kept_sum(tmp_path / "again").digest() == kept_sum(folder).digest()
    remaining = dict(run.purge().remains)
    assert any("files of statistics" in what for what in remaining)
    assert any("backup.zip" in what for what in remaining)


def test_a_softmax_head_on_public_features_is_proven(tmp_path: Path) -> None:
    """The spec's seed determines the feature map, so the premise on features is met."""
    spec = {
        "data": {"clients": 30, "samples_per_client": 10},
        "features": {"kind": "random_fourier", "count": 128, "bandwidth": 2.0, "norm": 4.0, "seed": 3},
        "stop": {"target": 0.8},
    }
    run = sifu.train(spec, run=tmp_path / "run")
    plan = run.plan(["client-001"], sigma=0.2)
    assert plan.level == "proven"
    assert [premise.status for premise in plan.premises if premise.name == "features"] == ["met"]
    run.forget(["client-001"], sigma=0.2)
    assert run.verify().problems == []
    digest = json.loads(query(tmp_path / "run", "SELECT value FROM run WHERE key = 'facts'")[0][0])["features"]
    assert len(digest) == 64


def test_a_solve_without_anybody_is_refused() -> None:
    fixed = recorded_fixed_point(sifu.Spec.from_mapping(TABLE), ModelLayout(("w",), ((4, 3),), "float64"))
    with pytest.raises(InputError, match="no client is left"):
        fit_head(Statistics.empty(fixed), 0.1)
