"""User modules in a spec, the cache of features, and softmax heads on image features without Python."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sifu
import sifu_verifier
from run_tools import Command, numbers_of
from sifu.data import ClientData
from sifu.data.feature_maps import CachedFeatures, RandomFourier
from sifu.data.feature_maps.fixed_networks import NetworkFeatures
from sifu.engines.sim import embedded_heads
from sifu.errors import InputError
from sifu.store.reader import RunReader

BACKBONE = """
import torch

def make():
    torch.manual_seed({seed})
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.ReLU())

def nothing():
    return 3
"""


@pytest.fixture
def backbone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a file with a factory into the current folder, as a user would."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    allowed = ("make", "other", "nothing")
    monkeypatch.setenv(
        "SIFU_ALLOW_CODE", "\n".join(["no_such_file:make", *(f"own_backbone:{name}" for name in allowed)])
    )
    file = tmp_path / "own_backbone.py"
    file.write_text(BACKBONE.format(seed=1))
    yield file
    sys.modules.pop("own_backbone", None)


def changed(file: Path, text: str) -> None:
    file.write_text(text)
    sys.modules.pop("own_backbone", None)


def spec_of(kind: str, **features: Any) -> dict[str, Any]:
    return {
        "data": {"name": "digits", "clients": 6},
        "model": {"kind": kind},
        "features": {"kind": "module", "module": "own_backbone:make"} | features,
        "stop": {"max_rounds": 3, "target": 0.0},
    }


def test_a_module_of_the_users_and_what_its_change_does(backbone: Path, tmp_path: Path) -> None:
    run = sifu.train(spec_of("ridge"), run=tmp_path / "run")
    (outcome,) = run.forget(["client-002"])
    assert outcome.level == "exact"
    premises = {premise["name"]: premise["status"] for premise in run.certificate("r1").body["premises"]}
    assert premises["features"] == "trusted"
    assert run.verify().problems == []
    for other in (BACKBONE.format(seed=2), BACKBONE.format(seed=1) + "\n# the same weights from another text\n"):
        changed(backbone, other)
        with pytest.raises(InputError, match="feature map"):
            sifu.open_run(tmp_path / "run").evaluate()
    sifu.open_run(tmp_path / "run").forget(["client-003"])  # served from statistics alone: the module is not run
    changed(backbone, BACKBONE.format(seed=1))
    sifu.open_run(tmp_path / "run").evaluate()


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("own_backbone", "write package.file:function"),
        ("own_backbone:other", "cannot be found"),
        ("no_such_file:make", "cannot be found"),
        ("own_backbone:nothing", "returned int, not a torch.nn.Module"),
        ("", "features.module"),
    ],
)
def test_a_module_that_cannot_be_used_is_named(backbone: Path, tmp_path: Path, module: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        sifu.train(spec_of("ridge", module=module), run=tmp_path / "run")


BROKEN = {
    "syntax": ("def make(:", "importing it failed: SyntaxError"),
    "import": ("1 / 0", "importing it failed: ZeroDivisionError"),
    "call": ("def make():\n    raise OSError('no disk')", "failed: OSError: no disk"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_module_that_fails_is_one_sentence(backbone: Path, tmp_path: Path, kind: str) -> None:
    text, why = BROKEN[kind]
    changed(backbone, text)
    with pytest.raises(InputError, match=why):
        sifu.train(spec_of("ridge"), run=tmp_path / "run")


def test_nothing_of_a_module_runs_without_consent(
    backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Command
) -> None:
    """A module runs neither in training nor in a later command without consent, even if the run was trained with
    consent.
    """
    spec = tmp_path / "spec.toml"
    spec.write_text(
        '[data]\nname = "digits"\nclients = 6\n[model]\nkind = "ridge"\n'
        '[features]\nkind = "module"\nmodule = "own_backbone:make"\n'
    )
    monkeypatch.delenv("SIFU_ALLOW_CODE")
    backbone.write_text(f"open({str(tmp_path / 'marker')!r}, 'w').close()\n" + BACKBONE.format(seed=1))

    def refused(*arguments: object) -> bool:
        sys.modules.pop("own_backbone", None)
        answer = cli(*arguments)
        return (
            answer.code == 2 and "--allow-code own_backbone:make" in answer.err and not (tmp_path / "marker").exists()
        )

    assert refused("train", spec, "--run", tmp_path / "run")
    assert not (tmp_path / "run" / "run.db").exists()
    assert "package.file:function" in cli("--allow-code", "own_backbone", "train", spec, "--run", tmp_path / "run").err
    assert cli("--allow-code", "own_backbone:make", "train", spec, "--run", tmp_path / "run").code == 0
    monkeypatch.delenv("SIFU_ALLOW_CODE", raising=False)
    (tmp_path / "marker").unlink()
    assert refused("evaluate", tmp_path / "run", "--on", "training")
    assert refused("forget", tmp_path / "run", "--client", "client-003", "--records", "0")
    # A request to forget a client is served from files, so it needs no consent and runs nothing.
    assert cli("forget", tmp_path / "run", "--clients", "client-003").code == 0
    assert not (tmp_path / "marker").exists()
    assert refused("audit", tmp_path / "run", "--no-attacks")
    assert cli("verify", tmp_path / "run").code == 0
    with RunReader(tmp_path / "run") as reader:
        assert reader.payload(1)["allowed_code"] == "own_backbone:make"
    sifu.allow_code("own_backbone:make")
    (outcome,) = sifu.open_run(tmp_path / "run").forget(["client-004"], records=[0])
    assert outcome.level == "exact"
    assert sifu_verifier.verify(tmp_path / "run") == []
    monkeypatch.delenv("SIFU_ALLOW_CODE", raising=False)


@pytest.mark.parametrize("module", ["os:abort", "sys:exit", "antigravity:fly"])
def test_code_that_the_spec_of_a_stranger_names_is_not_run(tmp_path: Path, module: str) -> None:
    with pytest.raises(InputError, match="was not run"):
        sifu.train(spec_of("ridge", module=module), run=tmp_path / "run")


def test_features_are_kept_in_a_folder_and_have_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).normal(size=(600, 5))
    fresh = RandomFourier((5,), features=8)
    cached = CachedFeatures(fresh, tmp_path / "kept")
    first = np.concatenate([phi for _, phi in cached.chunks(x)])
    monkeypatch.setattr(type(fresh), "__call__", lambda self, x: pytest.fail("they are kept"))
    again = list(cached.chunks(x))
    np.testing.assert_array_equal(first, np.concatenate([phi for _, phi in again]))
    assert [rows.stop for rows, _ in again] == [256, 512, 600]
    assert cached.digest() == fresh.digest()
    monkeypatch.undo()
    (file,) = (tmp_path / "kept").iterdir()
    file.write_bytes(file.read_bytes()[:1000])  # a truncated file is computed again
    np.testing.assert_array_equal(first, np.concatenate([phi for _, phi in cached.chunks(x)]))
    assert [path.suffix for path in (tmp_path / "kept").iterdir()] == [".npy"]


@pytest.mark.parametrize("poison", ["another client", "another map", "one value", "no digest", "zeros"])
def test_features_that_are_not_those_of_the_samples_are_computed_again(tmp_path: Path, poison: str) -> None:
    """A cached file in the place of another one must not put a client's features into another client's statistics."""
    generator = np.random.default_rng(0)
    own, leaver = generator.normal(size=(30, 5)), generator.normal(size=(30, 5))
    cached = CachedFeatures(RandomFourier((5,), features=8), tmp_path)
    other = CachedFeatures(RandomFourier((5,), features=8, seed=1), tmp_path)

    def features(samples: Any, through: CachedFeatures = cached) -> Any:
        return np.concatenate([phi for _, phi in through.chunks(samples)])

    expected = features(own)
    features(leaver)
    features(own, other)
    path = cached.path_of(own)
    content = bytearray(path.read_bytes())
    if poison == "one value":
        content[-40] ^= 1
    elif poison == "no digest":
        content = content[:-32]
    elif poison == "zeros":
        content[-32 - 8 * expected.size : -32] = bytes(8 * expected.size)
    else:
        content = bytearray((cached.path_of(leaver) if poison == "another client" else other.path_of(own)).read_bytes())
    path.write_bytes(content)
    np.testing.assert_array_equal(features(own), expected)
    np.testing.assert_array_equal(features(own), expected)  # from the file that was written again
    assert path.read_bytes() != bytes(content)


def test_a_run_with_kept_features_is_the_same_run(tmp_path: Path) -> None:
    features = {"kind": "random_fourier"}
    spec = {"data": {"name": "digits", "clients": 4}, "model": {"kind": "ridge"}, "features": features}
    plain = sifu.train(spec, run=tmp_path / "plain")
    kept = sifu.train(spec | {"features": features | {"cache": str(tmp_path / "kept")}}, run=tmp_path / "kept run")
    assert numbers_of(plain.folder) == numbers_of(kept.folder)
    assert len(list((tmp_path / "kept").iterdir())) == 5  # four clients and the test images
    plan = kept.plan(["client-001"])
    assert any(str(tmp_path / "kept") in note and "no request erases it" in note for note in plan.notes)
    assert not any("features.cache" in note for note in plain.plan(["client-001"]).notes)


def test_a_client_beyond_memory_is_computed_in_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Features of a client that exceeds memory are not kept, and its evaluation gives the same accuracy."""
    generator = np.random.default_rng(0)
    clients = [ClientData(f"c{k}", generator.normal(size=(700, 3)), generator.integers(0, 2, 700)) for k in range(2)]
    spec = {"data": {"preprocessing": "fixed"}, "model": {"kind": "ridge", "outputs": 2}}
    fits = sifu.train(spec, run=tmp_path / "fits", clients=clients).status().accuracy
    monkeypatch.setattr(embedded_heads, "KEPT_BYTES", 0)
    run = sifu.train(spec, run=tmp_path / "does not", clients=clients)
    assert run.status().accuracy == fits
    assert run.engine()._kept == {}  # type: ignore[attr-defined]


