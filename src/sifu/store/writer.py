"""Writing a run: every state change is one event in one transaction, under one lock.

Files of models and updates are written before the transaction that names them and deleted after the one that
drops them; a kill in between leaves a stray file that the next opening removes, never a row without its file.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import secrets
import shutil
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sifu.core.layout import ModelLayout, Vector
from sifu.core.ledger import GENESIS, NONCE_BYTES, Event, seal
from sifu.errors import InputError, RunBusyError, RunDamagedError
from sifu.store import files
from sifu.store.certificate_path import CERTIFICATES, certificate_path
from sifu.store.checkpoints import Signer, uncovered, unsigned_tail
from sifu.store.client_accuracy import read_standing, remove_standing
from sifu.store.database import (
    CLIENTS_FILE,
    DATABASE,
    create_database,
    open_database,
    rest_of_a_run,
    scrub_database,
    transaction,
)
from sifu.store.head_file import HEAD_FILE, announce_head, signs_of_an_older_database, write_head
from sifu.store.history_rows import NodeRow, ParticipationRows, clients_digest, rows_digest
from sifu.store.keys import KEY_FILE, create_key, finish_rotation
from sifu.store.lock import LOCK_FILE, WriterLock
from sifu.store.projection import KEYS, Change, changes
from sifu.store.reader import GROUP_KEY, RunReader
from sifu.store.record_check import check_record
from sifu.store.regular_files import private_folder, strange_files
from sifu.store.statistics import STATISTICS, STATISTICS_NAME, statistics_path
from sifu.store.table_rows import EvaluationRow
from sifu.store.updates import FILE_NAME, UPDATES, NewUpdates, updates_path
from sifu.store.witnesses import WitnessPost, witness_targets
from sifu.theory.facts import ClientProfile, TrainingFacts
from sifu.theory.groups import KEY_BYTES
from sifu.theory.history import PathNode

SCRUB_FILE = "scrub"
"""Exists from before a permanent erasure until no page and no log of the database holds what was erased."""
REPORT = "report"
_STAGING = ".new"
_CREATING = ".creating"
_FOLDERS = ("models", CERTIFICATES, UPDATES, STATISTICS)
_ROWS_TOGETHER = 200
"""Participations in one statement: between two of them other threads may run, which costs more than a row."""
_OWN_FILES = {LOCK_FILE, *_FOLDERS, KEY_FILE, HEAD_FILE, _STAGING, _CREATING} | {
    files.TEMPORARY_PREFIX + name for name in (KEY_FILE, HEAD_FILE)
}


def utc_now() -> str:
    """The time of an event, to the second and in UTC."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class NewRows:
    """Rows of the three large tables that one event adds."""

    nodes: Sequence[NodeRow] = ()
    participation: ParticipationRows = field(default_factory=ParticipationRows.empty)
    grams: Sequence[tuple[int, bytes]] = ()


@dataclass(frozen=True)
class NewModel:
    """A model to be written with an event."""

    node: int
    vector: Vector
    kept: bool
    psi_max: float = 0.0


