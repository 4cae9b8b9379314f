"""A run folder from Python: how it is read and written, and the engine that goes with it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sifu.api.engine_check import ModelGiven, check_continues, check_remainder
from sifu.core.engine import Engine, LacksData
from sifu.core.request_terms import RequestTerms
from sifu.core.spec import RIDGE, Spec
from sifu.data.dataset import sample_digest
from sifu.errors import InputError, NotCertifiableError, SifuError, SifuWarning
from sifu.run.clients_and_engine import FLOWER, clients_from_spec, engine_from_spec
from sifu.run.coupled_replay import EngineWithout
from sifu.run.devices import check_repeats
from sifu.run.group_state import use_trunks_of_head
from sifu.run.recorded_data import Arranged, arranged_clients, held_out_figures, rows_at_hand
from sifu.run.run_view import RunView
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
Built = tuple[Engine, Digests, Mapping[int, str]]
"""An engine, the digests of its clients' samples, and whose data are not there, by number, and why."""
Check = Callable[..., dict[int, str]]
"""Says which clients of an engine have other data than they had; takes `sample_digests` and who is `absent`."""


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
        self._own_clients: Callable[[], Sequence[Any]] | None = None
        self._frame: Any = None
        self._sample_digests: Digests = None
        self._unusable: Mapping[int, str] = {}
        """Clients whose data are not there or not those that they had, by number, and what is wrong."""
        self._prepared: tuple[Remainder, Engine, Digests, Mapping[int, str]] | None = None
        """An engine with the client that is to join again, made before its records are forgotten."""
        self._newcomers: tuple[Any, ...] = ()
        self._constants: dict[Any, Any] = {}
        self._last_view: tuple[Any, RunView] | None = None

    def reader(self) -> RunReader:
        """A fresh reader, for a with block."""
        return RunReader(self.folder, constants=self._constants)

    def writer(self, *, vouching: bool = False) -> RunWriter:
        """The run for writing, for a with block: no other process can write meanwhile.

        `vouching` opens one whose last events were written without the operator's key, to sign them.
        """
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

    def engine(self, *, newcomers: bool = False, leaving: Collection[str] = ()) -> Engine:
        """The engine of this run, built when it is first needed; `newcomers` may follow the clients it knows.

        Refused where it lacks the data of a client that stays, which those `leaving` do not.
        """
        with self.reader() as reader:
            if self._engine is None:
                newcomers = newcomers or remainder_to_join(reader) is not None
                check = partial(check_continues, self.folder, reader, newcomers=newcomers)
                built = self._usable(reader, check, leaving, newcomers=self._newcomers)
                use_trunks_of_head(built[0], reader)
                check_repeats(built[0])
                self._take(*built)  # never one that was refused
            assert self._engine is not None
            refuse_missing(RunView(reader), self._unusable, leaving)
        return self._engine

    def measure_held_out(self, writer: RunWriter) -> None:
        """Note by `writer` how well the current model does on the held-out rows of those who stay, where there are any.

        Rows that cannot be used are no reason to fail: what was trained or forgotten stands.
        """
        spec, tip = self.spec, writer.tip
        rows = rows_at_hand(spec, self._data_folder, self._frame)
        if rows is None or read_held_out(self.folder, tip) is not None:
            return
        stay = {plain_name(writer, client) for client in RunView(writer).active.tolist()}
        figures = None
        with suppress(SifuError, ValueError):
            figures = held_out_figures(spec, self.engine(), writer.load_model(tip), rows.of(stay))
        if figures is not None:
            write_held_out(self.folder, tip, figures)

    def _usable(self, reader: RunReader, check: Check, leaving: Collection[str], **others: Any) -> Built:
        """An engine that passes the check: in the place of other data than the client had, it has a stand-in."""
        view = RunView(reader)
        engine, digests, absent = self._build(reader, **others)
        refuse_missing(view, absent, leaving)
        changed = check(engine, sample_digests=digests, absent=absent)
        if not changed:
            return engine, digests, absent
        for client, reason in changed.items():
            if view.clients[client].name not in leaving:
                raise InputError(reason)
        engine, digests, absent = self._build(reader, changed=changed, **others)
        for reason in check(engine, sample_digests=digests, absent=absent).values():
            raise InputError(reason)  # an engine that was handed over, with its own data
        return engine, digests, absent

    def complete_engine(self) -> Engine:
        """The engine with the data of everyone, also of those who left, unless the rate is no longer one for them."""
        engine = self.engine()
        with self.reader() as reader:
            too_steep = _too_steep(reader, engine.facts.local_rate)
        for client, reason in self._unusable.items():
            if client not in too_steep:
                raise InputError(reason)
        return engine

    def _take(self, engine: Engine, digests: Digests, unusable: Mapping[int, str]) -> None:
        self._engine, self._sample_digests, self._unusable = engine, digests, unusable
        if isinstance(engine, LacksData):
            engine.absent = frozenset(unusable)

    def _build(self, reader: RunReader, rate: float | None = None, gone: Collection[int] = (), **others: Any) -> Built:
        """A new engine, the digests of the samples that were read for it, and whose data are not there, and why.

        It has the recorded local rate or the given one, for which those who are `gone` need not be fit. `others` are as
        `arranged_clients` has them.
        """
        spec, arranged, was_read = self.spec, Arranged((), {}), False
        if rate is not None:
            spec = replace(spec, local=replace(spec.local, rate=rate))
        too_steep = _too_steep(reader, spec.local.rate, gone)
        others["changed"] = too_steep | dict(others.get("changed") or {})

        def arrange(clients: Any) -> Any:
            nonlocal arranged, was_read
            was_read = True
            arranged = arranged_clients(reader, clients, **others)
            return arranged.clients

        try:
            if self._make_engine is not None:
                given = self._make_engine(spec, arrange, None)
                assert given is not None
                engine = given
            else:
                engine = engine_from_spec(spec, arrange(clients_from_spec(spec)))[0]
        except InputError as error:
            if was_read or any(others.values()) or not solved_from_files(spec):
                raise
            sentence = f"no accuracy is measured, because the clients' data cannot be read: {error}"
            warnings.warn(sentence, SifuWarning, stacklevel=2)
            clients = reader.clients()
            from sifu.engines.sim.embedded_heads import KeptStatistics  # imports torch

            kept = KeptStatistics(clients, RunView(reader).facts, reader.layout, spec)
            return kept, ("",) * len(clients), dict.fromkeys(range(len(clients)), str(error))
        digests = tuple(sample_digest(client) for client in arranged.clients) or shown_digests(engine)
        return engine, digests, dict(arranged.absent)

    def engine_without(self, clients: Collection[int]) -> EngineWithout | None:
        """A new engine on the CPU that was never given the data of `clients`; None where one was handed over."""
        with self.reader() as reader:
            there = np.setdiff1d(np.arange(len(reader.clients())), np.array(sorted(clients), dtype=np.int64))

            def arrange(data: Any) -> Any:
                arranged = arranged_clients(reader, data)
                for client in sorted(set(arranged.absent) & set(there.tolist())):
                    raise InputError(arranged.absent[client])
                return tuple(arranged.clients[client] for client in there.tolist())

            if self._make_engine is not None:
                engine = self._make_engine(self.spec, arrange, there.tolist())
            else:
                engine, _ = engine_from_spec(self.spec, arrange(clients_from_spec(self.spec)), None, there.tolist())
        return None if engine is None else EngineWithout(engine, there)

    def _sample_digest_of(self, client: int) -> str | None:
        """The digest of a client's samples as they were read for the engine; None where the engine shows none."""
        return None if self._sample_digests is None else self._sample_digests[client]

    def prepare_records(self, reader: RunReader, terms: RequestTerms) -> None:
        """Build the engine with what a client has left without the records of `terms`; refuse one that could not go on.

        `reader` tells who the client is. Done before anything is rolled back: afterwards the client cannot join
        again, nor the request end.
        """
        remainder = remainder_after(reader, terms.clients[0], terms.records)
        if self._prepared is not None and self._prepared[0] == remainder:
            return
        self._prepared = None
        check = partial(check_remainder, self.folder, reader, remainder=remainder)
        self._prepared = (remainder, *self._usable(reader, check, (), expected=remainder))

    def _engine_at(self, reader: RunReader, rate: float, gone: Collection[int]) -> Engine:
        """An engine that continues at another local rate without those who are `gone`; refused if none can be built."""

        def check(engine: Engine, **others: Any) -> dict[int, str]:
            if engine.facts.local_rate != rate:
                raise NotCertifiableError(
                    f"the automatic rate of those who stay is {rate:.6g}, and the engine that was handed over keeps "
                    f"{engine.facts.local_rate:.6g}: open the run with its clients' data instead"
                )
            return check_continues(self.folder, reader, engine, local_rate=rate, **others)

        leaving = {reader.clients()[client].name for client in gone}
        built = self._usable(reader, check, leaving, rate=rate, gone=gone)
        self._take(*built)
        return built[0]

    def engine_again(self) -> Engine:
        """The engine with the client that is to join again: the prepared one, or the data are read once more."""
        prepared, self._prepared, self._engine = self._prepared, None, None
        with self.reader() as reader:
            waiting = remainder_to_join(reader)
            if prepared is not None and waiting is not None and replace(waiting, request="") == prepared[0]:
                self._take(*prepared[1:])
        return self.engine()


