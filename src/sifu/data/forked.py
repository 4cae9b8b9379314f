"""Iterators that run in a forked copy of this process, so that they leave no state behind in its memory.

A user's module may keep state in many places: variables of classes and files, caches, hooks, libraries. Whatever it
changes while it computes with clients' data, it changes in the copy, which ends with the computation. The next
computation begins with the memory of this process, which never ran the module on those data (docs/theory.md, section
6.6).
"""

from __future__ import annotations

import contextvars
import ctypes
import fcntl
import gc
import importlib
import io
import logging
import mmap
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, BinaryIO, NoReturn, TypeVar

from sifu.data.process_settings import restore, settings
from sifu.data.users_code import is_users
from sifu.errors import InputError, SifuError, SifuWarning

T = TypeVar("T")
IDLE = 60.0
"""Seconds without computation after which a copy warns that the module may wait forever."""
_WAITS = (
    f"your module has computed nothing for {IDLE:g} seconds. If it waits for threads that this program started before, "
    "such as a pool: modules run in copies of this process, where they do not exist. Interrupt (Ctrl-C), and let the "
    "module start its own threads"
)
MAP_FIXED = 0x10
"""Flag of mmap, on Linux, that replaces what lies at an address."""


class LostProcessError(SifuError):
    """Error for a forked process that ended before its work was done, for example because memory ran out."""


def forked(work: Callable[[], Iterator[T]]) -> Iterator[T]:
    """Yield the items of the iterator that `work` returns, which runs in a forked copy of this process.

    Items travel as pickles. The copy shows its own warnings: Python would keep their messages in this process.
    Exceptions appear in this process; one whose class is a user's becomes a `RuntimeError`, because loading it would
    run the user's code here. The copy has the settings of this thread (`process_settings`), and none of its open files.
    Memory that processes share is private in it. It is killed if the caller stops early, and ends within a second of
    this process.

    Args:
        work: Function whose iterator runs in the copy.

    Raises:
        LostProcessError: If the copy ends early.
    """
    importlib.import_module("torch._dynamo")  # otherwise the first optimizer of every copy imports it, for seconds
    receive, send = os.pipe()
    child, ended = 0, False
    with os.fdopen(receive, "rb") as stream:
        try:
            _flush_output()  # otherwise the copy would print the buffered output again
            held, parent = settings(), os.getpid()
            with _blocked_signals() as mask:
                try:
                    child = _fork()
                    if child == 0:
                        _run_and_exit(work, parent, held, send, mask)
                finally:
                    os.close(send)
            yield from _received(stream)
            ended = True
        finally:
            if child and not ended:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            if child:
                with suppress(ChildProcessError):
                    os.waitpid(child, 0)


def in_this_process(work: Callable[[], Iterator[T]]) -> Iterator[T]:
    """Return the iterator of `work`, which runs in this process; for code that is sifu's own, instead of `forked`."""
    return work()


@contextmanager
def _blocked_signals() -> Iterator[set[signal.Signals]]:
    """Block signals in this thread: in a copy just made, a handler that raises would run the caller's cleaning up."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield before  # type: ignore[misc]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
        return os.fork()


class _Unpickler(pickle.Unpickler):
    """Unpickler that refuses users' classes and functions."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle names."""
        if is_users(module):
            raise InputError(f"{module}.{name} is a user's: a module's results must be plain tensors")
        return super().find_class(module, name)


def _received(stream: BinaryIO) -> Iterator[Any]:
    """Yield the items that a forked process sends; raise its exception."""
    while True:
        try:
            kind, value = _Unpickler(stream).load()
        except (EOFError, pickle.UnpicklingError):
            raise LostProcessError(
                "the process that computed with the module ended early: it was killed, for example because memory ran "
                "out, or the module ended it"
            ) from None
        if kind == "item":
            yield value
        elif kind == "error":
            raise value
        else:
            return


