"""Long runs of short torch operations, outside Python's lock.

A pass of a network is a hundred operations of some twenty microseconds each. Between two of them a thread needs
Python's lock, and two threads that train clients side by side lose a fifth to a third of their time to waiting for it.
TorchScript runs a whole method without the lock. It is deprecated and asks for plain code, so nothing depends on it:
where it cannot be used, the same methods run as the Python they are written in, to the same bits.
"""

from __future__ import annotations

import threading
import warnings
from typing import TypeVar, cast

import torch

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
