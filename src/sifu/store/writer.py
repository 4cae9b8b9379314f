"""Write access to a run: every state change is one event in one transaction, under one lock.

Files of models are written before the transaction that names them, and deleted after the transaction that
drops them. A process killed in between leaves a stray file, which the next opening removes. There is never a row
without its file.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sifu.core.allowed_code import allowed_code
from sifu.core.layout import ModelLayout
from sifu.core.ledger import GENESIS, NONCE_BYTES, Event, seal
from sifu.errors import InputError, RunBusyError, RunDamagedError
from sifu.store import files, kept_heads, unfinished
from sifu.store.checkpoints import UNSIGNED, Signer
from sifu.store.client_accuracy import read_held_out, remove_standing
from sifu.store.database import (
    DATABASE,
    Memory,
    create_database,
    open_database,
    scrub_database,
    transaction,
)
from sifu.store.history_tables import clients_digest, rows_digest
from sifu.store.keys import create_key, finish_rotation
from sifu.store.last_failure import remove_failure
from sifu.store.projection import (
    Change,
    NewEvent,
    NewModel,
    NewRows,
    apply_change,
    changes,
    insert_clients,
    insert_rows,
)
from sifu.store.reader import RunReader
from sifu.store.record_check import check_record
from sifu.store.release_files import unnamed_releases
from sifu.store.salts import add_salts, erase_salts
from sifu.store.seen_heads import check_seen, remember_head
from sifu.store.times import utc_now
from sifu.theory.closed_form import Statistics
from sifu.theory.history import PathNode

SCRUB_FILE = "scrub"
"""Marker of an unfinished permanent erasure: it exists until no page or log of the database holds the erased data."""
REPORT = "report"


class RunWriter(RunReader):
    """Writer of a run; only one process at a time can hold it."""

    def __init__(
        self, folder: Path, connection: sqlite3.Connection, lock: files.WriterLock, shared: Memory | None = None
    ) -> None:
        super().__init__(folder, connection, shared)
        self._lock = lock
        self._signer: Signer | None = None
        self._witnesses = kept_heads.WitnessPost()
        self._recorded = False
        self.copies_removed: tuple[str, ...] = ()
        """Unfinished copies of a run that were deleted when this run was opened."""
        self.written_sum: tuple[str, Statistics] | None = None
        """Digest of the file and the sum of statistics that this process wrote last, kept for the next solve."""

    @classmethod
    def create(cls, folder: Path, new: unfinished.NewRun) -> RunWriter:
        """Create a run in an empty or absent folder, with its initial model and its operator's key.

        Raises:
            InputError: If the folder is not empty.
            RunDamagedError: If the folder holds a run whose database is missing.
            RunBusyError: If another process has just created a run there.
        """
        kept_heads.witness_targets()
        unfinished.check_free(folder)
        files.private_folder(folder, parents=True)
        folder.chmod(0o700)
        lock = files.WriterLock(folder / files.LOCK_FILE)
        try:
            if (folder / DATABASE).exists():  # another process was faster; do not delete its run
                raise RunBusyError(
                    f"{folder} was just created by another process: run the command again to continue it"
                )
            unfinished.clear_unfinished(folder)
            (folder / unfinished.CREATING).touch(mode=0o600)
            files.sync_folder(folder)
            for name in files.FOLDERS:
                files.private_folder(folder / name)
            public_key = create_key(folder)
            # The database gets its final name only when it is complete: until then the folder is not a run.
            staging = folder / unfinished.STAGING
            files.private_folder(staging)
            writer = cls(folder, create_database(staging), lock)
            writer._begin(new, new.values(public_key))
            with transaction(writer.connection, None):
                writer.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            # Do this before anyone can open the run: the memory may still name an earlier run of this folder.
            remember_head(writer)
            writer.connection.close()
            (staging / DATABASE).rename(folder / DATABASE)
            unfinished.finish_creation(folder)
            writer.connection = open_database(folder)
            writer._recorded = True
            writer._witnesses.recorded(writer, 1)
        except BaseException:
            lock.release()
            raise
        return writer

    def _begin(self, new: unfinished.NewRun, values: dict[str, Any]) -> None:
        """Record the first event in an empty database."""
        salted = list(add_salts(self.folder, dict(enumerate(new.sample_digests))).values())
        code = values["spec"].get("features", {}).get("module", "")
        consent = {"allowed_code": code} if code in allowed_code() else {}
        with transaction(self.connection):
            insert_clients(self.connection, enumerate(new.clients))
            self._record(
                "run created",
                {"run": values} | ({"sample_digests": salted} if salted else {}) | consent,
                NewRows(nodes=[PathNode(0, None, "initial", 0, 0)]),
                [NewModel(0, new.initial_model, kept=True)],
                new.layout,
            )

    @classmethod
    def open(cls, folder: Path, shared: Memory | None = None) -> RunWriter:
        """Open an existing run for writing: take its lock, check it, and remove the remains of a crash.

        Raises:
            RunBusyError: If another process is writing to the run.
            RunDamagedError: If the run fails a check.
        """
        kept_heads.witness_targets()  # refuse an invalid witness before anything is changed
        strange = next(files.strange_files(folder), None) if folder.is_dir() else None
        if strange:
            raise RunDamagedError(f"{folder} was changed by hand: {strange}. Nothing was done; see sifu verify")
        connection = open_database(folder)
        try:
            lock = files.WriterLock(folder / files.LOCK_FILE)
        except BaseException:
            connection.close()
            raise
        writer = cls(folder, connection, lock, shared)
        try:
            check_record(writer)
            check_seen(writer, writing=True)
            kept_heads.check_witnesses(writer)
            unfinished.finish_creation(folder)
            for name in files.FOLDERS:
                files.private_folder(folder / name)
            writer._remove_strays()
            writer.export_certificates()
            finish_rotation(folder, writer.value("public_key"))
            writer.copies_removed = unfinished.remove_unfinished_copies(folder)
            if (folder / SCRUB_FILE).exists():  # an erasure was interrupted: finish it first
                writer.scrub()
            erase_salts(writer)
        except BaseException:
            writer.close()
            raise
        return writer

    def close(self) -> None:
        """Remember the head and send it to the witnesses, then close the database and release the lock."""
        try:
            if self._recorded:
                remember_head(self)
                self._witnesses.tell_all(self)
        finally:
            super().close()
            self._lock.release()

    @files.uninterrupted()
    def record(self, new: NewEvent) -> Event:
        """Record one event with its rows, files and certificates; it is durable on return.

        Ctrl-C is deferred until the event is complete.
        """
        if new.for_good:
            files.write_atomically(self.folder / SCRUB_FILE, b"")
        payload, signed = new.content(), new.certificates.items()
        certificates = {key: json.dumps(certificate, indent=1, sort_keys=True) for key, certificate in signed}
        if certificates:
            payload["certificates"] = {
                form: hashlib.sha256(content.encode()).hexdigest() for (_, form), content in certificates.items()
            }
        layout, committing = self.layout, False
        try:
            with transaction(self.connection):
                for (request, form), content in certificates.items():
                    self.connection.execute("INSERT INTO certificates VALUES (?, ?, ?)", (request, form, content))
                if new.joined is not None:
                    clients = (*self.read_clients(), new.joined)
                    insert_clients(self.connection, [(len(clients) - 1, new.joined)])
                    now = {"client_count": str(len(clients)), "clients_digest": clients_digest(clients)}
                    payload["run"] = payload.get("run", {}) | now
                if new.joined_digest is not None:
                    client = int(payload["run"]["client_count"]) - 1
                    payload["sample_digest"] = add_salts(self.folder, {client: new.joined_digest})[client]
                event = self._record(new.kind, payload, new.rows, new.models, layout)
                committing = True
        except Exception:
            # After an error during the commit, the event may or may not survive a crash, so its files stay.
            # If it did not survive, the next opening deletes them as strays.
            # Delete files of this event only: some files of the next event may exist already.
            if not committing:
                new_files = {files.stored_path(self.folder, kind, key) for kind, key in new.files()}
                for path in new_files - self.stored_files():
                    path.unlink(missing_ok=True)
            raise
        self._recorded = True
        self._witnesses.recorded(self, event.seq)
        if "public_key" in payload.get("run", {}):
            self._signer = None  # the next event is signed with the new key
        dropped = ((kind, key) for kind in files.STORED for key in payload.get(f"dropped_{kind}", ()))
        files.remove_files([files.stored_path(self.folder, kind, key) for kind, key in dropped])
        if new.joined is not None or not payload.keys().isdisjoint(("subjects", "solve")):
            erase_salts(self)
        for (request, form), content in certificates.items():
            files.write_atomically(files.certificate_path(self.folder, request, form), content.encode())
        if new.for_good:
            self.scrub()
        return event

    def signer(self, public_key: str | None = None) -> Signer:
        """Return the signer of events; its key is read when first needed.

        Pass `public_key` while a run is being created, because no key is recorded yet.
        """
        if self._signer is None:
            self._signer = Signer(self.folder, public_key or self.value("public_key"))
        return self._signer

    def now(self) -> str:
        """Return the current time, or the time of the last event if the clock is behind it."""
        return max(utc_now(), self.events()[-1].time)

    def _remove_strays(self) -> None:
        """Delete temporary files of a crash, and models, statistics and releases that no row names."""
        named = self.stored_files()
        for kind, pattern in files.STORED.items():
            paths = sorted((self.folder / kind).glob("*"))
            files.remove_files([path for path in paths if pattern.fullmatch(path.name) and path not in named])
        files.remove_files(unnamed_releases(self))
        for name in ("", *files.FOLDERS):
            files.remove_files(sorted((self.folder / name).glob(files.TEMPORARY_PREFIX + "*")))

    def scrub(self) -> bool:
        """Remove deleted data from the database's pages and log, and files that may show it, such as the report.

        Returns:
            True if the erasure is complete, or False if another process was reading the database.
        """
        if (self.folder / REPORT).is_dir():
            shutil.rmtree(self.folder / REPORT)
        if read_held_out(self.folder, self.tip) is None:
            remove_standing(self.folder)
        if self.phase == "ready":
            remove_failure(self.folder)
        self._remove_strays()
        for name in ("", *files.FOLDERS):
            files.sync_folder(self.folder / name)
        done = scrub_database(self.connection)
        if done:
            (self.folder / SCRUB_FILE).unlink(missing_ok=True)
            files.sync_folder(self.folder)
        return done

    def _record(
        self, kind: str, payload: dict[str, Any], rows: NewRows, models: Sequence[NewModel], layout: ModelLayout
    ) -> Event:
        """Write files and rows, seal the event and apply its changes. Call this inside a transaction."""
        if models:
            payload["models"] = [self._write_model(model, layout) for model in models]
            payload["psi_max"] = {str(model.node): model.psi_max for model in models}
        if rows.nodes:
            payload["rows"] = {
                "first": rows.nodes[0].node,
                "last": rows.nodes[-1].node,
                "digest": rows_digest(rows.nodes, rows.participation),
            }
            insert_rows(self.connection, rows)
        last = self.connection.execute("SELECT seq, hash, time FROM events ORDER BY seq DESC LIMIT 1").fetchone()
        seq, previous = (last[0] + 1, last[1]) if last else (1, GENESIS)
        time = max(last[2], utc_now()) if last else utc_now()
        event = seal(previous, seq, time, kind, payload, secrets.token_bytes(NONCE_BYTES))
        created = payload["run"] if seq == 1 else None
        signer = self.signer(created["public_key"] if created else None)
        if signer.key is None and kind not in UNSIGNED:
            raise InputError(f"an event {kind!r} needs the operator's key, so nothing was recorded: {signer.reason}")
        signature = signer.sign(created["run"] if created else self.value("run"), event)
        text = event.payload.decode()
        self.connection.execute(
            "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (event.seq, event.time, event.kind, text, event.nonce, event.commitment, event.hash, signature),
        )
        for change in changes(kind, event.time, event.content):
            apply_change(self.connection, change)
        apply_change(self.connection, Change("run", ("head",), {"value": event.head}))
        return event

    def _write_model(self, model: NewModel, layout: ModelLayout) -> dict[str, Any]:
        path = files.stored_path(self.folder, "models", model.node)
        stored = self.query("SELECT digest FROM models WHERE node = ?", (model.node,))
        if stored:  # the model exists and is now marked as kept: its bytes never change
            content = files.read_content(path, f"the model file {path.name}", stored[0][0])
        else:
            salt = secrets.token_hex(files.SALT_BYTES)
            content = files.model_bytes(layout, model.vector, salt)
            files.write_atomically(path, content)
        return {
            "node": model.node,
            "kept": int(model.kept),
            "bytes": len(content),
            "digest": hashlib.sha256(content).hexdigest(),
            "nonce": secrets.token_hex(NONCE_BYTES),
        }

    def export_certificates(self) -> None:
        """Write each certificate to its file unless the file exists."""
        for request, form in self.query("SELECT request, form FROM certificates ORDER BY request, form"):
            path = files.certificate_path(self.folder, request, form)
            if not path.exists():
                files.write_atomically(path, self.certificates(request)[(request, form)].encode())
