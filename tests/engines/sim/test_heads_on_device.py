"""Heads on frozen features from a GPU: an `exact` certificate states that it trusts the device to repeat its bits.

Without a GPU, the CPU takes its place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sifu
from sifu.audit import audit_run
from sifu.data.feature_maps.fixed_networks import NetworkFeatures
from sifu.engines.sim.embedded_heads import ClosedFormFederation
from sifu.errors import InputError
from sifu.run import devices
from sifu_verifier import verify

SHOWING = "public_backbone:make_showing"
SPEC: dict[str, Any] = {
    "model": {"kind": "ridge", "outputs": 2, "module_is_pure": True},
    "data": {"preprocessing": "fixed"},
    "ridge": {"regularisation": 0.01},
    "features": {"kind": "module", "module": SHOWING},
}


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    sifu.allow_code(SHOWING)
    if not torch.cuda.is_available():
        monkeypatch.setattr(devices, "GPU", "cpu")
        monkeypatch.setattr(devices, "why_no_gpu", lambda: None)


def clients() -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {f"c{name}": (random.random((6, 1, 8, 8)), np.arange(6) % 2) for name in range(4)}


def test_the_certificate_names_the_device(tmp_path: Path) -> None:
    premises = {}
    for device in ("cuda", "cpu"):
        run = sifu.train(SPEC, run=tmp_path / device, clients=clients(), device=device)
        (outcome,) = run.forget(["c1"], "case")
        assert outcome.level == "exact"
        assert run.verify().problems == []
        assert verify(tmp_path / device) == []
        premises[device] = {each["name"]: each["status"] for each in run.certificate("case").body["premises"]}
    assert premises["cuda"].pop("deterministic device") == "trusted"
    assert premises["cuda"] == premises["cpu"]


def test_a_run_from_a_cpu_stays_there(tmp_path: Path) -> None:
    for device in ("cuda", "cpu"):
        sifu.train(SPEC, run=tmp_path / device, clients=clients(), device=device)
    for folder, device in (("cpu", "auto"), ("cuda", "cpu")):
        engine = sifu.open_run(tmp_path / folder, clients=clients(), device=device).engine()
        assert type(engine) is ClosedFormFederation
    with pytest.raises(InputError, match="an engine whose rounds follow from"):
        sifu.open_run(tmp_path / "cpu", clients=clients(), device="cuda").engine()


def test_a_device_that_gives_other_features_the_second_time_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, calls = NetworkFeatures.__call__, iter(range(100))
    monkeypatch.setattr(NetworkFeatures, "__call__", lambda self, x: compute(self, x) + 1e-12 * next(calls))
    with pytest.raises(InputError, match="use --device cpu"):
        sifu.train(SPEC, run=tmp_path / "gpu", clients=clients(), device="cuda")
    sifu.train(SPEC, run=tmp_path / "cpu", clients=clients(), device="cpu")


def test_an_audit_compares_bits_only_with_the_device_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums that a GPU rounded differ on a CPU, which contradicts no claim; those of a CPU must be repeated there."""
    compute = NetworkFeatures.__call__
    with monkeypatch.context() as patch:
        patch.setattr(NetworkFeatures, "__call__", lambda self, x: (1.0 - 1e-6) * compute(self, x))
        for device in ("cuda", "cpu"):
            run = sifu.train(SPEC, run=tmp_path / device, clients=clients(), device=device)
            run.forget(["c1"], "case")
            assert audit_run(run).contradictions == ()
    elsewhere = audit_run(sifu.open_run(tmp_path / "cuda", clients=clients(), device="cpu"))
    assert elsewhere.contradictions == ()
    assert any("as on another machine or device" in note for note in elsewhere.notes)
    wrong = audit_run(sifu.open_run(tmp_path / "cpu", clients=clients(), device="cpu"))
    assert any("not solved from the sum" in contradiction for contradiction in wrong.contradictions)
