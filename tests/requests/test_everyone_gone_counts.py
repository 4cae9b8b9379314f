"""Claims cover everyone who has left so far, and going back to the initial model counts as Scratch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
    assert sifu.verify(tmp_path / "run" / "certificates" / f"{outcome.request}.public.json").problems == []


def test_control_a_trained_model_is_not_a_fresh_one(tmp_path: Path) -> None:
    run = sifu.train(NETWORK, run=tmp_path / "run")
    (outcome,) = run.forget(["client-003"], method="sifu", sigma=50.0)
    assert (body_of(run, outcome.request)["start"], outcome.level) == ("trained", "conditional")


def test_an_initial_model_of_unknown_origin_stays_conditional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sifu.core.premises.INITIAL_MODELS", {})
    run = sifu.train(NETWORK, run=tmp_path / "run")
    (outcome,) = run.forget(["client-003"], method="sifu", sigma=1e-9)
    assert outcome.level == "conditional"
