"""How many threads torch uses for an operation, for a while.

Threads that shared an operation wait for the next one in a busy loop, for milliseconds (`benchmarks/conv_steps.py`
measures it): welcome where operations follow each other closely, in the way of whoever else would use those cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

SMALL_MODEL = 100_000
"""Below this many parameters threads wait for each other longer than they work."""


def few_threads(size: int, small: int = SMALL_MODEL) -> AbstractContextManager[None]:
    """One thread for a small model, as many as there were for a large one (or for other work of a `size`)."""
    return nullcontext() if size >= small or torch.get_num_threads() == 1 else one_thread()


@contextmanager
def one_thread() -> Iterator[None]:
    """torch's operations by this thread alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
