"""Runs that are being created, and unfinished copies of a run made by a backup or a restoration.

The database of a new run gets its final name only when it is complete; until then the folder is not a run.

A copy holds the operator's key, and may hold data that has been erased since. Its file name identifies it in any
folder. The process that writes a copy holds a lock on it. The kernel releases the lock when the process ends, so a
copy without a lock is abandoned. A backup can be written anywhere, so the run records its path before the copy begins.
Every command that writes to a run deletes abandoned copies: the recorded copy, and copies next to the run folder.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sifu.core.layout import ModelLayout, Vector
from sifu.errors import InputError, RunDamagedError
from sifu.store import files
from sifu.store.database import CLIENTS_FILE, DATABASE, rest_of_a_run
from sifu.store.history_tables import clients_digest
from sifu.store.keys import KEY_FILE
from sifu.store.reader import GROUP_KEY, NOISE_GIVEN
from sifu.store.salts import SALTS_FILE
from sifu.theory.facts import ClientProfile, TrainingFacts
from sifu.theory.merging import KEY_BYTES

STAGING = ".new"
CREATING = ".creating"
_OWN_FILES = {files.LOCK_FILE, *files.FOLDERS, KEY_FILE, SALTS_FILE, STAGING, CREATING} | {
    files.TEMPORARY_PREFIX + name for name in (KEY_FILE, SALTS_FILE)
}


def check_free(folder: Path) -> None:
    """Check that a folder is empty, or holds only the remains of an interrupted creation.

    Raises:
        InputError: If the folder holds anything else.
        RunDamagedError: If the folder holds a run whose database is missing.
    """
    # Only remains of an interrupted creation may be deleted; the creation writes its marker first.
    present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    allowed = {CLIENTS_FILE} | (_OWN_FILES if CREATING in present else {files.LOCK_FILE})
    if rest_of_a_run(folder):
        raise RunDamagedError(
            f"{folder} holds a run whose {DATABASE} is missing: restore it from a backup (sifu restore), or choose "
            "another folder. Nothing was changed"
        )
    if (folder.exists() and not folder.is_dir()) or present - allowed:
        raise InputError(f"{folder} exists and is not empty: choose another folder for the run")


def clear_unfinished(folder: Path) -> None:
    """Delete the remains of an interrupted creation; a folder without a database is not a run yet."""
    for name in _OWN_FILES - {files.LOCK_FILE, CREATING}:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def finish_creation(folder: Path) -> None:
    """Delete the files that a creation needs only until the database has its final name."""
    if (folder / CREATING).exists() or (folder / STAGING).exists():
        shutil.rmtree(folder / STAGING, ignore_errors=True)
        files.sync_folder(folder)
        (folder / CREATING).unlink(missing_ok=True)
        files.sync_folder(folder)


@dataclass(frozen=True)
class NewRun:
    """Content of a new run.

    `given_spec` is the spec as the user gave it, and `spec` the merged one. `sample_digests` has the digest of each
    client's samples, if available (`store.salts`). `noise_given` is True if the caller gives the source of noise.
    """

    given_spec: Mapping[str, Any]
    spec: Mapping[str, Any]
    layout: ModelLayout
    clients: Sequence[ClientProfile]
    facts: TrainingFacts
    versions: Mapping[str, str]
    initial_model: Vector
    sample_digests: Sequence[str] = ()
    noise_given: bool = False

    def values(self, public_key: str) -> dict[str, Any]:
        """Return the values that the first event records for the run."""
        facts, spec = self.facts, dict(self.spec)
        recorded_facts = asdict(facts) | {"participation": str(facts.participation), "outside": list(facts.outside)}
        values = {
            "run": secrets.token_hex(8),
            "asked": dict(self.given_spec),
            "spec": spec,
            "layout": asdict(self.layout),
            "facts": recorded_facts,
            "versions": dict(self.versions),
            "public_key": public_key,
            "client_count": str(len(self.clients)),
            "clients_digest": clients_digest(self.clients),
            "tip": "0",
            "phase": "training",
        }
        if spec["groups"]["count"]:
            values[GROUP_KEY] = new_group_key()
        if self.noise_given:
            values[NOISE_GIVEN] = "given"
        return values


def new_group_key() -> str:
    """Return a new key of the hash that assigns clients to groups."""
    return secrets.token_hex(KEY_BYTES)


COPYING_FILE = "copying"
"""File that exists while a backup of the run is being written: the path of the unfinished copy."""
_NAME = re.compile(re.escape(files.TEMPORARY_PREFIX) + r"sifu-(?:backup|restore)-[0-9a-f]{16}")
_DATABASE_ENDINGS = ("", ".db", ".db-journal", ".db-wal", ".db-shm")
"""File name endings of an unfinished backup and of its copy of the database."""
_ATTEMPTS = 5
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UnfinishedCopy:
    """An abandoned copy; `reachable` is True if its folder exists."""

    path: Path
    reachable: bool


@contextmanager
def _held_copy(
    kind: str, folder: Path, begin: Callable[[Path], None], end: Callable[[], None] = lambda: None
) -> Iterator[Path]:
    """Create and lock a copy under a new name in `folder`; after the block, delete it and call `end`."""
    descriptor = None
    try:
        for _ in range(_ATTEMPTS):
            path = folder / f"{files.TEMPORARY_PREFIX}sifu-{kind}-{secrets.token_hex(8)}"
            begin(path)
            descriptor = _hold(path)
            if descriptor is not None:
                break
        else:
            raise InputError(f"a new file in {folder} is deleted at once by another process: choose another folder")
        yield path
    finally:
        try:
            _remove(path)
            end()
        finally:
            if descriptor is not None:
                os.close(descriptor)


def unfinished_backup(run: Path, folder: Path) -> AbstractContextManager[Path]:
    """Return a context manager that creates a private file in `folder`, to which a backup of `run` is written.

    The run records the path until the block ends.
    """

    def begin(path: Path) -> None:
        files.write_atomically(run / COPYING_FILE, f"{path}\n".encode())
        os.close(files.create_private(path))

    def end() -> None:
        (run / COPYING_FILE).unlink(missing_ok=True)
        files.sync_folder(run)

    return _held_copy("backup", folder.absolute(), begin, end)


def unfinished_restoration(folder: Path) -> AbstractContextManager[Path]:
    """Return a context manager that creates a private folder in `folder`, into which a backup is unpacked.

    The new folder is deleted after the block unless it was renamed.
    """
    return _held_copy("restore", folder, files.private_folder)


def unfinished_copies(run: Path) -> Iterator[UnfinishedCopy]:
    """Yield abandoned copies: the copy that the run recorded, and copies next to its folder."""
    noted = _noted(run)
    if noted is not None and not noted.parent.is_dir():
        yield UnfinishedCopy(noted, reachable=False)
    elif noted is not None and noted.parent != run.absolute().parent and _is_there(noted) and not _is_held(noted):
        yield UnfinishedCopy(noted, reachable=True)
    for path in unfinished_copies_in(run.absolute().parent):
        yield UnfinishedCopy(path, reachable=True)


def unfinished_copies_in(folder: Path) -> list[Path]:
    """Return the copies in a folder that no process is writing."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.name.startswith(files.TEMPORARY_PREFIX + "sifu-")]
    except OSError:
        return []  # this account cannot list the folder; its owner's commands clean it up
    paths = sorted({folder / match[0] for name in names if (match := _NAME.match(name))})
    return [path for path in paths if not _is_held(path)]


