"""Whole runs: the effect of `--device cuda` on `sifu train` and `sifu forget`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import sifu
from run_tools import small_spec
from sifu.engines.sim import ConvNet, Convolution, ModuleModel
from sifu.engines.sim.gpu.graph_engine import GraphEngine
from sifu.engines.sim.simulator import FederationOnDevice
from sifu.errors import InputError
from sifu.run import devices
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


GROUPS = NETWORK | {
    "data": {"clients": 8, "samples_per_client": 10},
    "local": {"steps": 3, "rate": 0.05, "batch": 5, "momentum": 0.9},
    "groups": {"count": 3, "rounds": 2},
    "stop": {"target": 0.0, "max_rounds": 4},
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide a GPU, or the CPU in its place."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(devices, "GPU", "cpu")
        monkeypatch.setattr(devices, "why_no_gpu", lambda: None)


def psi_of(run: sifu.Run) -> np.ndarray:
    return np.array([client.psi for client in sorted(run.status().clients, key=lambda client: client.name)])


@pytest.mark.usefixtures("gpu")
def test_a_run_on_the_gpu_is_the_run_on_the_cpu_to_rounding(tmp_path: Path) -> None:
    runs = {device: sifu.train(SPEC, run=tmp_path / device, device=device) for device in ("cuda", "cpu")}
    assert isinstance(runs["cuda"].engine(), GraphEngine)
    assert not isinstance(runs["cpu"].engine(), GraphEngine)
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


def exported(run: sifu.Run, path: Path) -> bytes:
    """Return the values of the released model, without the salt of its file."""
    return b"".join(tensor.tobytes() for _, tensor in sorted(load_file(run.export(path)).items()))


def statuses(run: sifu.Run, request: str) -> dict[str, str]:
    """Return the status of each premise of a certificate."""
    return {premise["name"]: premise["status"] for premise in run.certificate(request).body["premises"]}


@pytest.mark.usefixtures("gpu")
def test_exact_on_a_gpu_trusts_that_it_repeats_its_bits(tmp_path: Path) -> None:
    run = sifu.train(SPEC, run=tmp_path / "gpu", device="cuda")
    (outcome,) = run.forget(["client-003"], "case", method="scratch")
    assert outcome.level == "exact"
    assert statuses(run, "case")["deterministic device"] == "trusted"
    assert run.verify().problems == []
    assert verify(tmp_path / "gpu") == []
    # A run whose certificates promise more cannot be continued there; `auto` keeps the device on which the run began.
    sifu.train(SPEC, run=tmp_path / "cpu", device="cpu")
    with pytest.raises(InputError, match="an engine whose rounds follow from"):
        sifu.open_run(tmp_path / "cpu", device="cuda").forget(["client-003"], method="scratch")
    (outcome,) = sifu.open_run(tmp_path / "cpu").forget(["client-003"], method="scratch")
    assert outcome.level == "exact"


@pytest.mark.usefixtures("gpu")
def test_a_network_that_no_graph_replays_is_conditional(tmp_path: Path) -> None:
    """Dropout trains by the plain loop on the device, whose bits are not known to repeat."""
    spec = NETWORK | {"model": {"kind": "python", "dtype": "float32"}}
    network = ModuleModel(ConvNet((1, 8, 8), (Convolution(4, 1),), (8,), 10, dropout=0.1))
    run = sifu.train(spec, model=network, run=tmp_path / "run", device="cuda")
    assert isinstance(run.engine(), FederationOnDevice)
    (outcome,) = run.forget(["client-003"], "case", method="scratch")
    assert (outcome.level, statuses(run, "case")["layout"]) == ("conditional", "assumed")


@pytest.mark.usefixtures("gpu")
def test_groups_on_a_gpu_forget_exactly_and_repeat_their_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same run twice has the same models, before and after a request; another seed does not."""
    models = []
    for name, seed in (("first", 5), ("again", 5), ("control", 6)):
        monkeypatch.setattr("sifu.store.unfinished.new_group_key", lambda: "00" * 32)
        spec = GROUPS | {"seed": seed}
        run = sifu.train(spec, run=tmp_path / name, device="cuda")
        assert isinstance(run.engine(), GraphEngine)
        before = exported(run, tmp_path / f"{name}-before.safetensors")
        (outcome,) = run.forget(["client-004"], "case", method="groups")
        assert (outcome.level, statuses(run, "case")["deterministic device"]) == ("exact", "trusted")
        assert run.verify().problems == []
        models.append((before, exported(run, tmp_path / f"{name}-after.safetensors")))
    assert models[0] == models[1]
    assert models[0][0] != models[2][0]


@pytest.mark.usefixtures("gpu")
def test_tf32_is_only_for_a_gpu_with_kernels(tmp_path: Path) -> None:
    spec = NETWORK | {"model": {"kind": "cnn", "dtype": "tf32"}}
    with pytest.raises(InputError, match="sifu-kernels, which is not installed"):
        sifu.train(spec, run=tmp_path / "run", device="cuda")
    with pytest.raises(InputError, match="needs a GPU"):
        sifu.train(spec, run=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_devices_that_do_not_exist_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="tpu"):
        sifu.train(SPEC, run=tmp_path / "run", device="tpu")  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="no CUDA device"):
            sifu.train(SPEC, run=tmp_path / "run", device="cuda")
