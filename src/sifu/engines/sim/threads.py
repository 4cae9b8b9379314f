"""Control of torch's thread count, and TorchScript for sequences of short operations.

After an operation, torch's threads wait in a busy loop for the next operation for some milliseconds. This is fast for
operations in quick succession, but slows down other work on the same cores.

A pass of a network consists of a hundred operations of about twenty microseconds each. Between two of them a thread
needs Python's lock, and two threads that train clients in parallel lose a fifth to a third of their time waiting for
it. TorchScript runs a whole method without the lock. It is deprecated and restricts the code it compiles, so it is
optional: without it, the same methods run as Python, with identical results.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar, cast

import torch

SMALL_MODEL = 100_000
"""Number of parameters below which threads would wait for each other longer than they work."""


def few_threads(size: int) -> AbstractContextManager[None]:
    """Return a context in which torch uses one thread if the model is small, and its current number otherwise."""
    return nullcontext() if size >= SMALL_MODEL or torch.get_num_threads() == 1 else one_thread()


@contextmanager
def one_thread() -> Iterator[None]:
    """Restrict torch's operations to one thread inside the `with` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


AnyModule = TypeVar("AnyModule", bound=torch.nn.Module)
_one_at_a_time = threading.Lock()


def scripted(module: AnyModule) -> AnyModule:
    """Return `module` with its exported methods compiled, sharing its tensors, or `module` itself if this fails.

    All warnings of the process are silenced during compilation, because torch's warnings cannot be silenced separately.
    """
    with _one_at_a_time, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return cast("AnyModule", torch.jit.script(module))
        except Exception:  # whatever torch raises, the uncompiled module works
            return module
