"""Whole runs as single lanes: the effect of `--device cuda` on `sifu train` and `sifu forget`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sifu
from run_tools import small_spec
from sifu.api.start_run import create_run
from sifu.core.spec import Spec
from sifu.engines.sim.gpu.lane_engine import LaneEngine
from sifu.errors import InputError
from sifu.run import devices
from sifu.run.clients_and_engine import clients_from_spec, engine_from_spec
from sifu_verifier import verify

SPEC = small_spec(
    data={"clients": 12, "samples_per_client": 10}, local={"steps": 3}, stop={"target": 0.0, "max_rounds": 12}
)
NETWORK = small_spec(
    data={"clients": 4, "samples_per_client": 4},
    model={"kind": "cnn", "dtype": "float32"},
    local={"steps": 1, "rate": 0.05, "batch": 4},
    regularity={"kind": "assumed"},
    stop={"target": 0.0, "max_rounds": 2},
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide a GPU, or Triton's interpreter instead."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(devices, "GPU", "cpu")
        monkeypatch.setattr(devices, "why_no_gpu", lambda: None)


def psi_of(run: sifu.Run) -> np.ndarray:
    return np.array([client.psi for client in sorted(run.status().clients, key=lambda client: client.name)])


@pytest.mark.usefixtures("gpu")
def test_a_run_on_the_gpu_is_the_run_on_the_cpu_to_rounding(tmp_path: Path) -> None:
    runs = {device: sifu.train(SPEC, run=tmp_path / device, device=device) for device in ("cuda", "cpu")}
    assert isinstance(runs["cuda"].engine(), LaneEngine)
    assert not isinstance(runs["cpu"].engine(), LaneEngine)
    np.testing.assert_allclose(psi_of(runs["cuda"]), psi_of(runs["cpu"]), rtol=1e-9)
    plans = {device: run.plan(["client-003"], sigma=0.3) for device, run in runs.items()}
    assert plans["cuda"].source_rounds == plans["cpu"].source_rounds
    for run in runs.values():
        (outcome,) = run.forget(["client-003"], "case", sigma=0.3)
        assert outcome.level == "proven"
        assert run.verify().holds


@pytest.mark.usefixtures("gpu")
def test_a_run_may_be_continued_on_the_other_device(tmp_path: Path) -> None:
    sifu.train(SPEC, run=tmp_path / "run", device="cuda")
    (outcome,) = sifu.open_run(tmp_path / "run", device="cpu").forget(["client-003"], "case", sigma=0.3)
    (again,) = sifu.open_run(tmp_path / "run", device="cuda").forget(["client-004"], "case-2", sigma=0.3)
    assert outcome.level == again.level == "proven"
    assert sifu.open_run(tmp_path / "run").verify().holds


@pytest.mark.usefixtures("gpu")
def test_bits_that_follow_from_the_largest_client_are_not_called_exact(tmp_path: Path) -> None:
    run = sifu.train(SPEC, run=tmp_path / "gpu", device="cuda")
    (outcome,) = run.forget(["client-003"], "case", method="scratch")
    assert outcome.level == "conditional"
    premises = {premise["name"]: premise["status"] for premise in run.certificate("case").body["premises"]}
    assert premises["layout"] == "assumed"
    assert run.verify().problems == []
    assert verify(tmp_path / "gpu") == []
    # A run whose certificates promise more cannot be continued there; `auto` keeps the device on which the run began.
    sifu.train(SPEC, run=tmp_path / "cpu", device="cpu")
    with pytest.raises(InputError, match="an engine whose rounds follow from"):
        sifu.open_run(tmp_path / "cpu", device="cuda").forget(["client-003"], method="scratch")
    (outcome,) = sifu.open_run(tmp_path / "cpu").forget(["client-003"], method="scratch")
    assert outcome.level == "exact"


@pytest.mark.long
@pytest.mark.usefixtures("gpu")
def test_auto_leaves_small_linear_models_and_what_lanes_cannot_do_to_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def engine_of(name: str, spec: dict[str, Any]) -> Any:
        return sifu.train(spec, run=tmp_path / name, device="auto").engine()

    assert not isinstance(engine_of("small", SPEC), LaneEngine)
    monkeypatch.setattr(devices, "WORTH_A_GPU", 1)
    assert isinstance(engine_of("large", SPEC), LaneEngine)
    with_gram = SPEC | {"keep": {"gram_clients": 2}}
    assert not isinstance(engine_of("gram", with_gram), LaneEngine)
    assert isinstance(engine_of("network", NETWORK), LaneEngine)
    precise = NETWORK | {"model": {"kind": "cnn", "dtype": "float64"}}
    assert engine_of("precise", precise).facts.dtype == "float64"
    assert not isinstance(engine_of("precise-too", precise), LaneEngine)
    with pytest.raises(InputError, match="gram_clients"):
        sifu.train(with_gram, run=tmp_path / "refused", device="cuda")
    assert not (tmp_path / "refused").exists()


@pytest.mark.usefixtures("gpu")
def test_a_precision_that_certificates_would_not_name_is_refused(tmp_path: Path) -> None:
    sifu.train(NETWORK, run=tmp_path / "float32", device="cpu")
    with pytest.raises(InputError, match="products in tf32"):
        sifu.open_run(tmp_path / "float32", device="cuda", precision="tf32").engine()
    spec = Spec.from_mapping(NETWORK)
    data = clients_from_spec(spec)
    engine, resolved = engine_from_spec(spec, data)
    rough = devices.on_device(engine, data, resolved, "cuda", "tf32")
    assert rough.facts.outside == ("products in tf32",)
    create_run(tmp_path / "tf32", spec, resolved, rough).close()
    # More precision than the certificates state is allowed.
    for precision in ("tf32", "float32"):
        sifu.open_run(tmp_path / "tf32", device="cuda", precision=precision).engine()  # type: ignore[arg-type]
    sifu.open_run(tmp_path / "tf32", device="cpu").engine()


def test_devices_that_do_not_exist_are_named(tmp_path: Path) -> None:
    for wrong in ({"device": "tpu"}, {"precision": "float16"}):
        with pytest.raises(InputError, match=r"tpu|float16"):
            sifu.train(SPEC, run=tmp_path / "run", **wrong)  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="no CUDA device"):
            sifu.train(SPEC, run=tmp_path / "run", device="cuda")
