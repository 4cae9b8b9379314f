"""Iterators in forked processes: their results arrive, and nothing else of them stays."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sifu.data.forked import LostProcessError, forked
from sifu.errors import InputError, RunBusyError, SifuWarning
from sifu.store.files import WriterLock

HELD: list[int] = []


def counted(items: int) -> Iterator[tuple[int, int]]:
    """Yield numbers and the identity of the process, and remember the numbers."""
    for item in range(items):
        HELD.append(item)
        torch.manual_seed(item)
        yield item, os.getpid()


def test_items_arrive_in_order_and_no_state_stays() -> None:
    before = torch.get_rng_state()
    found = list(forked(lambda: counted(5)))
    assert [item for item, _ in found] == list(range(5))
    assert {process for _, process in found}.isdisjoint({os.getpid()})
    assert HELD == []
    assert torch.equal(torch.get_rng_state(), before)


def test_arrays_keep_their_bits() -> None:
    array = np.random.default_rng(0).random((300, 400))
    (found,) = forked(lambda: iter([array]))
    assert found.tobytes() == array.tobytes()


@pytest.mark.parametrize("error", [InputError("no"), ValueError("wrong"), KeyError("k")], ids=repr)
def test_errors_keep_their_type_and_their_message(error: Exception) -> None:
    def fails() -> Iterator[int]:
        yield 1
        raise error

    with pytest.raises(type(error)) as caught:
        list(forked(fails))
    assert str(caught.value) == str(error)
    assert "in fails" in caught.value.__notes__[0]


def test_errors_that_cannot_be_pickled_name_their_type() -> None:
    class LocalError(Exception):
        pass

    def fails() -> Iterator[int]:
        yield 1
        raise LocalError("wrong")

    with pytest.raises(RuntimeError, match="LocalError: wrong"):
        list(forked(fails))


def test_warnings_are_shown_by_the_copy(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A network could otherwise store a client's numbers in this process, as the text of a warning."""

    def show(message: Warning | str, *rest: Any) -> None:
        HELD.append(1)
        print("shown:", message)

    def warns() -> Iterator[int]:
        warnings.warn("look", SifuWarning, stacklevel=1)
        yield 1

    monkeypatch.setattr(warnings, "showwarning", show)
    assert list(forked(warns)) == [1]
    assert capfd.readouterr().out == "shown: look\n"
    assert HELD == []
    assert not any("look" in str(vars(file).get("__warningregistry__", "")) for file in list(sys.modules.values()))


def test_a_copy_that_waits_for_a_pool_of_the_caller_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sifu.data.forked.IDLE", 1.0)
    monkeypatch.setattr(warnings, "showwarning", lambda message, *rest: print("shown:", message))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()

        def work() -> Iterator[bool]:
            with suppress(TimeoutError):
                pool.submit(int).result(timeout=6.0)
                yield False
            yield True

        assert list(forked(work)) == [True]
    assert capfd.readouterr().out.count("shown: your module has computed nothing") == 1, "one warning per copy"


def test_a_killed_process_is_an_error() -> None:
    def dies() -> Iterator[int]:
        yield 1
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(LostProcessError, match="ended early"):
        list(forked(dies))


def test_a_process_ends_with_its_iterator() -> None:
    def endless() -> Iterator[int]:
        while True:
            yield os.getpid()

    found = forked(endless)
    process = next(found)
    found.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_torch_computes_with_several_threads() -> None:
    """OpenMP's threads do not survive a fork; the results have the bits of this process."""

    def product() -> Iterator[Any]:
        torch.manual_seed(0)
        x = torch.randn(400, 400, requires_grad=True)
        (x @ x).sum().backward()
        assert x.grad is not None
        yield torch.get_num_threads(), x.grad.numpy()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        (here,) = product()
        (there,) = forked(product)
    finally:
        torch.set_num_threads(before)
    assert here[0] == there[0] == 2
    np.testing.assert_array_equal(here[1], there[1])


def test_gradients_that_torch_cannot_compute_in_a_copy_are_explained() -> None:
    def work() -> Iterator[int]:
        raise RuntimeError(
            "Unable to handle autograd's threading in combination with fork-based multiprocessing. See "
            "https://github.com/pytorch/pytorch/wiki/Autograd-and-Fork"
        )
        yield 0

    with pytest.raises(InputError, match="use a new process with device cpu"):
        list(forked(work))


def test_settings_of_a_thread_are_those_of_the_caller() -> None:
    with torch.no_grad(), np.errstate(over="ignore"):
        assert list(forked(lambda: iter([(torch.is_grad_enabled(), np.geterr()["over"])]))) == [(False, "ignore")]


def test_a_process_left_behind_holds_no_lock(tmp_path: Path) -> None:
    """A command that is killed leaves its forked process; the next command need not wait for it."""

    def long() -> Iterator[int]:
        yield os.getpid()
        time.sleep(30)

    lock = WriterLock(tmp_path / "lock")
    found = forked(long)
    next(found)
    lock.release()
    WriterLock(tmp_path / "lock").release()
    found.close()