def _too_steep(reader: RunReader, rate: float | str, gone: Collection[int] = ()) -> dict[int, str]:
    """Those who left and whose loss is steeper than the local rate is for, by number: they would end the bound on
    rounding of an engine that has their data. Said only where the rate was found anew without them."""
    left = {client for subject in reader.subjects() for client in subject.clients}.union(gone)
    if not isinstance(rate, float) or rate == reader.local_rates.get(0, reader.first_facts["local_rate"]):
        return {}
    clients = reader.clients()
    return {
        client: f"client {clients[client].name!r} left, and the local rate was found anew without it"
        for client in left
        if (steepest := clients[client].smoothness) is None or rate * steepest > 2.0  # None: a purge erased it
    }


def solved_from_files(spec: Spec) -> bool:
    """Whether the run's models are heads that kept statistics give, so that the clients' data are not needed."""
    return spec.model.kind == RIDGE and spec.data.name != FLOWER and not spec.is_tuned


def refuse_missing(view: RunView, unusable: Mapping[int, str], leaving: Collection[str]) -> None:
    """Refuse to go on without the data of a client that stays, unless its statistics are kept.

    A client that is to join again with fewer records is not in the record yet: its data are needed.
    """
    own = [row for row in view.reader.statistics().values() if not row.is_sum]
    kept = set() if view.spec.is_tuned else {row.clients[0] for row in own}  # tuned networks may be tuned again
    gone = {index for name in leaving if (index := view.index_of.get(name)) is not None}
    needed = set(view.active.tolist()) - kept - gone
    for client, reason in unusable.items():
        if client in needed or client >= len(view.clients):
            raise InputError(reason)


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
