"""One writer at a time, by a lock that the kernel lets go when the process ends; Ctrl-C cuts no commit in two."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

from sifu.errors import RunBusyError

LOCK_FILE = "lock"


class WriterLock:
    """Held from construction to `release`; a second writer is refused at once with a sentence."""

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            _take(self._descriptor)
        except OSError as error:
            holder = os.read(self._descriptor, 32).decode(errors="replace").strip() or "unknown"
            self.release()
            raise RunBusyError(
                f"{path.parent} is in use by another process (pid {holder}): wait for it, or stop it; "
                "nothing was changed"
            ) from error
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, str(os.getpid()).encode())

    def release(self) -> None:
        """Let go of the lock; calling it twice is harmless."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> WriterLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _take(descriptor: int) -> None:
    """Take the lock; a reader that only asks (`is_locked`) holds it for an instant, so one refusal is not enough."""
    for attempt in range(5):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError:
            if attempt == 4:
                raise
            time.sleep(0.02)


def is_locked(folder: Path) -> bool:
    """Whether a writer holds the lock of a run right now."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C until the block is done, so that a commit is never cut in two.

    Blocking the signal would not do: the kernel hands it to any other thread, and torch has some.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held and callable(before):
            before(*held[0])
