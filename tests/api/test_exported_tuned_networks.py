"""Heads on tuned networks as ONNX graphs: they agree with `predict` and contain the frozen layers once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sifu
from onnx_tools import answers_of_the_graph, description_in
from sifu.errors import InputError

pytestmark = pytest.mark.long

pytest.importorskip("onnx")
CLIENTS, SAMPLES, GROUPS = 6, 6, 3


class Residual(nn.Module):
    """Network with layers of many kinds, some of which are frozen if only the last ones are tuned."""

    last_layers = ("out",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=False)
        self.out = nn.Linear(4 * 16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.interpolate(x, size=(16, 16), mode="bilinear", align_corners=False)
        x = nn.functional.relu6(self.norm(self.first((x * 255.0 - 127.0) / 128.0)))
        x = x + nn.functional.silu(self.second(nn.functional.pad(x, [0, 0, 0, 0])))
        return self.out(nn.functional.max_pool2d(x, 4).flatten(1))


class Bessel(nn.Module):
    """Module with an operation that cannot be written as a graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(self.layer(x.mean(dim=(2, 3)).repeat(1, 2)[:, :4]))


def make() -> nn.Module:
    return Residual()


def make_bessel() -> nn.Module:
    return Bessel()


def trained(folder: Path, factory: str = "make", **features: Any) -> tuple[sifu.Run, np.ndarray]:
    rng = np.random.default_rng(2)
    x = rng.integers(0, 256, (CLIENTS * SAMPLES, 8, 8, 3), dtype=np.uint8)
    names = np.repeat(np.arange(CLIENTS), SAMPLES)
    np.savez(folder / "own.npz", x=x, y=np.arange(len(x)) % 3, client=names)
    module = f"test_exported_tuned_networks:{factory}"
    sifu.allow_code(module)
    tuned = features.get("tune", "none") != "none"
    spec: dict[str, Any] = {
        "data": {"name": "npz", "file": str(folder / "own.npz"), "partition": "given"},
        "model": {"kind": "ridge"},
        "ridge": {"regularisation": 0.01},
        "features": {"kind": "module", "module": module} | features,
        "local": {"rate": 0.05, "steps": 2},
    }
    if tuned:
        spec["groups"] = {"count": GROUPS, "rounds": 2, "rebuild": "later"}
    return sifu.train(spec, run=folder / "run"), x


def convolutions(path: Path) -> int:
    import onnx

    return sum(node.op_type == "Conv" for node in onnx.load(path).graph.node)


@pytest.mark.parametrize(
    ("features", "networks"),
    [
        ({"tune": "none"}, lambda left: 1),
        ({"tune": "merge"}, lambda left: 1 + (left > 0)),
        # the public network and one network per remaining group
        ({"tune": "blocks", "block": 4}, lambda left: 1 + left),
        ({"tune": "blocks", "block": 4, "trainable": "last"}, lambda left: 1),
    ],
)
def test_a_graph_says_what_predict_says_and_has_frozen_layers_once(
    tmp_path: Path, features: dict[str, Any], networks: Callable[[int], int]
) -> None:
    run, x = trained(tmp_path, **features)
    run.forget(["0"])
    file, model = run.export(tmp_path / "m.onnx"), run.model()
    assert isinstance(model, sifu.LoadedModel)
    fresh = np.random.default_rng(9).integers(0, 256, (5, 8, 8, 3), dtype=np.uint8)
    for samples in (x, fresh, fresh[:1]):
        for answer in answers_of_the_graph(file, {"x": samples}):
            np.testing.assert_allclose(answer["scores"], model.scores(samples), atol=2e-5)
            np.testing.assert_array_equal(answer["prediction"], model.predict(samples))
    description = description_in(file)
    # A secret key draws the groups, so one of them may be empty.
    left = len(description["networks"]["samples"]) if description["networks"] else 0
    assert convolutions(file) == 2 * networks(left)
    assert description["features"]["tune"] == features["tune"]


def test_control_another_groups_network_gives_other_scores(tmp_path: Path) -> None:
    run, x = trained(tmp_path, tune="blocks", block=4)
    before = answers_of_the_graph(run.export(tmp_path / "before.onnx"), {"x": x})
    run.forget(["0"])
    after = answers_of_the_graph(run.export(tmp_path / "after.onnx"), {"x": x})
    assert np.max(np.abs(before[0]["scores"] - after[0]["scores"])) > 1e-4


def test_an_operation_that_is_not_written_is_named(tmp_path: Path) -> None:
    run, _ = trained(tmp_path, "make_bessel", tune="blocks", block=2)
    with pytest.raises(InputError, match="bessel_j0"):
        run.export(tmp_path / "m.onnx")


def test_control_running_statistics_that_a_batch_changes_are_refused() -> None:
    from sifu.export.onnx_graph import _exported

    _exported(nn.BatchNorm1d(3, track_running_stats=False).requires_grad_(False), torch.zeros(2, 3))
    with pytest.raises(InputError, match="keeps running ones"):
        _exported(nn.BatchNorm1d(3).train().requires_grad_(False), torch.zeros(2, 3))


def test_a_graph_is_written_where_a_program_handed_the_clients_over(tmp_path: Path) -> None:
    sifu.allow_code("public_backbone:make")
    generator = np.random.default_rng(2)
    clients = {f"site-{n}": (generator.random((6, 1, 8, 8)), np.arange(6) % 3) for n in range(6)}
    spec = {
        "model": {"kind": "ridge", "outputs": 3},
        "features": {"kind": "module", "module": "public_backbone:make", "tune": "blocks", "block": 4},
        "groups": {"count": 2, "rounds": 1, "rebuild": "later"},
        "local": {"rate": 0.05, "steps": 1},
    }
    run = sifu.train(spec, run=tmp_path / "run", clients=clients)
    samples, model = clients["site-0"][0], run.model()
    assert isinstance(model, sifu.LoadedModel)
    for answer in answers_of_the_graph(run.export(tmp_path / "m.onnx"), {"x": samples}):
        np.testing.assert_allclose(answer["scores"], model.scores(samples), atol=2e-5)