def _run_and_exit(
    work: Callable[[], Iterator[Any]], parent: int, held: tuple[Any, ...], send: int, mask: set[signal.Signals]
) -> NoReturn:
    """Send the items that `work` yields, and end this process without running the parent's cleanup.

    `work` runs in a thread of its own, because OpenMP's threads do not exist in the copy: the thread that forked would
    wait for them forever, and a new thread begins with new ones.
    """
    code = 1
    try:
        gc.freeze()  # the parent's objects, such as open databases, must not be finalised here
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the parent reacts, and ends this process
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        logging.raiseExceptions = False  # handlers may write to files that are not open here
        _detach_shared_memory()
        _detach_files(send)
        # A process that the module starts and leaves behind must not keep the parent waiting for items.
        os.register_at_fork(after_in_child=partial(os.closerange, send, send + 1))
        context = contextvars.copy_context()
        with os.fdopen(send, "wb") as stream:
            worker = threading.Thread(target=context.run, args=(_send_all, work, held, stream))
            worker.start()
            since, used, warned = time.monotonic(), time.process_time(), False
            while worker.is_alive():
                worker.join(timeout=1.0)
                if os.getppid() != parent:  # the parent was killed
                    os._exit(1)
                if time.process_time() - used > IDLE / 100.0:
                    since, used = time.monotonic(), time.process_time()
                elif not warned and time.monotonic() - since > IDLE:
                    warned = True
                    warnings.warn(_WAITS, SifuWarning, stacklevel=2)
        _flush_output()
        code = 0
    finally:
        os._exit(code)


def _detach_files(kept: int) -> None:
    """Detach inherited files, except standard output: a lock of the run is released only when no process holds it.

    Their numbers stay taken: a file opened under such a number would receive what is meant for the inherited one.
    Output to a file that is open for writing only, such as a log, is discarded; every other use fails.
    """
    places = {0, 1, 2, kept}
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            places.add(stream.fileno())
    discards, fails = os.open(os.devnull, os.O_WRONLY), os.open(os.sep, os.O_RDONLY)
    for file in {int(name) for name in os.listdir("/dev/fd")} - places:
        with suppress(OSError):  # the listing includes the directory itself, which is closed by now
            only_writes = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
            os.dup2(discards if only_writes else fails, file, inheritable=False)


def _detach_shared_memory() -> None:
    """Replace memory that this process shares with its parent by a private copy; on Linux, where it can be listed."""
    with suppress(FileNotFoundError), open("/proc/self/maps", encoding="utf-8", errors="replace") as listed:
        shared = [line.split(maxsplit=5) for line in listed if line.split(maxsplit=2)[1].startswith("rw-s")]
        for addresses, _, _, _, _, *name in shared:
            if name and name[0].startswith("/dev/") and not name[0].startswith(("/dev/shm/", "/dev/zero")):
                continue  # a device
            start, end = (int(address, 16) for address in addresses.split("-"))
            content = ctypes.string_at(start, end - start)
            place = ctypes.CDLL(None, use_errno=True).mmap
            place.restype, place.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 4]
            both, private = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
            if place(start, end - start, both, private, -1, 0) != start:
                raise OSError(ctypes.get_errno(), "shared memory cannot be replaced by a private copy")
            ctypes.memmove(start, content, len(content))


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a program may have replaced the streams
            stream.flush()


def _send_all(work: Callable[[], Iterator[Any]], held: tuple[Any, ...], stream: BinaryIO) -> None:
    def send(kind: str, value: Any) -> None:
        pickle.dump((kind, value), stream, protocol=5)
        stream.flush()

    try:
        restore(held)  # some settings are local to a thread
        for item in work():
            send("item", item)
        send("end", None)
    except BaseException as error:
        with suppress(BrokenPipeError):  # the parent has stopped reading
            send("error", _portable(error))


def _portable(error: BaseException) -> Exception:
    """Return an exception that can be sent, with the traceback as a note."""
    try:
        text = str(error)
    except Exception:
        text = "without a message that can be read"
    sent: Exception = RuntimeError(f"{type(error).__name__}: {text}")
    if "Autograd-and-Fork" in text:  # torch started threads for the GPU, which do not exist in the copy
        sent = InputError(
            "your module trains in copies of this process, in which torch cannot compute gradients, because this "
            "process has computed gradients before and sees a GPU: use a new process with device cpu, or hide the GPU "
            "(CUDA_VISIBLE_DEVICES=)"
        )
    elif isinstance(error, Exception) and _is_portable(error):  # SystemExit would end the parent as if it had succeeded
        sent = error
    with suppress(Exception):
        sent.add_note("".join(traceback.format_exception(error)))
    return sent


def _is_portable(error: Exception) -> bool:
    """Return whether an exception arrives unchanged as a pickle that names nothing of a user's."""
    try:
        copied = _Unpickler(io.BytesIO(pickle.dumps(error))).load()
        return type(copied) is type(error) and str(copied) == str(error)
    except Exception:
        return False