class RunWriter(RunReader):
    """The one process that may change a run."""

    def __init__(
        self,
        folder: Path,
        connection: sqlite3.Connection,
        lock: WriterLock,
        constants: dict[Any, Any] | None = None,
    ) -> None:
        super().__init__(folder, connection, constants)
        self._lock = lock
        self._signer: Signer | None = None
        self._witnesses = WitnessPost()
        self._recorded = False

    @classmethod
    def create(
        cls,
        folder: Path,
        given_spec: Mapping[str, Any],
        spec: Mapping[str, Any],
        layout: ModelLayout,
        clients: Sequence[ClientProfile],
        facts: TrainingFacts,
        versions: Mapping[str, str],
        initial_model: Vector,
    ) -> RunWriter:
        """A new run in an empty or absent folder, with its initial model and its operator's key."""
        witness_targets()
        # Only what a creation of ours left behind may be cleared away: its marker was written first.
        present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        allowed = {CLIENTS_FILE} | (_OWN_FILES if _CREATING in present else {LOCK_FILE})
        if rest_of_a_run(folder):
            raise RunDamagedError(
                f"{folder} holds the rest of a run whose {DATABASE} is gone: put it back from a backup (sifu restore), "
                "or choose another folder. Nothing was changed"
            )
        if (folder.exists() and not folder.is_dir()) or present - allowed:
            raise InputError(f"{folder} exists and is not empty: choose another folder for the run, or remove it")
        private_folder(folder, parents=True)
        folder.chmod(0o700)
        lock = WriterLock(folder / LOCK_FILE)
        try:
            if (folder / DATABASE).exists():  # another process was faster; its run is not to be cleared away
                raise RunBusyError(
                    f"{folder} was made by another process just now: run the command again to continue it"
                )
            _clear_unfinished(folder)
            (folder / _CREATING).touch(mode=0o600)
            files.sync_folder(folder)
            for name in _FOLDERS:
                private_folder(folder / name)
            public_key = create_key(folder)
            # The database appears under its name only when it is whole: until then the folder is not a run.
            staging = folder / _STAGING
            private_folder(staging)
            writer = cls(folder, create_database(staging), lock)
            writer._begin(given_spec, spec, layout, clients, facts, versions, public_key, initial_model)
            with transaction(writer.connection, None):
                writer.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            write_head(folder, writer.events()[-1])
            writer.connection.close()
            (staging / DATABASE).rename(folder / DATABASE)
            _finish_creation(folder)
            writer.connection = open_database(folder)
            writer._recorded = True
            writer._witnesses.recorded(writer, 1)
        except BaseException:
            lock.release()
            raise
        return writer

    def _begin(
        self,
        given_spec: Mapping[str, Any],
        spec: Mapping[str, Any],
        layout: ModelLayout,
        clients: Sequence[ClientProfile],
        facts: TrainingFacts,
        versions: Mapping[str, str],
        public_key: str,
        initial_model: Vector,
    ) -> None:
        recorded_facts = asdict(facts) | {"participation": str(facts.participation), "outside": list(facts.outside)}
        values = {
            "run": secrets.token_hex(8),
            "asked": dict(given_spec),
            "spec": dict(spec),
            "layout": {
                "names": list(layout.names),
                "shapes": [list(shape) for shape in layout.shapes],
                "dtype": layout.dtype,
            },
            "facts": recorded_facts,
            "versions": dict(versions),
            "public_key": public_key,
            "client_count": str(len(clients)),
            "clients_digest": clients_digest(clients),
            "tip": "0",
            "phase": "training",
        }
        if spec["groups"]["count"]:
            values[GROUP_KEY] = _group_key(spec).hex()
        with transaction(self.connection):
            self.connection.executemany(
                "INSERT INTO clients VALUES (?, ?, ?, ?, ?, ?)",
                [
                    (index, client.name, client.samples, client.local_steps, client.smoothness, client.curvature)
                    for index, client in enumerate(clients)
                ],
            )
            self._record(
                "run created",
                {"run": values},
                NewRows(nodes=[NodeRow(PathNode(0, None, "initial", 0, 0), 0.0)]),
                [NewModel(0, initial_model, kept=True)],
                layout,
            )

    @classmethod
    def open(cls, folder: Path, constants: dict[Any, Any] | None = None, *, vouching: bool = False) -> RunWriter:
        """Take the lock of an existing run, check its ledger and tables, and clear away what a crash may have left.

        Events at the end that no signature covers are not built on, nor a run without its file `head`, unless the
        operator is `vouching` for what there is.
        """
        witness_targets()  # a witness that cannot be one is refused before anything is touched
        strange = next(strange_files(folder), None) if folder.is_dir() else None
        if strange:
            raise RunDamagedError(f"{folder} was changed by hand: {strange}. Nothing was done; see sifu verify")
        connection = open_database(folder)
        try:
            lock = WriterLock(folder / LOCK_FILE)
        except BaseException:
            connection.close()
            raise
        writer = cls(folder, connection, lock, constants)
        try:
            # Before anything is deleted or written: is this the database that belongs to the rest of the folder?
            outdated = next(signs_of_an_older_database(writer, head_may_be_missing=vouching), None)
            if outdated:
                raise RunDamagedError(
                    f"{folder}: {outdated}. Nothing was changed; put the right run.db (and -wal) back"
                )
            check_record(writer)
            tail = unsigned_tail(writer.events())
            if tail and not vouching and writer.signer().key is not None:
                raise RunDamagedError(f"{folder}: {uncovered(tail)}. Nothing was done")
            _finish_creation(folder)
            for name in _FOLDERS:
                private_folder(folder / name)
            models = {files.model_path(folder, node).name for node in writer.models()}
            files.remove_strays(folder / "models", files.MODEL_NAME, models)
            files.remove_strays(folder / UPDATES, FILE_NAME, set(writer.updates()))
            files.remove_strays(folder / STATISTICS, STATISTICS_NAME, set(writer.statistics()))
            writer.export_certificates()
            finish_rotation(folder, writer.value("public_key"))
            if (folder / SCRUB_FILE).exists():  # an erasure was cut short: finish it before anything else
                writer.scrub()
        except BaseException:
            writer.close()
            raise
        return writer

    def close(self) -> None:
        """Close the database and let go of the lock; witnesses hear of the last event first."""
        if self._recorded:
            self._witnesses.tell_all(self)
        super().close()
        self._lock.release()

    def record(
        self,
        kind: str,
        payload: dict[str, Any],
        *,
        rows: NewRows | None = None,
        models: Sequence[NewModel] = (),
        dropped_models: Sequence[int] = (),
        updates: Sequence[NewUpdates] = (),
        dropped_updates: Sequence[str] = (),
        statistics: Sequence[dict[str, Any]] = (),
        dropped_statistics: Sequence[str] = (),
        evaluations: Sequence[EvaluationRow] = (),
        certificates: Mapping[tuple[str, str], dict[str, Any]] | None = None,
        joined: ClientProfile | None = None,
        for_good: bool = False,
    ) -> Event:
        """One event with everything that belongs to it, durable when this returns.

        `statistics` are rows of files that are there already (`store.statistics`). `joined` is a client that the run
        knows from now on. `for_good` also takes what is dropped out of the free pages and the log of the database, and
        erases the report.
        """
        payload = dict(payload)
        if for_good:
            files.write_atomically(self.folder / SCRUB_FILE, b"")
        if dropped_models:
            payload["dropped_models"] = [int(node) for node in dropped_models]
        if dropped_updates:
            payload["dropped_updates"] = list(dropped_updates)
        if statistics:
            payload["statistics"] = list(statistics)
        if dropped_statistics:
            payload["dropped_statistics"] = list(dropped_statistics)
        if evaluations:
            payload["evaluations"] = [asdict(row) for row in evaluations]
        contents = {key: json.dumps(value, indent=1, sort_keys=True) for key, value in (certificates or {}).items()}
        if contents:
            payload["certificates"] = {
                form: hashlib.sha256(content.encode()).hexdigest() for (_, form), content in contents.items()
            }
        layout, before = self.layout, set(self.models())
        files_before = {file for (file,) in self.query("SELECT file FROM updates")} if updates else set()
        committing = False
        try:
            with transaction(self.connection):
                for (request, form), content in contents.items():
                    self.connection.execute("INSERT INTO certificates VALUES (?, ?, ?)", (request, form, content))
                if joined is not None:
                    payload["run"] = payload.get("run", {}) | self._insert_client(joined)
                if updates:
                    payload["updates"] = [self._write_updates(new) for new in updates]
                seq, previous = self.last_event()
                event = self._record(kind, payload, rows or NewRows(), models, layout)
                announce_head(self.folder, seq, bytes.fromhex(previous), event)
                committing = True
        except Exception:
            if committing:
                # An error while committing does not say whether the event will be there after a crash: its files stay.
                # If it is not, the next opening finds that no row names them.
                raise
            for model in models:
                if model.node not in before:
                    files.model_path(self.folder, model.node).unlink(missing_ok=True)
            for file in {new.file for new in updates} - files_before:
                updates_path(self.folder, file).unlink(missing_ok=True)
            for file in {row["file"] for row in statistics} - set(self.statistics()):
                statistics_path(self.folder, file).unlink(missing_ok=True)
            raise
        write_head(self.folder, event)
        self._recorded = True
        self._witnesses.recorded(self, event.seq)
        if "public_key" in payload.get("run", {}):
            self._signer = None  # the next event is signed with the new key
        files.remove_files([files.model_path(self.folder, node) for node in dropped_models])
        files.remove_files([updates_path(self.folder, file) for file in dropped_updates])
        files.remove_files([statistics_path(self.folder, file) for file in dropped_statistics])
        for (request, form), content in contents.items():
            files.write_atomically(certificate_path(self.folder, request, form), content.encode())
        if for_good:
            self.scrub()
        return event

    def signer(self, public_key: str | None = None) -> Signer:
        """Who signs events; the key is read when it is first needed."""
        if self._signer is None:
            self._signer = Signer(self.folder, public_key or self.value("public_key"))
        return self._signer

    def now(self) -> str:
        """The time, never before that of the last event, whatever the clock says."""
        return max(utc_now(), str(self.query("SELECT MAX(time) FROM events")[0][0]))

    def _insert_client(self, client: ClientProfile) -> dict[str, str]:
        """Add a row; returns what the run table then says of its clients."""
        clients = (*self.clients(), client)
        row = (len(clients) - 1, client.name, client.samples, client.local_steps, client.smoothness, client.curvature)
        self.connection.execute("INSERT INTO clients VALUES (?, ?, ?, ?, ?, ?)", row)
        return {"client_count": str(len(clients)), "clients_digest": clients_digest(clients)}

    def scrub(self) -> bool:
        """Leave nothing of what was deleted in the folder; False if a reader at work kept part of it from being done.

        The report goes too: it was drawn from what is gone, and can be written again.
        """
        if (self.folder / REPORT).is_dir():
            shutil.rmtree(self.folder / REPORT)
        standing = read_standing(self.folder)
        if standing is None or standing.node != self.tip:
            remove_standing(self.folder)
        for name in ("", *_FOLDERS):
            for path in sorted((self.folder / name).glob(files.TEMPORARY_PREFIX + "*")):
                path.unlink()
            files.sync_folder(self.folder / name)
        done = scrub_database(self.connection)
        if done:
            (self.folder / SCRUB_FILE).unlink(missing_ok=True)
            files.sync_folder(self.folder)
        return done

    def _record(
        self, kind: str, payload: dict[str, Any], rows: NewRows, models: Sequence[NewModel], layout: ModelLayout
    ) -> Event:
        """Inside a transaction: write files and rows, seal the event, apply its changes."""
        if models:
            payload["models"] = [self._write_model(model, layout) for model in models]
        if rows.nodes:
            payload["rows"] = {
                "first": rows.nodes[0].node.node,
                "last": rows.nodes[-1].node.node,
                "digest": rows_digest(rows.nodes, rows.participation, rows.grams),
            }
            self._insert(rows)
        last = self.connection.execute("SELECT seq, hash, time FROM events ORDER BY seq DESC LIMIT 1").fetchone()
        seq, previous, time = (last[0] + 1, last[1], max(last[2], utc_now())) if last else (1, GENESIS, utc_now())
        event = seal(previous, seq, time, kind, payload, secrets.token_bytes(NONCE_BYTES))
        created = payload["run"] if seq == 1 else None
        signer = self.signer(created["public_key"] if created else None)
        signature = signer.sign(created["run"] if created else self.value("run"), event)
        text = event.payload.decode()
        self.connection.execute(
            "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (event.seq, event.time, event.kind, text, event.nonce, event.commitment, event.hash, signature),
        )
        for change in changes(kind, event.time, event.content):
            self._apply(change)
        self._apply(Change("run", ("head",), {"value": f"{event.seq}:{event.hash.hex()}"}))
        return event

    def _write_model(self, model: NewModel, layout: ModelLayout) -> dict[str, Any]:
        content = files.model_bytes(layout, model.vector)
        files.write_atomically(files.model_path(self.folder, model.node), content)
        return {
            "node": model.node,
            "kept": int(model.kept),
            "bytes": len(content),
            "digest": hashlib.sha256(content).hexdigest(),
            "nonce": secrets.token_hex(NONCE_BYTES),
            "psi_max": model.psi_max,
        }

    def _write_updates(self, updates: NewUpdates) -> dict[str, Any]:
        content = updates.content()
        files.write_atomically(updates_path(self.folder, updates.file), content)
        return {
            "file": updates.file,
            "node": updates.node,
            "part": updates.part,
            "bytes": len(content),
            "digest": hashlib.sha256(content).hexdigest(),
            "clients": updates.digests(),
        }

    def _insert(self, rows: NewRows) -> None:
        self.connection.executemany(
            f"INSERT INTO nodes VALUES ({','.join('?' * 15)})", [row.values() for row in rows.nodes]
        )
        part = rows.participation
        columns = (part.nodes.tolist(), part.clients.tolist(), part.samples.tolist(), part.drifts.tolist())
        values = list(itertools.chain.from_iterable(zip(*columns, strict=True)))
        for first in range(0, len(values), 4 * _ROWS_TOGETHER):
            together = values[first : first + 4 * _ROWS_TOGETHER]
            marks = ", ".join(["(?, ?, ?, ?)"] * (len(together) // 4))
            self.connection.execute(f"INSERT INTO participation VALUES {marks}", together)
        self.connection.executemany("INSERT INTO grams VALUES (?, ?)", rows.grams)

    def _apply(self, change: Change) -> None:
        key_columns = KEYS[change.table]
        where = " AND ".join(f"{column} = ?" for column in key_columns)
        if change.values is None:
            self.connection.execute(f"DELETE FROM {change.table} WHERE {where}", change.key)
            return
        exists = self.connection.execute(f"SELECT 1 FROM {change.table} WHERE {where}", change.key).fetchone()
        if exists:
            assignments = ", ".join(f"{column} = ?" for column in change.values)
            self.connection.execute(
                f"UPDATE {change.table} SET {assignments} WHERE {where}", (*change.values.values(), *change.key)
            )
        else:
            columns = ", ".join((*key_columns, *change.values))
            marks = ", ".join("?" * (len(key_columns) + len(change.values)))
            self.connection.execute(
                f"INSERT INTO {change.table} ({columns}) VALUES ({marks})", (*change.key, *change.values.values())
            )

    def export_certificates(self) -> None:
        """Write each certificate to its file, unless it is there already."""
        for request, form in self.query("SELECT request, form FROM certificates ORDER BY request, form"):
            path = certificate_path(self.folder, request, form)
            if not path.exists():
                files.write_atomically(path, self.certificates(request)[(request, form)].encode())


def _group_key(spec: Mapping[str, Any]) -> bytes:
    """The key of the hash that puts clients into groups: of the seed where noise is too, for experiments."""
    if spec["privacy"]["noise"] == "seeded":
        return hashlib.sha256(f"{spec['seed']}:groups".encode()).digest()
    return secrets.token_bytes(KEY_BYTES)


def _clear_unfinished(folder: Path) -> None:
    """Remove what an interrupted creation left; a folder without a database is not a run yet."""
    for name in _OWN_FILES - {LOCK_FILE, _CREATING}:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _finish_creation(folder: Path) -> None:
    """Take away what a creation needs only until the database has its name."""
    if (folder / _CREATING).exists() or (folder / _STAGING).exists():
        shutil.rmtree(folder / _STAGING, ignore_errors=True)
        files.sync_folder(folder)
        (folder / _CREATING).unlink(missing_ok=True)
        files.sync_folder(folder)
