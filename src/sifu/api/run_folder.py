"""A run folder from Python: how it is read and written, and the engine that goes with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sifu.api.engine_check import check_continues, check_remainder
from sifu.api.given import ModelGiven
from sifu.core.engine import Engine
from sifu.core.request_terms import RequestTerms
from sifu.core.spec import Spec
from sifu.data.sample_digests import sample_digest
from sifu.errors import InputError, SifuError
from sifu.launch.engine_kind import check_repeats
from sifu.launch.federation import clients_from_spec, engine_from_spec
from sifu.launch.held_out import held_out_figures, rows_at_hand
from sifu.launch.recorded_clients import arranged_clients
from sifu.record.groups import use_trunks_of_head
from sifu.record.other_world import EngineWithout
from sifu.record.run_view import RunView
from sifu.store.client_accuracy import read_held_out, write_held_out
from sifu.store.database import DATABASE
from sifu.store.known_keys import check_known_key
from sifu.store.reader import RunReader
from sifu.store.remainders import Remainder, plain_name, remainder_after, remainder_to_join
from sifu.store.writer import RunWriter
from sifu.verify.integrity import blaming_damage

Arrange = Callable[[Any], Any]
"""Puts the clients' data in the order of the record, without the records that were forgotten."""
Numbers = Sequence[int] | None
"""Of the clients among all of a run, where some are left out."""
MakeEngine = Callable[[Spec, Arrange, Numbers], Engine | None]
"""Makes the engine of a run; None where an engine was handed over and another one is asked for."""
Digests = tuple[str, ...] | None
"""Of the samples of each client; None where an engine was handed over that does not show them."""


