"""Claims cover everyone who has left so far, and going back to the initial model counts as Scratch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
from sifu_verifier import verify

SMALL: dict[str, Any] = {
    "local": {"rate": 0.05, "steps": 2},
    "stop": {"target": 0.0, "max_rounds": 6},
    "seed": 2,
}


def body_of(run: sifu.Run, request: str, form: str = "auditor") -> dict[str, Any]:
    path = Path(run.folder) / "certificates" / f"{request}.{form}.json"
    body: dict[str, Any] = json.loads(path.read_bytes())["body"]
    return body


def status_of(body: dict[str, Any], name: str) -> str:
    return next((premise["status"] for premise in body["premises"] if premise["name"] == name), "met")


def steep(seed: int) -> dict[str, Any]:
    """Return clients of whom two share the steepest loss, so that both determine the automatic rate."""
    generator = np.random.default_rng(seed)
    clients = {f"c{number}": (generator.normal(size=(6, 3)), generator.integers(0, 2, 6)) for number in range(6)}
    x, y = clients["c0"]
    return clients | {"c0": (3.0 * x, y), "c1": (3.0 * x, y)}


def test_an_automatic_rate_of_two_who_left_is_no_rate_of_those_who_stay(tmp_path: Path) -> None:
    spec = {"data": {"preprocessing": "fixed", "classes": "0,1"}, "stop": {"target": 0.0, "max_rounds": 4}}
    run = sifu.train(spec, run=tmp_path / "run", clients=steep(1))
    first, second, third = (run.forget([name], method="sifu", sigma=3.0)[0] for name in ("c0", "c1", "c2"))
    found = [status_of(body_of(run, outcome.request), "hyper-parameters") for outcome in (first, second, third)]
    assert found == ["met", "assumed", "assumed"]
    assert run.verify().problems == []
    assert verify(Path(run.folder)) == []


NETWORK: dict[str, Any] = SMALL | {
    "data": {"clients": 8, "samples_per_client": 10},
    "model": {"kind": "mlp", "dtype": "float32"},
    "regularity": {"kind": "assumed", "factor": 1.0},
    "server": {"participation": "fixed(4)"},
}


def test_going_back_to_the_initial_model_is_scratch(tmp_path: Path) -> None:
    run = sifu.train(NETWORK, run=tmp_path / "run")
    (outcome,) = run.forget(["client-003"], method="sifu", sigma=1e-9)
    body, public = body_of(run, outcome.request), body_of(run, outcome.request, "public")
    assert (body["sigma"], body["start"], outcome.level) == (0.0, "fresh", "exact")
    assert public["attacker_true_positive_rate_at_1_percent"] == 0.01
    assert {premise["name"] for premise in body["premises"]}.isdisjoint({"regularity", "counterfactual", "arithmetic"})
    assert run.verify().problems == []
    assert verify(tmp_path / "run") == []
    assert sifu.verify_certificate(tmp_path / "run" / "certificates" / f"{outcome.request}.public.json").problems == []


def test_control_a_trained_model_is_not_a_fresh_one(tmp_path: Path) -> None:
    run = sifu.train(NETWORK, run=tmp_path / "run")
    (outcome,) = run.forget(["client-003"], method="sifu", sigma=50.0)
    assert (body_of(run, outcome.request)["start"], outcome.level) == ("trained", "conditional")


def test_an_initial_model_of_unknown_origin_stays_conditional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sifu.core.premises.INITIAL_MODELS", {})
    run = sifu.train(NETWORK, run=tmp_path / "run")
    (outcome,) = run.forget(["client-003"], method="sifu", sigma=1e-9)
    assert outcome.level == "conditional"
