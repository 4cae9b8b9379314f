"""Purges in a child process that kills itself at a step; every change of a file or the database is a step."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sifu
from sifu.store import files, writer

STEPS = ("scrub_database", "apply_change", "remember_head")


def purge_killed_at(folder: Path, step: int) -> int | None:
    """Purge in a child that kills itself at step `step`; return the number of steps if it finished."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, str(_purge(folder, step)).encode())
        finally:
            os._exit(0)  # skip pytest's exit handlers in the child
    os.close(writing)
    with os.fdopen(reading) as answer:
        steps = answer.read()
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) == -signal.SIGKILL:
        return None
    return int(steps)  # int() fails if the purge failed


def _purge(folder: Path, killed_at: int) -> int:
    """Purge, and kill this process at step `killed_at`."""
    steps, last = itertools.count(1), 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal last
            last = next(steps)
            if last == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)

        return call

    for name in STEPS:
        setattr(writer, name, counted(getattr(writer, name)))
    files.sync_folder = counted(files.sync_folder)
    files.write_atomically = counted(files.write_atomically)
    Path.unlink = counted(Path.unlink)  # type: ignore[method-assign]
    sifu.open_run(folder).purge()
    return last
