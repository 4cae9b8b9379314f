"""What is not finished: a run that is being created, and copies of a run that a backup or a restoration is making.

The database of a new run appears under its name only when it is whole; until then the folder is not a run.

A copy holds the operator's key, and may hold what was erased since. It has a name by which it is known wherever it
lies, and its process holds a lock on it, which the kernel releases however the process ends: a copy without a lock is
abandoned. A backup can be written anywhere, so the run notes its path before the copy begins. Every command that
writes to a run removes such copies: those it noted, and those next to the run folder.
"""

from __future__ import annotations

import fcntl
import hashlib
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
from sifu.core.ledger import LOCAL_RATES
from sifu.errors import InputError, RunDamagedError
from sifu.store import files
from sifu.store.database import CLIENTS_FILE, DATABASE, rest_of_a_run
from sifu.store.history_tables import clients_digest
from sifu.store.keys import HEAD_FILE, KEY_FILE
from sifu.store.reader import GROUP_KEY, TUNED_LAYOUT
from sifu.store.salts import SALTS_FILE
from sifu.theory.facts import ClientProfile, TrainingFacts
from sifu.theory.merging import KEY_BYTES

STAGING = ".new"
CREATING = ".creating"
_OWN_FILES = {files.LOCK_FILE, *files.FOLDERS, KEY_FILE, HEAD_FILE, SALTS_FILE, STAGING, CREATING} | {
    files.TEMPORARY_PREFIX + name for name in (KEY_FILE, HEAD_FILE, SALTS_FILE)
}


def check_free(folder: Path) -> None:
    """Refuse a folder that holds anything but the rest of a creation that was cut short."""
    # Only what a creation of ours left behind may be cleared away: its marker was written first.
    present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    allowed = {CLIENTS_FILE} | (_OWN_FILES if CREATING in present else {files.LOCK_FILE})
    if rest_of_a_run(folder):
        raise RunDamagedError(
            f"{folder} holds the rest of a run whose {DATABASE} is gone: put it back from a backup (sifu restore), "
            "or choose another folder. Nothing was changed"
        )
    if (folder.exists() and not folder.is_dir()) or present - allowed:
        raise InputError(f"{folder} exists and is not empty: choose another folder for the run")


def clear_unfinished(folder: Path) -> None:
    """Remove what an interrupted creation left; a folder without a database is not a run yet."""
    for name in _OWN_FILES - {files.LOCK_FILE, CREATING}:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def finish_creation(folder: Path) -> None:
    """Take away what a creation needs only until the database has its name."""
    if (folder / CREATING).exists() or (folder / STAGING).exists():
        shutil.rmtree(folder / STAGING, ignore_errors=True)
        files.sync_folder(folder)
        (folder / CREATING).unlink(missing_ok=True)
        files.sync_folder(folder)


@dataclass(frozen=True)
class NewRun:
    """What a run begins with.

    `sample_digests` are those of each client's samples where they are available (`store.salts`); `tuned_layout` is
    that of the models of groups, where they tune a network.
    """

    given_spec: Mapping[str, Any]
    spec: Mapping[str, Any]
    layout: ModelLayout
    clients: Sequence[ClientProfile]
    facts: TrainingFacts
    versions: Mapping[str, str]
    initial_model: Vector
    sample_digests: Sequence[str] = ()
    tuned_layout: ModelLayout | None = None

    def values(self, public_key: str, salt: str) -> dict[str, Any]:
        """What the first event says of the run; `salt` is that of the digest of clients."""
        facts, spec = self.facts, dict(self.spec)
        recorded_facts = asdict(facts) | {"participation": str(facts.participation), "outside": list(facts.outside)}
        if not facts.module:
            del recorded_facts["module"]
        if self.sealed_rate():
            recorded_facts["local_rate"], spec["local"] = 0.0, {**spec["local"], "rate": "auto"}
        values = {
            "run": secrets.token_hex(8),
            "asked": dict(self.given_spec),
            "spec": spec,
            "layout": asdict(self.layout),
            "facts": recorded_facts,
            "versions": dict(self.versions),
            "public_key": public_key,
            "client_count": str(len(self.clients)),
            "clients_digest": clients_digest(self.clients, salt),
            "tip": "0",
            "phase": "training",
        }
        if spec["groups"]["count"]:
            values[GROUP_KEY] = _group_key(spec).hex()
        if self.tuned_layout is not None:
            values[TUNED_LAYOUT] = asdict(self.tuned_layout)
        return values

    def sealed_rate(self) -> dict[str, Any]:
        """An automatic local rate, under its key; it follows from everyone's data, so it is sealed, not in the open."""
        automatic = self.given_spec["local"]["rate"] == "auto" and self.facts.local_rate > 0.0
        return {LOCAL_RATES: {"0": self.facts.local_rate}} if automatic else {}


