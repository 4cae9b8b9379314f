"""How many threads torch uses for an operation, and long runs of short operations outside Python's lock.

Threads that shared an operation wait for the next one in a busy loop, for milliseconds: welcome where operations follow
each other closely, in the way of other users of those cores.

A pass of a network is a hundred operations of some twenty microseconds each. Between two of them a thread needs
Python's lock, and two threads that train clients side by side lose a fifth to a third of their time to waiting for it.
TorchScript runs a whole method without the lock. It is deprecated and asks for plain code, so nothing depends on it:
where it cannot be used, the same methods run as the Python they are written in, to the same bits.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar, cast

import torch

SMALL_MODEL = 100_000
"""Below this many parameters threads wait for each other longer than they work."""


def few_threads(size: int) -> AbstractContextManager[None]:
    """One thread for a small model, as many as there were for a large one."""
    return nullcontext() if size >= SMALL_MODEL or torch.get_num_threads() == 1 else one_thread()


@contextmanager
def one_thread() -> Iterator[None]:
    """torch's operations by this thread alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


AnyModule = TypeVar("AnyModule", bound=torch.nn.Module)
_one_at_a_time = threading.Lock()


def scripted(module: AnyModule) -> AnyModule:
    """`module` with its exported methods compiled, sharing its tensors; itself where that is not possible.

    Silences all warnings of the process while it compiles, as there is no other way to silence torch's.
    """
    with _one_at_a_time, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return cast("AnyModule", torch.jit.script(module))
        except Exception:  # whatever a later torch may raise, the module works as it is
            return module
