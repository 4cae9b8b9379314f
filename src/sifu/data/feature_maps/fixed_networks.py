"""Feature maps of networks with fixed weights.

The digest of a map includes the names of its network's classes and of their Python modules.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sifu.data.feature_maps.deep_network import DeepNetwork
from sifu.data.feature_maps.feature_map import SAME_FEATURES, FeatureMap, Floats, check_norm
from sifu.data.own_modules import fixed_algorithms, fixed_generators, fresh_copy, is_known
from sifu.errors import InputError, UnusableSamplesError

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

        `integers` is True to keep samples as integers. By default they are kept if the module accepts only integers, or
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

    >>> _would_be_rounded(np.array([2048]), torch.float16), _would_be_rounded(np.array([2049]), torch.float16)
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
        # numpy knows no other floating-point type of two bytes than float16
        unknown = plain.dtype.is_floating_point and plain.element_size() == 2 and plain.dtype != torch.float16
        array = (plain.view(torch.int16) if unknown else plain).numpy()
        kind = str(plain.dtype).removeprefix("torch.") if unknown else array.dtype.str
        hashed.update(f"{name} {kind} {array.shape}\n".encode())
        hashed.update(array.tobytes())
    return hashed.hexdigest()