def _group_key(spec: Mapping[str, Any]) -> bytes:
    """The key of the hash that puts clients into groups: of the seed where noise is too, for experiments."""
    if spec["privacy"]["noise"] == "seeded":
        return hashlib.sha256(f"{spec['seed']}:groups".encode()).digest()
    return secrets.token_bytes(KEY_BYTES)


COPYING_FILE = "copying"
"""Exists while a backup of the run is being written: where its unfinished copy lies."""
_NAME = re.compile(re.escape(files.TEMPORARY_PREFIX) + r"sifu-(?:backup|restore)-[0-9a-f]{16}")
_DATABASE_ENDINGS = ("", ".db", ".db-journal", ".db-wal", ".db-shm")
"""A backup's copy of the database has these endings while it is written."""
_ATTEMPTS = 5
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UnfinishedCopy:
    """An abandoned copy; `reachable` says whether the folder it lies in exists."""

    path: Path
    reachable: bool


@contextmanager
def _held_copy(
    kind: str, folder: Path, begin: Callable[[Path], None], end: Callable[[], None] = lambda: None
) -> Iterator[Path]:
    """A copy in `folder` under a new name, held until the block has ended; `end` comes once it is taken away."""
    descriptor = None
    try:
        for _ in range(_ATTEMPTS):
            path = folder / f"{files.TEMPORARY_PREFIX}sifu-{kind}-{secrets.token_hex(8)}"
            begin(path)
            descriptor = _hold(path)
            if descriptor is not None:
                break
        else:
            raise InputError(f"a new file in {folder} is taken away by another process at once: choose another folder")
        yield path
    finally:
        try:
            _remove(path)
            end()
        finally:
            if descriptor is not None:
                os.close(descriptor)


def unfinished_backup(run: Path, folder: Path) -> AbstractContextManager[Path]:
    """A new private file in `folder` to write a backup of `run` into, noted in the run until the block has ended."""

    def begin(path: Path) -> None:
        files.write_atomically(run / COPYING_FILE, f"{path}\n".encode())
        os.close(files.create_private(path))

    def end() -> None:
        (run / COPYING_FILE).unlink(missing_ok=True)
        files.sync_folder(run)

    return _held_copy("backup", folder.absolute(), begin, end)


def unfinished_restoration(folder: Path) -> AbstractContextManager[Path]:
    """A new private folder in `folder` to unpack a backup into; gone after the block unless it got another name."""
    return _held_copy("restore", folder, files.private_folder)


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
            names = [entry.name for entry in entries if entry.name.startswith(files.TEMPORARY_PREFIX + "sifu-")]
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
        files.sync_folder(run)
    return tuple(removed)


def _noted(run: Path) -> Path | None:
    """Where the run says that an unfinished backup lies; a folder from a stranger can name nothing but such a copy."""
    try:
        path = Path(files.read_plain(run / COPYING_FILE).decode().rstrip("\n"))
    except (OSError, UnicodeDecodeError):
        return None
    return path if path.is_absolute() and _NAME.fullmatch(path.name) else None


def _hold(path: Path) -> int | None:
    """A descriptor with a lock on a copy; None if another process has it, or removed it as abandoned just before."""
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
    """Whether a process is at work on a copy; of one of which only the database is left, none is."""
    try:
        descriptor = _hold(path)
    except OSError:
        return True  # not ours to judge
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None and os.path.lexists(path)


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
        files.sync_folder(path.parent)