def remove_copies_in(folder: Path) -> list[str]:
    """Delete the abandoned copies in a folder, and return their paths."""
    removed = []
    for path in unfinished_copies_in(folder):
        try:
            _remove(path)
        except OSError as error:
            log.warning("an unfinished copy of a run, %s, cannot be deleted: %s", path, error.strerror)
            continue
        log.warning("deleted %s: an interrupted backup or restore left it, with a copy of the operator's key", path)
        removed.append(str(path))
    return removed


def remove_unfinished_copies(run: Path) -> tuple[str, ...]:
    """Delete abandoned copies: the recorded copy, and copies next to the run. The caller must hold the run's lock.

    The record stays while the folder it names does not exist: the copy may be on a disk that is not mounted.

    Returns:
        Paths of the deleted copies.
    """
    removed = remove_copies_in(run.absolute().parent)
    noted = _noted(run)
    if noted is not None and noted.parent.is_dir():
        removed += remove_copies_in(noted.parent)
    if (run / COPYING_FILE).exists() and (noted is None or (noted.parent.is_dir() and not _is_there(noted))):
        (run / COPYING_FILE).unlink(missing_ok=True)
        files.sync_folder(run)
    return tuple(removed)


def _noted(run: Path) -> Path | None:
    """Return the recorded path of an unfinished backup, or None if there is none, or its name is not that of a copy."""
    try:
        path = Path(files.read_plain(run / COPYING_FILE).decode().rstrip("\n"))
    except (OSError, UnicodeDecodeError):
        return None
    return path if path.is_absolute() and _NAME.fullmatch(path.name) else None


def _hold(path: Path) -> int | None:
    """Return a descriptor with a lock on a copy, or None if another process has locked or deleted it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    if not path.exists():
        os.close(descriptor)
        return None
    return descriptor


def _is_held(path: Path) -> bool:
    """Return whether a process holds the lock of a copy, or this account cannot open the copy."""
    try:
        descriptor = _hold(path)
    except OSError:
        return True  # this account may not open the copy
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None and os.path.lexists(path)


def _is_there(path: Path) -> bool:
    return any(os.path.lexists(f"{path}{ending}") for ending in _DATABASE_ENDINGS)


def _remove(path: Path) -> None:
    """Delete a copy, its key first."""
    if path.is_dir() and not path.is_symlink():
        (path / KEY_FILE).unlink(missing_ok=True)
        shutil.rmtree(path)
    for ending in _DATABASE_ENDINGS:
        path.with_name(path.name + ending).unlink(missing_ok=True)
    if path.parent.is_dir():
        files.sync_folder(path.parent)
