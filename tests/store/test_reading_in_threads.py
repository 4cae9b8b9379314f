"""Many threads that read participations at once: each gets all of them."""

from __future__ import annotations

import threading
from pathlib import Path

import sifu
from sifu.store.reader import RunReader


def test_threads_read_the_same_rows(trained_run: Path) -> None:
    sizes: list[int] = []

    def read() -> None:
        reader = RunReader(trained_run)
        try:
            sizes.append(reader.participation().nodes.size)
        finally:
            reader.close()

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sizes) == 4
    assert len(set(sizes)) == 1
    assert sizes[0] > 0


def test_a_view_keeps_its_reader_while_another_thread_looks(trained_run: Path) -> None:
    run = sifu.open_run(trained_run)
    with run.reader() as open_throughout:  # keeps the database files open
        open_throughout.requests()
        _look_twice_at_once(run)


def _look_twice_at_once(run: sifu.Run) -> None:
    with run.view() as kept:
        pass

    def look() -> None:
        with run.view() as other:
            others.append((other is view, len(other.reader.requests())))

    others: list[tuple[bool, int]] = []
    with run.view() as view:
        assert view is kept  # the computed view is reused
        reader, thread = view.reader, threading.Thread(target=look)
        thread.start()
        thread.join()
        assert view.reader is reader
        assert others == [(False, len(view.reader.requests()))]