def test_a_gpu_that_is_not_there_is_named(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(InputError, match="--device cuda cannot be used here"):
        sifu.train({"model": {"kind": "ridge"}}, run=tmp_path / "run", device="cuda")


class _MinusTheMean(torch.nn.Module):
    """Module that subtracts the batch mean, so that each sample's features depend on the others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(dim=0)


class _Remembers(torch.nn.Module):
    """Module that keeps a running mean outside its state, where no digest covers it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.mean(dim=0))
        return x - torch.stack(self.seen).mean(dim=0)


class _Draws(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5, training=True)


@pytest.mark.parametrize("module", [_MinusTheMean(), _Remembers(), _Draws()])
def test_a_module_that_does_not_look_at_each_sample_by_itself_is_refused(module: torch.nn.Module) -> None:
    with pytest.raises(InputError, match="each sample separately"):
        NetworkFeatures(module, (6,))


def test_modules_that_look_at_each_sample_by_itself_are_not_refused() -> None:
    torch.manual_seed(0)
    parts = (torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Dropout(0.5))
    assert NetworkFeatures(torch.nn.Sequential(*parts), (3, 8, 8)).features == 8 * 36
    assert NetworkFeatures(torch.nn.Sequential(torch.nn.LayerNorm(6), torch.nn.Linear(6, 4)), (6,)).features == 4


