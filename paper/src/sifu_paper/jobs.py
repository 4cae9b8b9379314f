"""Experiments in several processes: each has a data set, some seeds and a folder; the rows are gathered into one table.

A part is an ordinary experiment that can be interrupted and continued. Its rows are added to the whole table when it
ends; rows that the whole table already has are not measured again.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from sifu import InputError
from sifu_paper.engines import Failure
from sifu_paper.options import Options
from sifu_paper.runner import TABLE, Bench, Result, Update
from sifu_paper.table import Table, read_table

PARTS = "parts"
_POLL = 0.5


@dataclass(frozen=True)
class Part:
    """One data set with some of the seeds."""

    options: Options

    @property
    def name(self) -> str:
        """Name of its folder."""
        return self.options.out.name


@dataclass(frozen=True)
class Message:
    """Report of a part's process: its progress, or its result."""

    part: str
    update: Update | None = None
    notes: tuple[str, ...] = ()
    failures: tuple[Failure[Any], ...] = ()


def run_in_processes(
    options: Options,
    jobs: int,
    report: Callable[[Update], None] | None = None,
    announce: Callable[[str], None] | None = None,
) -> Result:
    """Run the experiment with `jobs` processes at a time; the rows are the same as in one process."""
    if jobs < 1:
        raise InputError(f"--jobs must be at least 1, found {jobs}")
    bench = Bench(options, report, announce)
    shares = shared_out(options.seeds, len(bench.datasets), jobs, bench.device)
    parts = [
        Part(replace(options, datasets=(dataset,), seeds=seeds, out=options.out / PARTS / f"{dataset}-{_name(seeds)}"))
        for dataset in bench.datasets
        for seeds in shares
    ]
    result = bench.open()
    if bench.experiment.kind == "requests":
        bench.check_room(result.table, shares, jobs, PARTS)
    _Gathering(bench, parts, jobs, result).run()
    if not result.failures:
        shutil.rmtree(options.out / PARTS, ignore_errors=True)
    bench.write_failures(result)
    return result


def shared_out(seeds: Sequence[int], datasets: int, jobs: int, device: str) -> list[tuple[int, ...]]:
    """Return the seeds of each part of a data set: one on a CPU, and on a GPU as many as keep every process busy.

    On a GPU the seeds of a part are lanes of one program, which is faster than separate programs.

    >>> shared_out([1, 2, 3], 5, 4, "cpu"), shared_out(range(1, 7), 5, 10, "cuda")
    ([(1,), (2,), (3,)], [(1, 2, 3), (4, 5, 6)])

    """
    together = -(-len(seeds) * datasets // jobs) if device == "cuda" else 1
    parts = -(-len(seeds) // together)
    return [tuple(share.tolist()) for share in np.array_split(np.asarray(seeds), parts)]


def _name(seeds: Sequence[int]) -> str:
    return "seed" + "_".join(map(str, seeds))


class _Gathering:
    """Runner of parts in processes, which collects their messages and rows."""

    def __init__(self, bench: Bench, parts: list[Part], jobs: int, result: Result) -> None:
        self._bench, self._parts, self._jobs, self._result = bench, parts, jobs, result
        # A process forked from one with threads and a GPU may hang; a spawned one does not.
        self._context = multiprocessing.get_context("spawn")
        self._queue: Any = self._context.Queue()
        self._stood: dict[str, Update] = {}
        self._running: dict[str, BaseProcess] = {}
        self._ended: set[str] = set()

    def run(self) -> None:
        """Run all parts; an interrupt stops running parts and keeps their rows."""
        waiting = list(self._parts)
        try:
            while waiting or self._running:
                while waiting and len(self._running) < self._jobs:
                    self._start(waiting.pop(0))
                for message in self._messages():
                    self._hear(message)
                self._reap()
        except KeyboardInterrupt:
            for process in self._running.values():
                if process.pid is not None and process.is_alive():
                    os.kill(process.pid, signal.SIGUSR1)
            for process in self._running.values():
                process.join()
            raise
        finally:
            for part in self._parts:
                self._gather(part)

    def _start(self, part: Part) -> None:
        own = part.options
        own.out.mkdir(parents=True, exist_ok=True)
        done = Table(own.out / TABLE, self._result.table.columns)
        for row in self._result.table.rows:
            if row["dataset"] in own.datasets and row["seed"] in own.seeds:
                done.add(row)
        process = self._context.Process(target=_run_part, args=(part, self._jobs, self._queue), name=part.name)
        process.start()
        self._running[part.name] = process

    def _messages(self) -> Iterator[Message]:
        """Yield every received message; wait briefly if there is none."""
        try:
            yield self._queue.get(timeout=_POLL)
            while True:
                yield self._queue.get_nowait()
        except queue.Empty:
            return

    def _hear(self, message: Message) -> None:
        if message.update is None:
            self._ended.add(message.part)
            self._result.notes += [note for note in message.notes if note not in self._result.notes]
            self._result.failures += message.failures
            return
        self._stood[message.part] = message.update
        counted = [standing for standing in self._stood.values() if standing.total]
        # Parts without a report yet are assumed to be as long as the others.
        total = round(sum(standing.total for standing in counted) * len(self._parts) / len(counted)) if counted else 0
        self._bench.report(
            replace(message.update, done=sum(standing.done for standing in self._stood.values()), total=total)
        )

    def _reap(self) -> None:
        for part in [part for part in self._parts if part.name in self._running]:
            process = self._running[part.name]
            if process.is_alive():
                continue
            process.join()
            for message in self._messages():  # its last messages may still be in the queue
                self._hear(message)
            if part.name not in self._ended:
                text = f"its process ended with exit code {process.exitcode}; run the same command again to continue"
                self._result.failures.append(Failure(part, text, text))
            self._gather(part)
            del self._running[part.name]

    def _gather(self, part: Part) -> None:
        path = part.options.out / TABLE
        if path.exists():
            for row in read_table(path):
                self._result.table.add(row)


def _run_part(part: Part, jobs: int, messages: Any) -> None:
    """Run a part in its process. The parent passes Ctrl-C on once, so that the process can end properly."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, _interrupt)
    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))
    try:
        result = Bench(part.options, lambda update: messages.put(Message(part.name, update))).run()
    except KeyboardInterrupt:
        return
    except Exception as error:
        messages.put(Message(part.name, None, (), (Failure.of(part, error),)))
        return
    messages.put(Message(part.name, None, tuple(result.notes), tuple(result.failures)))


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
