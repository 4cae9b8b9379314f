"""Every kind of released model, exported: predictions agree with the run, also as ONNX."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
from run_tools import Command
from sifu.api import LoadedModel
from sifu.errors import InputError, install_extra
from sifu.store.reader import RunReader

CLIENTS, SAMPLES = 3, 4
BACKBONE = "import torch\n\ndef make():\n    torch.manual_seed({})\n    return torch.nn.Linear(18, 5)\n"


def images(folder: Path, *shape: int) -> Path:
    rng = np.random.default_rng(3)
    x = rng.integers(0, 256, (CLIENTS * SAMPLES, *shape), dtype=np.uint8)
    np.savez(folder / "own.npz", x=x, y=np.arange(len(x)) % 3, client=np.repeat(np.arange(CLIENTS), SAMPLES))
    return folder / "own.npz"


def rows(folder: Path, y: Any = None) -> Path:
    x = np.random.default_rng(4).random((CLIENTS * SAMPLES, 18))
    labels = np.arange(len(x)) % 3 if y is None else y
    np.savez(folder / "own.npz", x=x, y=labels, client=np.repeat(np.arange(CLIENTS), SAMPLES))
    return folder / "own.npz"


def trained(file: Path, folder: Path, kind: str, **sections: Any) -> sifu.Run:
    spec: dict[str, Any] = {
        "data": {"name": "npz", "file": str(file), "partition": "given"},
        "model": {"kind": kind},
        "local": {"rate": 0.05, "steps": 2},
        "stop": {"max_rounds": 2, "target": 0.0},
        "regularity": {"kind": "measured" if kind in ("softmax", "logistic", "least_squares") else "assumed"},
    }
    return sifu.train(spec | sections, run=folder / "run")


def check_agrees_with_the_run(run: sifu.Run, model: LoadedModel, file: Path) -> None:
    """Check that the model makes as many correct predictions as the engine that trained it, client by client."""
    with RunReader(run.folder) as reader:
        vector = reader.load_model(reader.tip)
    expected = run.engine().evaluate(vector, np.arange(CLIENTS)).correct
    arrays = np.load(file)
    predicted = np.array([row.prediction for row in model.predict_rows(file)])
    right = [int((predicted == arrays["y"])[arrays["client"] == client].sum()) for client in range(CLIENTS)]
    assert right == expected.tolist()


@pytest.mark.parametrize("kind", ["cnn", "mlp"])
def test_every_network_that_a_spec_can_name(tmp_path: Path, kind: str) -> None:
    file = images(tmp_path, 18, 18, 3)
    run = trained(file, tmp_path, kind, model={"kind": kind, "dtype": "float32"})
    model = sifu.load_model(run.export(tmp_path / "m.safetensors"))
    check_agrees_with_the_run(run, model, file)
    x = np.load(file)["x"]
    np.testing.assert_allclose(model.scores(x), model.scores(x.transpose(0, 3, 1, 2) / 255.0), atol=1e-6)
    with pytest.raises(InputError, match=r"takes (samples of shape|rows of)"):
        model.predict(np.zeros((2, 3, 20, 20)))


def test_what_a_network_needs_to_be_written_as_onnx_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without onnxscript, or with a torch too old for it, the user is told what to install, and no file is left."""
    pytest.importorskip("onnx")
    import torch

    needed = "^" + re.escape(
        f"to write ONNX files, install onnx, onnxscript and torch 2.7 or later: {install_extra('onnx')}"
    )
    run = trained(rows(tmp_path), tmp_path, "mlp", model={"kind": "mlp", "dtype": "float32"})
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "onnxscript", None)
        with pytest.raises(InputError, match=f"{needed}$"):
            run.export(tmp_path / "m.onnx")
    for version in ("2.6.0", "2.6.0+cu124"):
        with monkeypatch.context() as older:
            older.setattr(torch, "__version__", version)
            with pytest.raises(InputError, match=needed + rf" \(torch {re.escape(version)} is installed\)$"):
                run.export(tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()
    for version in (torch.__version__, "2.10.0"):  # 2.10 is later than 2.9, although it sorts before it
        monkeypatch.setattr(torch, "__version__", version)
        assert run.export(tmp_path / "m.onnx").exists()


def test_what_torch_cannot_export_is_refused_by_name_in_one_line() -> None:
    pytest.importorskip("onnxscript")
    import torch

    from sifu.export.onnx_file import _exported

    class Spectrum(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.svdvals(x.reshape(x.shape[0], 3, 6))

    class OneWayOrTheOther(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    for module, named in ((Spectrum(), "aten._linalg_svd"), (OneWayOrTheOther(), "data-dependent")):
        with pytest.raises(
            InputError, match=f"torch cannot export the network .*{named}.*export it as safe"
        ) as refused:
            _exported(module, torch.zeros(2, 18))
        assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("features", ["none", "random_fourier"])
@pytest.mark.parametrize("kind", ["ridge", "softmax"])
def test_heads_on_feature_maps(tmp_path: Path, kind: str, features: str) -> None:
    file = rows(tmp_path)
    run = trained(file, tmp_path, kind, features={"kind": features, "count": 8 * (features != "none"), "seed": 2})
    model = sifu.load_model(run.export(tmp_path / "m.safetensors"))
    check_agrees_with_the_run(run, model, file)
    with pytest.raises(InputError, match="takes rows of 18 features"):
        model.predict(np.zeros((2, 17)))
    if features != "none":
        model.description["features_digest"] = "0" * 64
        model._maps.clear()
        with pytest.raises(InputError, match="is not the one that the model was trained on"):
            model.predict(np.zeros((2, 18)))


def test_a_module_runs_only_if_it_is_named_and_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("SIFU_ALLOW_CODE", "exported_backbone:make")
    backbone = tmp_path / "exported_backbone.py"
    backbone.write_text(BACKBONE.format(1))
    file = rows(tmp_path)
    try:
        run = trained(file, tmp_path, "ridge", features={"kind": "module", "module": "exported_backbone:make"})
        path = run.export(tmp_path / "m.safetensors")
        with pytest.raises(InputError, match="name it to allow running it"):
            sifu.load_model(path)
        assert "name it to allow running it" in cli("predict", path, file).err
        check_agrees_with_the_run(run, sifu.load_model(path, module="exported_backbone:make"), file)
        assert cli("predict", path, file, "--module", "exported_backbone:make").code == 0
        sys.modules.pop("exported_backbone")
        backbone.write_text(BACKBONE.format(2))  # other weights
        with pytest.raises(InputError, match="is not the one that the model was trained on"):
            sifu.load_model(path, module="exported_backbone:make").predict_rows(file)
    finally:
        sys.modules.pop("exported_backbone", None)
