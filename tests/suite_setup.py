"""Setup of every suite before its first test: Triton's interpreter, Ctrl-C, repeatable properties, runs in memory."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

if os.environ.get("SIFU_TEST_GPU"):
    import torch

    if not torch.cuda.is_available():
        pytest.exit("these tests need a GPU, and torch finds none", returncode=4)
else:
    # Only `make test-gpu` uses a GPU: if torch sees one, users' modules cannot train in copies of a process that has
    # computed gradients. Otherwise kernels run in Triton's interpreter, which must be set before triton is imported.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("TRITON_INTERPRET", "1")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # `make test &` in a script starts the tests with Ctrl-C ignored, and children inherit that; some tests press it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

from hypothesis import HealthCheck, settings


def examples(most: int) -> int:
    """Return the number of examples of a property: a fifth of `most`, or all of them with SIFU_EXAMPLES=all."""
    return most if os.environ.get("SIFU_EXAMPLES") == "all" else max(10, most // 5)


# Property tests see the same examples on every run, with no deadline on a shared machine.
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=examples(45),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")

# The real memory of heads is never touched, and tests copy and forge runs: only tests of the memory have one.
os.environ["SIFU_HEADS"] = os.devnull

MEMORY = Path("/dev/shm")
ROOM = 1 << 30
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= ROOM:
    # A run syncs at every event, some fifty times per request; no test run needs to survive the machine.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