@pytest.mark.parametrize("kind", ["ridge", "softmax"])
def test_a_certificate_trusts_the_operator_with_a_module(backbone: Path, tmp_path: Path, kind: str) -> None:
    run = sifu.train(spec_of(kind), run=tmp_path / "run")
    (outcome,) = run.forget(["client-003"])
    certificate = json.loads((tmp_path / "run" / "certificates" / f"{outcome.request}.public.json").read_text())
    assert [row["status"] for row in certificate["body"]["premises"] if row["name"] == "features"] == ["trusted"]


class ScriptedPart(torch.nn.Module):
    """Network with a part that is compiled to TorchScript, with or without gradients."""

    def __init__(self, gradients: bool) -> None:
        super().__init__()
        self.part = torch.jit.script(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8)))
        for parameter in self.part.parameters():
            parameter.requires_grad_(gradients)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the part."""
        rows: torch.Tensor = self.part(x)
        return rows


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_modules_that_cannot_be_frozen_are_refused() -> None:
    for module in (ScriptedPart(gradients=True), ScriptedPart(gradients=False).part):
        with pytest.raises(InputError, match=r"compiled to TorchScript and cannot be frozen"):
            NetworkFeatures(module, (1, 8, 8))
    assert NetworkFeatures(ScriptedPart(gradients=False), (1, 8, 8)).features == 8
