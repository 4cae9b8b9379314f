"""Exceptions at any step after a rollback: the same command finishes the request."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import sifu
import sifu_verifier
from secret_draws import repeat_draws
from sifu.engines.sim import SimulatedFederation
from sifu.errors import InputError, RoundRejectedError
from sifu.requests.roll_back import RollBack

SOURCES = str(Path(sifu.__file__).resolve().parent)
PACKAGES = tuple(f"{SOURCES}/{name}/" for name in ("requests", "run", "methods", "theory", "core", "planning", "store"))
FAULTS = (ValueError, MemoryError, ZeroDivisionError, np.linalg.LinAlgError, InputError, OSError)
SMALL: dict[str, Any] = {
    "data": {"clients": 12, "samples_per_client": 6},
    "local": {"rate": 0.05, "steps": 2},
    "stop": {"target": 0.0, "max_rounds": 4},
    "seed": 4,
}
RIDGE = {"data": SMALL["data"], "model": {"kind": "ridge"}, "seed": 4}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sifu": (SMALL, {"method": "sifu", "sigma": 0.5, "level": "none"}),
    "scratch": (SMALL | {"local": {"steps": 2}}, {"method": "scratch"}),
    "groups": (SMALL | {"groups": {"count": 3, "rounds": 2}}, {"method": "groups"}),
    "closed form": (RIDGE, {}),
    "closed form, one sum": (RIDGE | {"keep": {"statistics": "sum"}}, {}),
    "records": (SMALL, {"method": "scratch", "records": [1, 3]}),
    "records, closed form": (RIDGE, {"records": [1, 3]}),
}


@pytest.fixture(autouse=True)
def same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the same noise in every run."""
    repeat_draws(monkeypatch)


class Steps:
    """Counter of the library's calls after the rollback, which raises at the chosen one."""

    def __init__(self, at: int | None = None, fault: type[BaseException] = ValueError) -> None:
        self.at, self.fault, self.count = at, fault, 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(PACKAGES):
            return
        self.count += 1
        if self.count == self.at:
            sys.settrace(None)
            raise self.fault(f"made up, in {frame.f_code.co_qualname}")


