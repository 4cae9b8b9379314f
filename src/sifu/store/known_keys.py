"""The operators' keys as this user knows them: remembered outside the run folder when a run is first used.

What lies in a run folder cannot say whose key it should be signed with: a folder can be signed anew as a whole. So the
key of every run that is made or opened is remembered in a file of the user's (as ssh does with `known_hosts`), under
the run's id, which the first event names and which copies, moves and backups keep. From then on the run must be signed
with that key, or with one that it signed for (`sifu key rotate`). The folder's path is remembered, too: another run in
its place, which was never used here, is not taken for it. `sifu key accept` accepts a change deliberately.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sifu.errors import InputError, RunDamagedError
from sifu.store.checkpoints import check_keys, keys_of
from sifu.store.files import TEMPORARY_PREFIX
from sifu.store.keys import KEY_FILE, is_encrypted
from sifu.store.reader import RunReader

KNOWN_KEYS = "SIFU_KNOWN_KEYS"
"""The file to remember keys in, instead of known_keys in the folder sifu of the user's configuration."""
LARGEST_FILE = 64 << 20
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KnownRun:
    """A run as it was seen here: its keys, the latest last, and whether the private one lay there encrypted."""

    keys: tuple[str, ...]
    encrypted: bool
    folder: str


@dataclass
class KnownKeys:
    """Everything that the file holds."""

    runs: dict[str, KnownRun] = field(default_factory=dict)
    folders: dict[str, str] = field(default_factory=dict)
    """The run that was last seen in each folder."""

    def add(self, run: str, key: str, encrypted: bool, folder: str, accepted: bool) -> None:
        """A line of the file: a later one adds to the earlier ones, unless the user accepted it in their place."""
        earlier = None if accepted else self.runs.get(run)
        keys = () if earlier is None else tuple(before for before in earlier.keys if before != key)
        self.runs[run] = KnownRun((*keys, key), encrypted, folder)
        self.folders[folder] = run


_read: dict[Path, tuple[tuple[int, int, int], KnownKeys]] = {}
"""What was read of a file, as long as it does not change: runs are opened again and again."""


def known_keys_file() -> Path:
    """Where this user's known keys are."""
    named = os.environ.get(KNOWN_KEYS, "").strip()
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")) / "sifu" / "known_keys"


def read_known_keys(path: Path) -> KnownKeys:
    """The file's content; one that cannot be read stops everything, since it could not warn either."""
    try:
        status = path.stat()
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
        if path in _read and _read[path][0] == stamp:
            return _read[path][1]
        if status.st_size > LARGEST_FILE:
            raise InputError(f"{path} has {status.st_size} bytes, far more than known keys take")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return KnownKeys()
    except (OSError, ValueError) as error:
        raise InputError(f"the known keys in {path} cannot be read: {error}. See {KNOWN_KEYS}") from error
    content = KnownKeys()
    for number, line in enumerate(lines, start=1):
        try:
            entry: dict[str, Any] = json.loads(line)
            texts = [str(entry[name]) for name in ("run", "key", "folder")]
            content.add(texts[0], texts[1], bool(entry["encrypted"]), texts[2], bool(entry.get("accepted")))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(f"{path}, line {number}, names no key of a run: mend it, or take the line out") from error
    _read[path] = (stamp, content)
    return content


def key_problem(reader: RunReader) -> str | None:
    """A sentence if the run is not signed with the key that is known here, or with one that it signed for."""
    run, key = reader.value("run"), reader.value("public_key")
    path = known_keys_file()
    remembered = read_known_keys(path)
    earlier, place = remembered.runs.get(run), _place(reader.folder)
    way_out = f"If the operator published this key, and you know why: sifu key accept {reader.folder} {key}"
    if earlier is None:
        before = remembered.folders.get(place)
        if before is None:
            return None
        return (
            f"key: {reader.folder} held run {before} when it was last used here, and now holds run {run[:40]}, signed "
            f"with the key {key}, which was never seen here ({path}). {way_out}"
        )
    if key != earlier.keys[-1] and not _signed_for(reader, earlier.keys[-1]):
        return (
            f"key: run {run} is known here ({path}) by the key {earlier.keys[-1]}, and is now signed with {key}, for "
            f"which that key did not sign: its history was written anew, or is an older one. {way_out}"
        )
    if earlier.encrypted and (reader.folder / KEY_FILE).is_file() and not is_encrypted(reader.folder):
        return (
            f"key: {KEY_FILE} of run {run} was encrypted when it was last used here, and now lies there without a "
            f"passphrase. Put the encrypted one back. {way_out}"
        )
    return None


def _signed_for(reader: RunReader, remembered: str) -> bool:
    """Whether the keys of the ledger lead from a known one to the one in force, each change signed by both."""
    return remembered in [key for _, key in keys_of(reader)] and next(check_keys(reader), None) is None


def check_known_key(reader: RunReader) -> None:
    """Stop if the run's key is not the one that is known here; remember it if it is seen for the first time."""
    problem = key_problem(reader)
    if problem:
        raise RunDamagedError(f"{problem}. Nothing was done")
    remember_key(reader)


def remember_key(reader: RunReader, *, accepted: bool = False) -> None:
    """Note the run's key and folder, if that is new; if the file cannot be written, warn and continue."""
    run, key, place = reader.value("run"), reader.value("public_key"), _place(reader.folder)
    path = known_keys_file()
    remembered = read_known_keys(path)
    earlier, encrypted = remembered.runs.get(run), is_encrypted(reader.folder)
    if earlier is not None and not accepted:
        encrypted = encrypted or earlier.encrypted
        if (earlier.keys[-1], earlier.encrypted) == (key, encrypted) and remembered.folders.get(place) == run:
            return
    if reader.folder.name.startswith(TEMPORARY_PREFIX):
        # A restoration that is still at work: its folder is remembered under the name that it gets.
        if earlier is None or not accepted:
            return
        place = earlier.folder
    seen = () if earlier is None or accepted else earlier.keys
    new_keys = [named for _, named in keys_of(reader) if named != key and named not in seen] + [key]
    entries = [{"run": run, "key": named, "encrypted": encrypted, "folder": place} for named in new_keys]
    if accepted:
        entries[0]["accepted"] = True
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.write(descriptor, b"".join(json.dumps(entry).encode() + b"\n" for entry in entries))
        finally:
            os.close(descriptor)
    except OSError as error:
        log.warning(
            "the key of %s cannot be remembered in %s (%s), so a change of it would go unnoticed: name a file that can "
            "be written with %s",
            reader.folder,
            path,
            error.strerror,
            KNOWN_KEYS,
        )


def known_key_problem(run: str, key: str) -> str | None:
    """A sentence if a certificate of a run that is known here is signed with a key that never was that run's."""
    earlier = read_known_keys(known_keys_file()).runs.get(run)
    if earlier is None or key in earlier.keys:
        return None
    return f"key: run {run} is known here by the key {earlier.keys[-1]}, the certificate is signed with {key}"


def _place(folder: Path) -> str:
    return str(folder.resolve())
