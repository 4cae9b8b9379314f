"""Copies of a whole run that a backup or a restoration was still making when its process ended.

Such a copy holds the operator's key, and may hold what was erased since. It has a name by which it is known wherever it
lies, and its process holds a lock on it, which the kernel releases however the process ends: a copy without a lock is
abandoned. A backup can be written anywhere, so the run notes its path before the copy begins. Every command that
writes to a run removes such copies: those it noted, and those next to the run folder.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sifu.errors import InputError
from sifu.store.files import TEMPORARY_PREFIX, create_private, private_folder, read_plain, sync_folder, write_atomically
from sifu.store.keys import KEY_FILE

COPYING_FILE = "copying"
"""Exists while a backup of the run is being written: where its unfinished copy lies."""
_NAME = re.compile(re.escape(TEMPORARY_PREFIX) + r"sifu-(?:backup|restore)-[0-9a-f]{16}")
_DATABASE_ENDINGS = ("", ".db", ".db-journal", ".db-wal", ".db-shm")
"""A backup's copy of the database has these endings while it is written."""
_ATTEMPTS = 5
TAKEN_AWAY = "a new file in {folder} is taken away by another process at once: choose another folder"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UnfinishedCopy:
    """An abandoned copy; `reachable` says whether the folder it lies in exists."""

    path: Path
    reachable: bool


@contextmanager
def unfinished_backup(run: Path, folder: Path) -> Iterator[Path]:
    """A new private file in `folder` to write a backup of `run` into, noted in the run until the block has ended."""
    descriptor = None
    try:
        for _ in range(_ATTEMPTS):
            path = folder.absolute() / _new_name("backup")
            write_atomically(run / COPYING_FILE, f"{path}\n".encode())
            os.close(create_private(path))
            descriptor = _hold(path)
            if descriptor is not None:
                break
        else:
            raise InputError(TAKEN_AWAY.format(folder=folder))
        yield path
    finally:
        try:
            _remove(path)
            (run / COPYING_FILE).unlink(missing_ok=True)
            sync_folder(run)
        finally:
            if descriptor is not None:
                os.close(descriptor)


@contextmanager
def unfinished_restoration(folder: Path) -> Iterator[Path]:
    """A new private folder in `folder` to unpack a backup into; gone after the block unless it got another name."""
    for _ in range(_ATTEMPTS):
        path = folder / _new_name("restore")
        private_folder(path)
        descriptor = _hold(path)
        if descriptor is not None:
            break
    else:
        raise InputError(TAKEN_AWAY.format(folder=folder))
    try:
        yield path
    finally:
        try:
            _remove(path)
        finally:
            os.close(descriptor)


def unfinished_copies(run: Path) -> Iterator[UnfinishedCopy]:
    """Copies that the run noted, or that lie next to its folder, and that no process is writing."""
    noted = _noted(run)
    if noted is not None and not noted.parent.is_dir():
        yield UnfinishedCopy(noted, reachable=False)
    elif noted is not None and noted.parent != run.absolute().parent and _is_there(noted) and not _is_held(noted):
        yield UnfinishedCopy(noted, reachable=True)
    for path in unfinished_copies_in(run.absolute().parent):
        yield UnfinishedCopy(path, reachable=True)


def unfinished_copies_in(folder: Path) -> list[Path]:
    """Copies in a folder that no process is at work on."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.name.startswith(TEMPORARY_PREFIX + "sifu-")]
    except OSError:
        return []  # a folder that may not be listed; its owner's commands take care of it
    paths = sorted({folder / match[0] for name in names if (match := _NAME.match(name))})
    return [path for path in paths if not _is_held(path)]


def remove_copies_in(folder: Path) -> list[str]:
    """Take away the unfinished copies in a folder; returns where they lay."""
    removed = []
    for path in unfinished_copies_in(folder):
        try:
            _remove(path)
        except OSError as error:
            log.warning("an unfinished copy of a run, %s, cannot be taken away: %s", path, error.strerror)
            continue
        log.warning("took away %s: an interrupted backup or restore left it, with a copy of the operator's key", path)
        removed.append(str(path))
    return removed


def remove_unfinished_copies(run: Path) -> tuple[str, ...]:
    """Remove every copy that the run noted or that lies next to it; the caller holds the run's lock.

    A note stays as long as the folder it names is not there: a disk that is not mounted may hold the copy.
    """
    removed = remove_copies_in(run.absolute().parent)
    noted = _noted(run)
    if noted is not None and noted.parent.is_dir():
        removed += remove_copies_in(noted.parent)
    if (run / COPYING_FILE).exists() and (noted is None or (noted.parent.is_dir() and not _is_there(noted))):
        (run / COPYING_FILE).unlink(missing_ok=True)
        sync_folder(run)
    return tuple(removed)


def _noted(run: Path) -> Path | None:
    """Where the run says that an unfinished backup lies; a folder from a stranger can name nothing but such a copy."""
    try:
        path = Path(read_plain(run / COPYING_FILE).decode().rstrip("\n"))
    except (OSError, UnicodeDecodeError):
        return None
    return path if path.is_absolute() and _NAME.fullmatch(path.name) else None


def _new_name(kind: str) -> str:
    return f"{TEMPORARY_PREFIX}sifu-{kind}-{secrets.token_hex(8)}"


def _hold(path: Path) -> int | None:
    """A descriptor with a lock on a new copy; None if another process removed it as abandoned just before."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
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
    """Whether a process is at work on a copy."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False  # only its database is left
    except OSError:
        return True  # not ours to judge
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _is_there(path: Path) -> bool:
    return any(os.path.lexists(f"{path}{ending}") for ending in _DATABASE_ENDINGS)


def _remove(path: Path) -> None:
    """Take a copy away, its key first."""
    if path.is_dir() and not path.is_symlink():
        (path / KEY_FILE).unlink(missing_ok=True)
        shutil.rmtree(path)
    for ending in _DATABASE_ENDINGS:
        path.with_name(path.name + ending).unlink(missing_ok=True)
    if path.parent.is_dir():
        sync_folder(path.parent)
