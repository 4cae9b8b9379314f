"""Work of a device in the order it was handed in, while the host goes on; on a CPU it is done at once.

Nothing that goes through here waits for the device: a copy from ordinary memory would, so everything is copied to or
from pinned memory. Whoever needs a result waits for a `Mark` set behind it, asleep instead of spinning.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Mark(Protocol):
    """A place in a queue."""

    def query(self) -> bool:
        """Whether everything before it is done."""
        ...

    def synchronize(self) -> None:
        """Wait until everything before it is done."""
        ...


class _Done:
    """The mark of a CPU, where everything is done when it is handed in."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class DeviceQueue:
    """A stream of a GPU; queues of one device run beside each other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def here(self) -> Iterator[None]:
        """What this thread asks the device for inside goes into this queue."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def after(self, other: DeviceQueue) -> None:
        """What is handed in from now on waits for what `other` was handed in so far."""
        if self._stream is not None and other._stream is not None:
            self._stream.wait_stream(other._stream)

    def mark(self) -> Mark:
        """A mark behind everything handed in so far."""
        if self._stream is None:
            return _Done()
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def synchronize(self) -> None:
        """Wait until everything handed in so far is done."""
        self.mark().synchronize()

    def upload(self, values: NDArray[np.generic]) -> Tensor:
        """A copy of `values` on the device; call inside `here`."""
        host = torch.from_numpy(np.ascontiguousarray(values))
        return host.clone() if self._stream is None else host.pin_memory().to(self._device, non_blocking=True)

    def download(self, values: Tensor) -> NDArray[Any]:
        """A copy of `values` that is there once a later mark is reached; call inside `here`."""
        if self._stream is None:
            return values.numpy().copy()
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        values.record_stream(self._stream)  # it may have been made in another queue, which must not reuse it yet
        return host.numpy()
