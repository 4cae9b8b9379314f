"""Engines of a run: the current engine, and engines that a request needs, built from the run's data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from sifu.core.engine import Engine, LacksData, ShowsSamples
from sifu.core.held_out_figures import HeldOutFigures
from sifu.core.layout import Vector
from sifu.core.operator_words import FLOWER
from sifu.core.request_terms import Terms
from sifu.core.spec import Spec
from sifu.core.spec.sections import IMAGE_FEATURES
from sifu.data.dataset import sample_digest
from sifu.errors import InputError, SifuError, SifuWarning
from sifu.run.clients_and_engine import clients_from_spec, engine_from_spec
from sifu.run.coupled_replay import EngineWithout
from sifu.run.devices import check_repeats, engine_kind
from sifu.run.engine_check import BuiltEngine, check_continues, check_remainder
from sifu.run.given import ModelGiven
from sifu.run.held_out import held_out_figures, held_out_rows
from sifu.run.kept_statistics import KeptStatistics, own_statistics
from sifu.run.recorded_data import Arranged, arranged_clients
from sifu.run.run_view import RunView
from sifu.store.client_accuracy import read_held_out, write_held_out
from sifu.store.reader import Remainder, RunReader, plain_name, remainder_after, remainder_to_join
from sifu.store.release_files import released_model, released_node
from sifu.store.statistics_files import begins_as_expected
from sifu.store.writer import RunWriter

Arrange = Callable[[Any], Any]
"""Function that puts the clients' data in the order of the record, without forgotten records."""
Numbers = Sequence[int] | None
"""Indices of the clients in the run, if some are left out."""
MakeEngine = Callable[[Spec, Arrange, Numbers, str | None], Engine | None]
"""Builder of a run's engine with its trainer; it returns None if an engine was given and a different one is needed."""
Check = Callable[[BuiltEngine], dict[int, str]]
"""Function that returns the clients of an engine whose data changed, with the reason."""


def _embedded_engine(spec: Spec, arrange: Arrange, numbers: Numbers, trainer: str | None) -> Engine:
    """Return the embedded engine with data that are read as the spec describes."""
    return engine_from_spec(spec, arrange(clients_from_spec(spec, tested=False)), None, numbers, trainer)[0]


