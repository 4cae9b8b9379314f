"""Requests on closed-form heads: served from files, with no data, no backbone and no accuracy on training rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
import sifu_verifier
from run_tools import Command
from sifu.data.feature_maps.fixed_networks import NetworkFeatures
from sifu.engines.sim.embedded_heads import ClosedFormFederation
from sifu.errors import InputError
from sifu.run.run_engines import forgets_from_files
from sifu.store.reader import RunReader

SHOWING = "public_backbone:make_showing"


@pytest.fixture(autouse=True)
def _allowed() -> None:
    sifu.allow_code(SHOWING)


def spec_of(**features: Any) -> dict[str, Any]:
    return {
        "data": {"preprocessing": "fixed"},
        "model": {"kind": "ridge", "outputs": 2, "module_is_pure": True},
        "features": {"kind": "module", "module": SHOWING, **features},
        "ridge": {"regularisation": 0.01},
    }


def clients_of(count: int = 5) -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {f"c{name}": (random.random((6, 1, 8, 8)), np.arange(6) % 2) for name in range(count)}


def columns_of() -> dict[str, Any]:
    return {name: (x.reshape(len(x), -1), y) for name, (x, y) in clients_of().items()}


def refuse(*arguments: Any, **named: Any) -> Any:
    raise AssertionError("a request computed features or read data")


def test_a_request_reads_no_data_and_is_that_of_the_whole_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request from files gives the same head as one that computes with the clients' data; the control does the
    latter.
    """
    spec = spec_of()
    heads = {}
    for name in ("files", "data"):
        run = sifu.train(spec, run=tmp_path / name, clients=clients_of())
        with monkeypatch.context() as patch:
            if name == "files":
                for method in ("__call__", "chunks"):
                    patch.setattr(NetworkFeatures, method, refuse)
                patch.setattr(ClosedFormFederation, "__init__", refuse)
            else:
                patch.setattr("sifu.run.run_engines.forgets_from_files", lambda view: False)
            opened = sifu.open_run(tmp_path / name, clients=None if name == "files" else clients_of())
            (outcome,) = opened.forget(["c1"], "case")
        assert (outcome.level, outcome.rounds) == ("exact", 0)
        assert outcome.accuracy is None
        assert run.verify().problems == []
        assert sifu_verifier.verify(tmp_path / name) == []
        heads[name] = _head(tmp_path / name)
    assert np.array_equal(heads["files"], heads["data"])
    # An engine with data can continue this run.
    (again,) = sifu.open_run(tmp_path / "files", clients=clients_of()).forget(["c2"])
    assert again.level == "exact"


def _head(folder: Path) -> np.ndarray:
    with RunReader(folder) as reader:
        return reader.load_model(reader.tip)


def _event_count(folder: Path) -> int:
    with RunReader(folder) as reader:
        return len(reader.events())


def test_other_requests_still_read_the_data(tmp_path: Path) -> None:
    run = sifu.train(spec_of(), run=tmp_path / "run", clients=clients_of())
    (outcome,) = run.forget(["c1"], records=[0])
    assert outcome.level == "exact"
    run = sifu.train(spec_of() | {"keep": {"statistics": "sum"}}, run=tmp_path / "sum", clients=clients_of())
    with run.view() as view:
        assert not forgets_from_files(view)
    with pytest.raises(InputError, match=r"sifu\.open_run\(folder, clients"):
        sifu.open_run(tmp_path / "sum").forget(["c1"])
    (outcome,) = run.forget(["c1"])
    assert outcome.level == "exact"


PLAIN: dict[str, Any] = {"data": {"preprocessing": "fixed"}, "model": {"kind": "ridge", "outputs": 2}}


@pytest.mark.parametrize("keep", ["clients", "sum"])
@pytest.mark.parametrize("records", [None, [0]], ids=["client", "record"])
@pytest.mark.parametrize("features", [{}, {"kind": "random_fourier", "count": 16}], ids=["columns", "fourier"])
def test_no_request_measures_training_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, features: dict[str, Any], records: list[int] | None, keep: str
) -> None:
    """No request measures accuracy on training rows, even if it needs data; training and `evaluate` do."""
    spec = PLAIN | ({"features": features} if features else {}) | {"keep": {"statistics": keep}}
    run = sifu.train(spec, run=tmp_path / "run", clients=columns_of())
    assert run.status().accuracy is not None
    with monkeypatch.context() as patch:
        patch.setattr(ClosedFormFederation, "evaluate", refuse)
        (outcome,) = run.forget(["c1"], records=records)
        with pytest.raises(AssertionError, match="computed features"):
            run.evaluate("training")
    assert (outcome.level, outcome.accuracy, run.status().accuracy) == ("exact", None, None)
    assert run.evaluate("training").accuracy is not None
    assert run.verify().problems == []
    assert sifu_verifier.verify(tmp_path / "run") == []


@pytest.mark.parametrize("features", [None, SHOWING], ids=["columns", "network"])
def test_accuracy_is_measured_when_asked_for(tmp_path: Path, features: str | None) -> None:
    clients = clients_of() if features else columns_of()
    run = sifu.train(spec_of() if features else PLAIN, run=tmp_path / "run", clients=clients)
    trained = run.status().accuracy
    assert run.evaluate().accuracy == trained
    run.forget(["c1"])
    assert run.status().accuracy is None
    found = run.evaluate("training")
    x, y = (np.concatenate([clients[name][part] for name in ("c0", "c2", "c3", "c4")]) for part in (0, 1))
    expected = float(np.mean(run.model().predict(x) == y))
    assert (found.on, found.rows, found.accuracy) == ("training", 24, expected)
    assert run.status().accuracy == expected
    events = _event_count(tmp_path / "run")
    assert run.evaluate("training") == found
    assert _event_count(tmp_path / "run") == events
    with pytest.raises(InputError, match="no held-out rows"):
        run.evaluate("held-out")
    with pytest.raises(InputError, match="found 'test'"):
        run.evaluate("test")  # type: ignore[arg-type]
    assert run.verify().problems == []
    assert sifu_verifier.verify(tmp_path / "run") == []


def test_a_run_without_data_has_nothing_to_evaluate(tmp_path: Path) -> None:
    sifu.train(spec_of(), run=tmp_path / "run", clients=clients_of())
    run = sifu.open_run(tmp_path / "run")
    run.forget(["c1"])
    with pytest.warns(sifu.errors.SifuWarning), pytest.raises(InputError, match="nothing was evaluated"):
        run.evaluate("training")


def test_the_command_evaluates_on_either_kind_of_rows(tmp_path: Path, cli: Command) -> None:
    """`sifu evaluate` returns the accuracies that `status` shows, on training rows and on held-out rows."""
    spec = tmp_path / "spec.toml"
    spec.write_text('[data]\nname = "digits"\nclients = 5\nsamples_per_client = 20\n[model]\nkind = "ridge"\n')
    assert cli("train", spec, "--run", tmp_path / "run").code == 0
    status = sifu.open_run(tmp_path / "run").status()
    assert status.held_out is not None
    for on, accuracy in (("training", status.accuracy), ("held-out", status.held_out.accuracy)):
        found = json.loads(cli("evaluate", tmp_path / "run", "--on", on, "--format", "json").out)
        assert (found["on"], found["accuracy"]) == (on, accuracy)
    shown = cli("evaluate", tmp_path / "run").out
    assert f"{100 * status.held_out.accuracy:.1f} % on" in shown