@contextmanager
def traced_after_rollback(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    record = RollBack.record

    def record_then_trace(self: RollBack) -> None:
        record(self)
        sys.settrace(steps)

    before = sys.gettrace()
    with monkeypatch.context() as patched:
        patched.setattr(RollBack, "record", record_then_trace)
        try:
            yield
        finally:
            sys.settrace(before)


def final_model(run: sifu.Run) -> Any:
    with run.reader() as reader:
        return reader.load_model(reader.tip)


@pytest.mark.parametrize("case", CASES)
def test_the_same_command_finishes_after_any_exception(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, terms = CASES[case]
    sifu.train(spec, run=tmp_path / "trained")
    shutil.copytree(tmp_path / "trained", tmp_path / "whole")
    whole, steps = sifu.open_run(tmp_path / "whole"), Steps()
    with traced_after_rollback(steps, monkeypatch):
        whole.forget(["client-003"], **terms)
    expected, generator = final_model(whole), np.random.default_rng([ord(message) for message in case])
    assert steps.count > 50
    raised = 0
    for turn, at in enumerate(generator.integers(1, steps.count + 1, 10).tolist()):
        folder, fault = tmp_path / str(turn), FAULTS[int(generator.integers(len(FAULTS)))]
        shutil.copytree(tmp_path / "trained", folder)
        try:
            with traced_after_rollback(Steps(at, fault), monkeypatch):
                sifu.open_run(folder).forget(["client-003"], **terms)
        except Exception:
            raised += 1
        run = sifu.open_run(folder)
        with suppress(InputError):  # the request was done before the exception
            run.forget(["client-003"], **terms)
        assert run.status().phase == "ready", (case, at, fault)
        assert [row.request for row in run.outcomes()] == ["r1"], (case, at, fault)
        np.testing.assert_array_equal(final_model(run), expected, err_msg=f"{case} {at} {fault}")
        assert run.verify().problems == [], (case, at, fault)
    assert raised >= 5  # most exceptions reach the caller


ZERO = np.zeros((4, 3))
LEFT: dict[str, tuple[dict[str, Any], Any]] = {
    "features are zero": ({}, (ZERO, np.array([0, 1, 0, 1]))),
    "features are zero, one class": ({}, (ZERO, np.array([0, 0, 0, 0]))),
    "targets are at the shift": ({"ridge": {"task": "regression"}}, (np.eye(4, 3), np.full(4, 0.5))),
    "nothing but zero": ({"ridge": {"task": "regression"}}, (ZERO, np.full(4, 0.5))),
    "one sample": ({}, (np.ones((1, 3)), np.array([1]))),
}


@pytest.mark.parametrize("keep", ["clients", "sum"])
@pytest.mark.parametrize("case", LEFT)
@pytest.mark.filterwarnings("ignore::sifu.errors.SifuWarning")
def test_a_head_of_any_data_that_is_left_can_be_solved(case: str, keep: str, tmp_path: Path) -> None:
    more, (x, y) = LEFT[case]
    generator = np.random.default_rng(1)
    leaving = (generator.normal(size=(8, 3)), generator.normal(size=8) if y.dtype.kind == "f" else np.arange(8) % 2)
    classes = {} if y.dtype.kind == "f" else {"classes": "0,1"}
    spec = {"data": {"preprocessing": "fixed"} | classes, "model": {"kind": "ridge"}, "keep": {"statistics": keep}}
    run = sifu.train(spec | more, run=tmp_path / "run", clients={"leaving": leaving, "stays": (x, y), "too": (x, y)})
    (outcome,) = run.forget(["leaving"])
    never = sifu.train(spec | more, run=tmp_path / "never", clients={"stays": (x, y), "too": (x, y)})
    assert outcome.level == "exact"
    np.testing.assert_array_equal(final_model(run), final_model(never))
    assert run.verify().problems == sifu_verifier.verify(run.folder) == []


def test_heads_of_random_degenerate_data_can_be_solved(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    for case in range(12):
        width, samples = int(generator.integers(1, 6)), int(generator.integers(1, 5))
        x = generator.normal(size=(samples, width)) * generator.integers(0, 2, width) * generator.choice([1e-3, 1, 50])
        y = generator.choice([0.5, 1.0], samples) if generator.random() < 0.5 else np.full(samples, 0.5)
        clients = {"leaving": (generator.normal(size=(6, width)), generator.normal(size=6)), "stays": (x, y)}
        spec = {"data": {"preprocessing": "fixed"}, "model": {"kind": "ridge"}, "ridge": {"task": "regression"}}
        run = sifu.train(spec, run=tmp_path / str(case), clients=clients)
        run.forget(["leaving"])
        assert run.status().phase == "ready"


@pytest.mark.parametrize("method", ["scratch", "sifu"])
def test_retraining_whose_round_is_rejected_ends_with_the_last_good_model(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = sifu.train(SMALL, run=tmp_path / "run")
    collect = SimulatedFederation.collect

    def rejected(self: SimulatedFederation, setup: Any, drawn: Any) -> Any:
        if setup.position.branch == 1 and setup.position.round == 2:
            raise RoundRejectedError("the averaged model overflows")
        return collect(self, setup, drawn)

    monkeypatch.setattr(SimulatedFederation, "collect", rejected)
    (outcome,) = run.forget(["client-001"], method=method, sigma=0.5)
    assert "ends before its stop rule holds" in caplog.text
    assert outcome.rounds == 2
    assert np.isfinite(final_model(run)).all()
    assert run.status().phase == "ready"
    assert run.verify().problems == []
    (later,) = run.forget(["client-002"], method="scratch")
    assert later.request == "r2"