class RunEngines:
    """Holder of a run's engine, which is built when it is first needed."""

    def __init__(self, open_reader: Callable[[], RunReader], make_engine: MakeEngine | None) -> None:
        self._open_reader = open_reader
        self._make_engine = make_engine or _embedded_engine
        self.model: ModelGiven | None = None
        self.clients: Callable[[], Sequence[Any]] | None = None
        self.frame: Any = None
        """Frame of all rows that the run was opened with, if any; `model` and `clients` are the other arguments."""
        self.given = False
        """True if the run was opened with clients or an engine; these must match the record."""
        self.newcomers: tuple[Any, ...] = ()
        self._built: BuiltEngine | None = None
        """Engine in use until another engine is needed."""
        self._prepared: tuple[Remainder, BuiltEngine] | None = None
        """Engine with the client that will rejoin, built before its records are forgotten."""

    def expect(self, newcomers: tuple[Any, ...]) -> None:
        """Discard the engine, so that the next engine also has these clients, after the recorded clients."""
        self._built, self.newcomers = None, newcomers

    def use(self, built: BuiltEngine) -> Engine:
        """Make `built` the current engine, mark its unusable clients as absent, and return the engine."""
        self._built, engine = built, built.engine
        if isinstance(engine, LacksData):
            engine.absent = frozenset(built.unusable)
        return engine

    def current(self, *, newcomers: bool = False, leaving: Collection[str] = ()) -> Engine:
        """Return the run's engine (see `Run.engine`)."""
        with self._open_reader() as reader:
            built = self._built
            # Another process may have let a client join.
            if built is None or len(built.engine.clients) < len(reader.clients()):
                self._built, newcomers = None, newcomers or remainder_to_join(reader) is not None
                check = partial(check_continues, reader, newcomers=newcomers)
                built = self._usable(reader, check, leaving, newcomers=self.newcomers)
                check_repeats(built.engine)
                self.use(built)  # never keep an engine that was refused
            refuse_missing(RunView(reader), built.unusable, leaving)
        return built.engine

    def _usable(self, reader: RunReader, check: Check, leaving: Collection[str], **others: Any) -> BuiltEngine:
        """Return an engine that passes the check, with stand-ins for leaving clients whose data changed."""
        view = RunView(reader)
        built = self._build(reader, **others)
        refuse_missing(view, built.unusable, leaving)
        changed = check(built)
        if not changed:
            return built
        for client, reason in changed.items():
            if view.clients[client].name not in leaving:
                raise InputError(reason)
        built = self._build(reader, changed=changed, **others)
        for reason in check(built).values():
            raise InputError(reason)  # a given engine keeps its own data, so it gets no stand-ins
        return built

    def for_requests(self, writer: RunWriter, leaving: Collection[str], *, needs_data: bool) -> Engine:
        """Return the engine for requests: an engine of stored statistics if these suffice, otherwise the run's engine.

        Data that the run was opened with are compared with the record, unless a network computes the features and the
        stored statistics suffice. A file that no request needs is not read; `measure_held_out` compares it with the
        record before using its held-out rows. The data of clients that are `leaving` may be missing.
        """
        view = RunView(writer)
        compared = self.given and view.spec.features.kind not in IMAGE_FEATURES
        if needs_data or compared or not forgets_from_files(view):
            return self.current(leaving=leaving)
        return KeptStatistics(writer.clients(), view.facts, writer.layout, view.spec)

    def measure_held_out(self, writer: RunWriter, earlier: Vector | None = None) -> HeldOutFigures | None:
        """Record the figures of the current model on held-out rows (see `Run.measure_held_out`).

        Returns:
            The figures of `earlier`, or None if it was not given, if the current model was measured already, or if the
            rows cannot be used.
        """
        try:
            return self._measure_held_out(writer, earlier)
        except (SifuError, ValueError) as error:
            warnings.warn(f"no accuracy is measured on held-out rows: {error}", SifuWarning, stacklevel=2)
            return None

    def _measure_held_out(self, writer: RunWriter, earlier: Vector | None) -> HeldOutFigures | None:
        spec, tip = Spec.from_mapping(writer.spec), writer.tip
        if read_held_out(writer.folder, tip) is not None or released_node(writer) != tip:
            return None
        rows = held_out_rows(spec, self.frame)
        if rows is None:
            return None
        stay = {plain_name(writer, client) for client in RunView(writer).active.tolist()}
        figures = held_out_figures(spec, self.current(), released_model(writer), rows.of(stay))
        if figures is not None:
            write_held_out(writer.folder, tip, figures)
        if earlier is None:
            return None
        return held_out_figures(spec, self.current(), earlier, rows.of(stay))

    def complete(self) -> Engine:
        """Return the engine with everyone's data (see `Run.complete_engine`)."""
        engine = self.current()
        for reason in self._built.unusable.values() if self._built else ():
            raise InputError(reason)
        return engine

    def _build(self, reader: RunReader, **others: Any) -> BuiltEngine:
        """Return a new engine."""
        spec, arranged, was_read = Spec.from_mapping(reader.spec), Arranged((), {}), False

        def arrange(clients: Any) -> Any:
            nonlocal arranged, was_read
            was_read = True
            arranged = arranged_clients(reader, clients, **others)
            return arranged.clients

        try:
            engine = self._make_engine(spec, arrange, None, reader.facts.get("trainer"))
            assert engine is not None
        except InputError as error:
            if was_read or any(others.values()) or not solved_from_files(spec):
                raise
            sentence = f"no accuracy is measured, because the clients' data cannot be read: {error}"
            warnings.warn(sentence, SifuWarning, stacklevel=2)
            clients = reader.clients()
            kept = KeptStatistics(clients, RunView(reader).facts, reader.layout, spec)
            return BuiltEngine(kept, ("",) * len(clients), dict.fromkeys(range(len(clients)), str(error)))
        digests = tuple(sample_digest(client) for client in arranged.clients) or shown_digests(engine)
        return BuiltEngine(engine, digests, arranged.absent)

    def without(self, clients: Collection[int]) -> EngineWithout | None:
        """Return an engine that never had the data of `clients` (see `Run.engine_without`)."""
        with self._open_reader() as reader:
            spec = Spec.from_mapping(reader.spec)
            there = np.setdiff1d(np.arange(len(reader.clients())), np.array(sorted(clients), dtype=np.int64))

            def arrange(data: Any) -> Any:
                arranged = arranged_clients(reader, data)
                for client in sorted(set(arranged.absent) & set(there.tolist())):
                    raise InputError(arranged.absent[client])
                return tuple(arranged.clients[client] for client in there.tolist())

            engine = self._make_engine(spec, arrange, there.tolist(), reader.facts.get("trainer"))
        return None if engine is None else EngineWithout(engine, there, engine_kind(engine))

    def digest_of(self, client: int) -> str | None:
        """Return the digest of a client's samples as read for the engine, or None if the engine exposes none."""
        digests = None if self._built is None else self._built.sample_digests
        return None if digests is None else digests[client]

    def prepare_records(self, reader: RunReader, terms: Terms) -> None:
        """Build the engine without the records of `terms`, before anything is rolled back.

        After a rollback it would be too late: the client could not rejoin, and the request could not end.

        Raises:
            InputError: If the run could not continue with the client's remaining records.
        """
        remainder = remainder_after(reader, terms.clients[0], terms.records)
        if self._prepared is not None and self._prepared[0] == remainder:
            return
        self._prepared = None
        check = partial(check_remainder, reader, remainder=remainder)
        self._prepared = remainder, self._usable(reader, check, (), expected=remainder)

    def again(self) -> Engine:
        """Return the engine with the client that rejoins: the prepared one, or a new one from data read again."""
        prepared, self._prepared, self._built = self._prepared, None, None
        with self._open_reader() as reader:
            waiting = remainder_to_join(reader)
            if prepared is not None and waiting is not None and replace(waiting, request="") == prepared[0]:
                self.use(prepared[1])
        return self.current()


