"""Features through a network with fixed public weights: a module of the user's, or a pretrained one from a package.

The network's weights must not come from the clients' data; that is for the operator to declare, and the digest of the
weights says which network it was. Samples go through in batches of one fixed size, padded with zeros, on one thread, so
that on one machine a sample's features do not depend on the samples next to it. They do depend on the machine and
on torch's version: such a map is not `exact`, and a certificate speaks of the statistics that were sent.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sifu.data.feature_maps.feature_map import FeatureMap, Floats, Progress, check_norm
from sifu.errors import InputError, UnusableSamplesError

if TYPE_CHECKING:
    import torch

BATCH = 32
SAME_FEATURES = 1e-3
"""Features of one sample differ by at most this, relative to the largest: by far more than by rounding."""


@dataclass(frozen=True, eq=False)
class NetworkFeatures(FeatureMap):
    """The flattened output of `module` for inputs of a `shape`, every sample scaled to length `norm`."""

    module: torch.nn.Module
    shape: tuple[int, ...]
    norm: float = 10.0
    kind: str = "module"
    device: str = "cpu"
    source: str = ""
    """Digest of the program text that made the module, where it is known."""
    exact: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        check_norm(self.norm)
        # In training mode batch norm would mix samples, and dropout would draw again.
        self.module.eval().requires_grad_(False).to(self.device)
        object.__setattr__(self, "_weights", weights_digest(self.module))
        object.__setattr__(self, "features", self._batch(np.zeros((1, *self.shape))).shape[1])
        if self.kind == "module":
            self._check_samples_stay_apart()

    def on(self, device: str) -> NetworkFeatures:
        """The same map computed on another device."""
        return replace(self, device=device)

    def settings(self) -> dict[str, Any]:
        """The shape and the names of the classes of the network's parts."""
        parts = [
            f"{name}:{type(part).__module__}.{type(part).__qualname__}" for name, part in self.module.named_modules()
        ]
        return {"shape": list(self.shape), "modules": parts} | ({"source": self.source} if self.source else {})

    def constants(self) -> Iterator[bytes]:
        """The digest of the weights, as they are now: a module that changed has another digest."""
        yield weights_digest(self.module).encode()

    def __call__(self, x: NDArray[Any]) -> Floats:
        """Features of samples of `shape`; bytes become 255ths."""
        if self.module.training or weights_digest(self.module) != self._weights:
            raise InputError("the feature module changed since the run began: load it again with the recorded weights")
        samples = np.asarray(x)
        if samples.shape[1:] != self.shape:
            raise UnusableSamplesError(
                f"samples have shape {samples.shape[1:]}; this feature map was made for {self.shape}"
            )
        if samples.dtype == np.uint8:
            samples = samples / 255.0
        outputs = [self._batch(samples[start : start + BATCH]) for start in range(0, len(samples), BATCH)]
        rows = np.concatenate(outputs) if outputs else np.zeros((0, self.features))
        if not np.all(np.isfinite(rows)):
            raise InputError("the feature module gave NaN or infinity")
        # fsum is rounded once, whatever the order.
        lengths = np.array([math.sqrt(math.fsum(row * row)) for row in rows]).reshape(-1, 1)
        return np.divide(rows * self.norm, lengths, out=np.zeros_like(rows), where=lengths > 0.0)

    def chunks(self, x: NDArray[Any], progress: Progress | None = None) -> Iterator[tuple[slice, Floats]]:
        """Features of a client's samples; a module of the user's is probed again when all of them went through."""
        yield from super().chunks(x, progress)
        if self.kind == "module":
            self._check_nothing_is_remembered()

    def _check_samples_stay_apart(self) -> None:
        """Refuse a module whose features of a sample follow from other samples: statistics would hold those, too.

        A sample next to another one, alone, and again after a third must have the same features to rounding.
        """
        probes = self._probes()
        together, alone = self._batch(probes[:2]), self._batch(probes[:1])
        self._batch(probes[2:])
        again = self._batch(probes[:2])
        allowed = SAME_FEATURES * float(np.max(np.abs(together), initial=0.0))
        if np.max(np.abs(together[:1] - alone)) > allowed or np.max(np.abs(together - again)) > allowed:
            raise InputError(
                "the feature module gives a sample other features next to other samples or after them: it must look at "
                "each sample separately, without statistics over a batch, memory or randomness"
            )
        object.__setattr__(self, "_probed", together)

    def _check_nothing_is_remembered(self) -> None:
        """Refuse a module that gives the probes other features than at first: it changed while clients went through.

        On the CPU they must have the same bits; a GPU may sum in another order.
        """
        first, now = self._probed, self._batch(self._probes()[:2])
        allowed = 0.0 if self.device == "cpu" else SAME_FEATURES * float(np.max(np.abs(first), initial=0.0))
        if not np.allclose(now, first, rtol=0.0, atol=allowed, equal_nan=True):
            raise InputError(
                f"the feature module gives the same samples other features than at first (they differ by up to "
                f"{np.max(np.abs(now - first)):.3g}): it has memory or draws numbers, so its features may hold other "
                "clients' data. Make its output depend on the sample alone, and train again"
            )

    def _probes(self) -> Floats:
        """Three samples, always the same."""
        return np.random.default_rng(0).random((3, *self.shape))

    def _batch(self, samples: NDArray[Any]) -> Floats:
        """At most BATCH samples, padded to BATCH."""
        import torch

        kind = next((weight.dtype for weight in self.module.parameters()), torch.float32)
        padded = np.zeros((BATCH, *self.shape))
        padded[: len(samples)] = samples
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with torch.no_grad():
                output = self.module(torch.as_tensor(padded).to(self.device, kind))
        finally:
            torch.set_num_threads(before)
        if not isinstance(output, torch.Tensor) or output.ndim < 2 or output.shape[0] != BATCH:
            raise InputError("the feature module must give a row of numbers for each sample")
        return output.reshape(BATCH, -1)[: len(samples)].double().cpu().numpy()


def weights_digest(module: torch.nn.Module) -> str:
    """SHA-256 of every parameter and buffer: name, type, shape and bytes, in order of their names."""
    hashed = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        array = tensor.detach().cpu().contiguous().numpy()
        hashed.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        hashed.update(array.tobytes())
    return hashed.hexdigest()