def test_control_a_lock_is_held(tmp_path: Path) -> None:
    with WriterLock(tmp_path / "lock"), pytest.raises(RunBusyError):
        WriterLock(tmp_path / "lock")


def test_output_appears_once(capfd: pytest.CaptureFixture[str]) -> None:
    def prints() -> Iterator[int]:
        print("inside")
        yield 1

    print("before", end=" ")
    list(forked(prints))
    assert capfd.readouterr().out == "before inside\n"


class NotingError(ValueError):
    """Exception that remembers its text where it is made."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        HELD.append(len(text))


class SpeechlessError(Exception):
    """Exception without a text."""

    def __str__(self) -> str:
        raise ValueError


@pytest.fixture(autouse=True)
def _nothing_held() -> Iterator[None]:
    yield
    HELD.clear()


def raises(error: BaseException) -> Iterator[int]:
    yield 1
    raise error


def test_loading_an_error_runs_no_code_of_a_user() -> None:
    with pytest.raises(RuntimeError, match="NotingError: noted") as caught:
        list(forked(lambda: raises(NotingError("noted"))))
    assert "in raises" in caught.value.__notes__[0]
    assert HELD == []


@pytest.mark.parametrize("error", [SystemExit(0), SpeechlessError()], ids=["exit", "speechless"])
def test_exits_and_errors_without_a_text_are_errors(error: BaseException) -> None:
    with pytest.raises(RuntimeError, match=type(error).__name__):
        list(forked(lambda: raises(error)))


def test_a_broken_pipe_of_the_module_is_its_error() -> None:
    with pytest.raises(BrokenPipeError, match="of a tool"):
        list(forked(lambda: raises(BrokenPipeError("of a tool"))))


def test_a_process_killed_while_it_sends_is_an_error() -> None:
    found = forked(lambda: iter([os.getpid(), bytes(2**22)]))
    process = next(found)
    time.sleep(0.5)  # the second item is larger than what a pipe holds
    os.kill(process, signal.SIGKILL)
    with pytest.raises(LostProcessError, match="ended early"):
        next(found)


def test_a_process_left_by_the_module_keeps_nobody_waiting(tmp_path: Path) -> None:
    def leaves() -> Iterator[int]:
        left = os.fork()
        if left == 0:
            time.sleep(10)
            (tmp_path / "ended").touch()
            os._exit(0)
        yield left
        os.kill(os.getpid(), signal.SIGKILL)

    found = forked(leaves)
    left = next(found)
    with pytest.raises(LostProcessError):
        next(found)
    assert not (tmp_path / "ended").exists()
    os.kill(left, signal.SIGKILL)


def test_an_interrupted_copy_does_not_go_on_as_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches the copy, too; at its first instruction it would unwind the stack of the caller."""
    here, fork = os.getpid(), os.fork

    def interrupted() -> int:
        child = fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return child

    monkeypatch.setattr(os, "fork", interrupted)
    try:
        assert list(forked(lambda: iter([1]))) == [1]
    finally:
        if os.getpid() != here:
            (tmp_path / "went on").touch()
            os._exit(1)
    assert not (tmp_path / "went on").exists()


@pytest.mark.parametrize("mode", ["w", "r+"])
def test_a_file_of_the_caller_does_not_write_to_files_of_the_copy(mode: str, tmp_path: Path) -> None:
    (tmp_path / "callers").touch()

    def writes() -> Iterator[int]:
        opened = [(tmp_path / f"new-{number}").open("w") for number in range(30)]
        with suppress(OSError):
            callers.write("of the caller")
            callers.flush()
        for file in opened:
            file.close()
        yield 1

    with (tmp_path / "callers").open(mode) as callers:
        list(forked(writes))
    assert [file.name for file in tmp_path.iterdir() if file.stat().st_size] == []


def test_no_files_and_no_processes_stay() -> None:
    before = sorted(os.listdir("/dev/fd"))
    for _ in range(5):
        list(forked(lambda: counted(2)))
        next(forked(lambda: counted(2)))
    assert sorted(os.listdir("/dev/fd")) == before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


SHARED = {
    "mapped memory": lambda: memoryview(mmap.mmap(-1, 8)),
    "a tensor": lambda: torch.zeros(8, dtype=torch.uint8).share_memory_().numpy(),
    "a value of multiprocessing": lambda: memoryview(multiprocessing.RawArray("B", 8)).cast("B"),
}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not list a process's memory")
@pytest.mark.parametrize("what", SHARED)
def test_memory_shared_between_processes_is_private_in_the_copy(what: str) -> None:
    held = SHARED[what]()
    held[0] = 3

    def work() -> Iterator[int]:
        held[0] = held[0] + 4
        yield int(held[0])

    assert list(forked(work)) == [7]
    assert held[0] == 3
    child = os.fork()
    if child == 0:  # control: an ordinary copy shares it
        held[0] = 9
        os._exit(0)
    os.waitpid(child, 0)
    assert held[0] == 9
