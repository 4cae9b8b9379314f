"""Access to a run folder for reading, writing and training, which `sifu.Run` extends."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sifu.checking.integrity import blaming_damage, check_integrity
from sifu.core.engine import Engine
from sifu.core.round import NormalSource
from sifu.core.spec import Spec
from sifu.errors import InputError, RunBusyError
from sifu.requests.messages import ingest
from sifu.run.clients_and_engine import executed_elsewhere
from sifu.run.coupled_replay import EngineWithout
from sifu.run.run_engines import MakeEngine, RunEngines
from sifu.run.run_view import RunView
from sifu.store.database import DATABASE, Memory
from sifu.store.files import is_locked
from sifu.store.inbox import INBOX
from sifu.store.last_failure import FAILURE_FILE
from sifu.store.reader import NOISE_GIVEN, RunReader, readable
from sifu.store.seen_heads import check_seen
from sifu.store.writer import RunWriter


class RunFolder:
    """A run folder and, if training is needed, its engine, which by default is built as the spec says."""

    def __init__(
        self,
        folder: str | Path,
        make_engine: MakeEngine | None = None,
        *,
        noise: NormalSource | None = None,
    ) -> None:
        self.folder = Path(folder)
        with RunReader(self.folder) as reader:  # fail early if the folder is not a run
            check_seen(reader)
            if noise is not None and not reader.value(NOISE_GIVEN, ""):
                raise InputError(
                    f"the noise of {folder} comes from the operating system: give a source of noise when a run is made"
                )
        self._engines = RunEngines(self.reader, make_engine)
        self._noise = noise
        self._memory = Memory()
        self._views: dict[Any, RunView] = {}

    def reader(self) -> RunReader:
        """Return a new reader, to be used in a `with` block."""
        return RunReader(self.folder, shared=self._memory)

    def writer(self) -> RunWriter:
        """Return a writer, to be used in a `with` block; it locks the run against other writers."""
        writer = RunWriter.open(self.folder, self._memory)
        writer.noise = self._noise
        return writer

    @contextmanager
    def snapshot(self) -> Iterator[RunReader]:
        """Yield a reader that sees one instant of the run; unreadable content is reported as damage."""
        with self.reader() as reader, reader.snapshot(), blaming_damage(reader):
            yield reader

    @contextmanager
    def view(self) -> Iterator[RunView]:
        """Yield the run at this instant; derived values are reused as long as nothing is written.

        A view has one user at a time, because its reader belongs to one thread. Concurrent users get separate views.
        """
        stamps = [_stamp(self.folder / name) for name in (DATABASE, f"{DATABASE}-wal")]
        with self.snapshot() as reader:
            state = (reader.value("head"), *stamps)
            view = self._views.pop(state, None)
            if view is None:
                view = RunView(reader)
            else:
                reader.take_over(view.reader)
                view.reader = reader
            yield view
        self._views = {state: view}  # after an error, the view is not reused

    @property
    def spec(self) -> Spec:
        """Merged spec of the run."""
        with self.reader() as reader, readable(self.folder):
            return Spec.from_mapping(reader.spec)

    @property
    def executed_elsewhere(self) -> str:
        """Advice for a run whose requests `sifu forget` cannot execute by itself, or "" for any other run."""
        return executed_elsewhere(self.spec)

    def state(self) -> tuple[Any, ...]:
        """Return whether a process writes to the run, followed by values that differ after every change to it."""
        names = (DATABASE, f"{DATABASE}-wal", INBOX, FAILURE_FILE)
        return is_locked(self.folder), *(_stamp(self.folder / name) for name in names)

    @contextmanager
    def _checked_writer(self, before: str = "") -> Iterator[RunWriter]:
        """Yield the run for writing after checking its record; an action named in `before` needs the phase `ready`."""
        with self.writer() as writer:
            check_integrity(writer)
            if before and writer.phase != "ready":
                raise InputError(f"the run is still {writer.phase}: finish it first, then {before}")
            yield writer

    @contextmanager
    def _writer_if_free(self) -> Iterator[RunReader]:
        """Yield the run for writing after ingesting its inbox, or a reader if another process is writing to the run."""
        try:
            writer = self.writer()
        except RunBusyError:
            with self.snapshot() as reader:
                yield reader
            return
        with writer:
            ingest(writer)
            yield writer

    def engine(self, *, newcomers: bool = False) -> Engine:
        """Return the engine of this run, which is built when it is first needed.

        The data of all remaining clients must be there and unchanged. With `newcomers`, new clients may follow those
        that the run knows.
        """
        return self._engines.current(newcomers=newcomers)

    def engine_without(self, clients: Collection[int]) -> EngineWithout | None:
        """Return a new engine that never had the data of `clients`, or None if the run has a given engine.

        The engine uses the run's GPU only for heads on features of a public network, and the CPU for everything else.
        """
        return self._engines.without(clients)

    def complete_engine(self) -> Engine:
        """Return the engine with the data of all clients, including clients that left; all data must be usable."""
        return self._engines.complete()

    def measure_held_out(self, writer: RunWriter) -> None:
        """Record, with `writer`, the figures of the current model on the held-out rows of the remaining clients.

        If the rows cannot be used, nothing is recorded and a warning is issued, because the training or the request is
        already complete.
        """
        self._engines.measure_held_out(writer)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return inode, size and modification time of a file, or None if it does not exist."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