def solved_from_files(spec: Spec) -> bool:
    """Return whether the run's models are heads solved from stored statistics, so that no data are needed."""
    return spec.data.name != FLOWER and spec.regime.solves


def forgets_from_files(view: RunView) -> bool:
    """Return whether stored statistics suffice to forget clients, so that no samples are read.

    This is true for closed-form heads if the statistics of all active clients are kept.
    """
    spec, reader = view.spec, view.reader
    if not view.regime.solves or spec.data.name == FLOWER:
        return False
    trains = reader.phase == "training"
    records = any(row.records and row.is_open for row in view.requests)
    if trains or records or spec.release.noise > 0.0 or remainder_to_join(reader) is not None:
        return False
    own, whole = own_statistics(view), next((row for row in reader.statistics().values() if row.is_sum), None)
    if whole is None or not begins_as_expected(reader.folder, whole, own.fixed):
        return False  # the checks of the engine report the reason
    return set(view.active.tolist()) <= own.rows.keys()


def refuse_missing(view: RunView, unusable: Mapping[int, str], leaving: Collection[str]) -> None:
    """Check that the data of every remaining client are available, unless its statistics are stored.

    A client that will rejoin with fewer records is not in the record yet: its data are needed.

    Raises:
        InputError: If needed data are missing.
    """
    own = [row for row in view.reader.statistics().values() if not row.is_sum]
    kept = {row.clients[0] for row in own} if view.regime.solves else set()
    gone = {index for name in leaving if (index := view.index_of.get(name)) is not None}
    needed = set(view.active.tolist()) - kept - gone
    for client, reason in unusable.items():
        if client in needed or client >= len(view.clients):
            raise InputError(reason)


def shown_digests(engine: Engine) -> tuple[str, ...] | None:
    """Return the digests of its clients' samples that an engine exposes, or None if it exposes none."""
    digests = engine.sample_digests if isinstance(engine, ShowsSamples) else None
    if digests is not None and len(digests) != len(engine.clients):
        raise InputError(f"the engine has {len(engine.clients)} clients and digests of the samples of {len(digests)}")
    return None if digests is None else tuple(digests)