class RunFolder:
    """A run folder and, where training is needed, the engine that goes with it."""

    def __init__(
        self, folder: str | Path, make_engine: MakeEngine | None = None, data_folder: str | Path | None = None
    ) -> None:
        self.folder = Path(folder)
        with RunReader(self.folder) as reader:  # refuses at once what is not a run
            check_known_key(reader)
        self._make_engine, self._data_folder = make_engine, data_folder
        self._engine: Engine | None = None
        self._own_model: ModelGiven | None = None
        self._sample_digests: Digests = None
        self._prepared: tuple[Remainder, Engine, Digests] | None = None
        """An engine with the client that is to join again, made before its records are forgotten."""
        self._newcomers: tuple[Any, ...] = ()
        self._constants: dict[Any, Any] = {}
        self._last_view: tuple[Any, RunView] | None = None

    def reader(self) -> RunReader:
        """A fresh reader, for a with block."""
        return RunReader(self.folder, constants=self._constants)

    def writer(self, *, vouching: bool = False) -> RunWriter:
        """The run for writing, for a with block: nobody else can write meanwhile."""
        return RunWriter.open(self.folder, self._constants, vouching=vouching)

    @contextmanager
    def snapshot(self) -> Iterator[RunReader]:
        """A reader that sees one instant of the run; what cannot be read is blamed on damage."""
        with self.reader() as reader, reader.snapshot(), blaming_damage(reader):
            yield reader

    @contextmanager
    def view(self) -> Iterator[RunView]:
        """The run at this instant; what was worked out is used again as long as nothing was written."""
        files = [self.folder / name for name in (DATABASE, f"{DATABASE}-wal")]
        stamps = [(stat.st_ino, stat.st_size, stat.st_mtime_ns) if (stat := _stat(path)) else None for path in files]
        try:
            with self.snapshot() as reader:
                state = (reader.value("head"), *stamps)
                if self._last_view is not None and self._last_view[0] == state:
                    reader.take_over(self._last_view[1].reader)
                    self._last_view[1].reader = reader
                else:
                    self._last_view = (state, RunView(reader))
                yield self._last_view[1]
        except BaseException:
            self._last_view = None
            raise

    @property
    def spec(self) -> Spec:
        """The merged spec of the run."""
        with self.reader() as reader:
            return Spec.from_mapping(reader.spec)

    def engine(self, *, newcomers: bool = False) -> Engine:
        """The engine of this run, built when it is first needed; `newcomers` may follow the clients it knows."""
        if self._engine is None:
            with self.reader() as reader:
                engine, digests = self._build(reader, newcomers=self._newcomers)
                newcomers = newcomers or remainder_to_join(reader) is not None
                check_continues(self.folder, reader, engine, newcomers, digests)
                use_trunks_of_head(engine, reader)
                check_repeats(engine)
            self._engine, self._sample_digests = engine, digests  # never one that was refused
        return self._engine

    def measure_held_out(self, writer: RunWriter) -> None:
        """Note how well the current model does on the held-out rows of those who stay, where there are any.

        Rows that cannot be used are no reason to fail: what was trained or forgotten stands.
        """
        spec, tip = self.spec, writer.tip
        rows = rows_at_hand(spec, self._data_folder)
        if rows is None or read_held_out(self.folder, tip) is not None:
            return
        stay = {plain_name(writer, client) for client in RunView(writer).active.tolist()}
        figures = None
        with suppress(SifuError, ValueError):
            figures = held_out_figures(spec, self.engine(), writer.load_model(tip), rows.of(stay))
        if figures is not None:
            write_held_out(self.folder, tip, figures)

    def _build(self, reader: RunReader, **others: Any) -> tuple[Engine, Digests]:
        """A new engine, and the digests of the samples that were read for it; `others` as `arranged_clients` has it."""
        spec, arranged = self.spec, list[Any]()

        def arrange(clients: Any) -> Any:
            arranged[:] = arranged_clients(reader, clients, **others)
            return tuple(arranged)

        if self._make_engine is not None:
            engine = self._make_engine(spec, arrange, None)
            assert engine is not None
        else:
            engine = engine_from_spec(spec, arrange(clients_from_spec(spec)))[0]
        return engine, tuple(sample_digest(client) for client in arranged) if arranged else shown_digests(engine)

    def engine_without(self, clients: Collection[int]) -> EngineWithout | None:
        """A new engine on the CPU that was never given the data of `clients`; None where none can be built.

        That is so where an engine was handed over, and where groups tune a network.
        """
        if self.spec.is_tuned:
            return None
        with self.reader() as reader:
            there = np.setdiff1d(np.arange(len(reader.clients())), np.array(sorted(clients), dtype=np.int64))

            def arrange(data: Any) -> Any:
                everyone = arranged_clients(reader, data)
                return tuple(everyone[client] for client in there.tolist())

            if self._make_engine is not None:
                engine = self._make_engine(self.spec, arrange, there.tolist())
            else:
                engine, _ = engine_from_spec(self.spec, arrange(clients_from_spec(self.spec)), None, there.tolist())
        return None if engine is None else EngineWithout(engine, there)

    def _sample_digest_of(self, client: int) -> str | None:
        """The digest of a client's samples as they were read for the engine; None where the engine shows none."""
        return None if self._sample_digests is None else self._sample_digests[client]

    def prepare_records(self, reader: RunReader, terms: RequestTerms) -> None:
        """Build the engine with what a client has left without some records, and refuse one that could not go on.

        Done before anything is rolled back: afterwards the client could no longer join again, nor the request end.
        """
        remainder = remainder_after(reader, terms.clients[0], terms.records)
        if self._prepared is not None and self._prepared[0] == remainder:
            return
        self._prepared = None
        engine, digests = self._build(reader, expected=remainder)
        check_remainder(self.folder, reader, engine, remainder, digests)
        self._prepared = (remainder, engine, digests)

    def engine_again(self) -> Engine:
        """The engine with the client that is to join again: the prepared one, or the data are read once more."""
        prepared, self._prepared, self._engine = self._prepared, None, None
        with self.reader() as reader:
            waiting = remainder_to_join(reader)
            if prepared is not None and waiting is not None and replace(waiting, request="") == prepared[0]:
                _, self._engine, self._sample_digests = prepared
        return self.engine()


def shown_digests(engine: Engine) -> Digests:
    """The digests of its clients' samples that an engine shows: ours do, others may have an attribute of this name."""
    digests = getattr(engine, "sample_digests", None)
    if digests is not None and len(digests) != len(engine.clients):
        raise InputError(f"the engine has {len(engine.clients)} clients and digests of the samples of {len(digests)}")
    return None if digests is None else tuple(digests)


def _stat(path: Path) -> os.stat_result | None:
    """What the file system says of a file, if it is there."""
    try:
        return path.stat()
    except OSError:
        return None
