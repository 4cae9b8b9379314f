"""Backups: uncompressed zip files, each with the files of a run, without its inbox, and a list of their digests.

A backup may come from a stranger, so restoring it executes nothing. Restoring accepts only regular files with the file
names of a run, and no more bytes than the list states. Every digest is checked. The run folder appears only when it is
complete.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import sqlite3
import zipfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from sifu.core.ledger import canonical_json
from sifu.errors import InputError, RunDamagedError
from sifu.store.client_accuracy import STANDING_FILE
from sifu.store.database import DATABASE
from sifu.store.files import (
    CERTIFICATES,
    FOLDERS,
    RELEASES,
    STORED,
    create_private,
    private_folder,
    room_to_write,
    sync_folder,
)
from sifu.store.keys import KEY_FILE
from sifu.store.reader import RunReader
from sifu.store.salts import SALTS_FILE
from sifu.store.unfinished import remove_copies_in, unfinished_backup, unfinished_restoration
from sifu.version import FORMAT, OTHER_FORMAT

BACKUP = f"sifu backup {FORMAT}"
MANIFEST = "manifest.json"
NAME = re.compile(
    "|".join(re.escape(name) for name in (DATABASE, KEY_FILE, STANDING_FILE, SALTS_FILE))
    + "".join(f"|{kind}/{pattern.pattern}" for kind, pattern in STORED.items())
    + rf"|{CERTIFICATES}/[A-Za-z0-9][A-Za-z0-9._-]{{0,80}}\.json"
    + rf"|{RELEASES}/\d{{1,12}}\.safetensors"
)
"""Pattern of the names of all files in a backup, relative to the run folder."""
LONGEST_NAME = 120
MOST_FILES = 1_000_000
LARGEST_MANIFEST = 256 << 20
PIECE = 1 << 20


def write_backup(reader: RunReader, target: Path) -> None:
    """Write the whole run to one file, completely or not at all; the caller must hold the run's lock."""
    remove_copies_in(target.absolute().parent)
    with room_to_write(target), unfinished_backup(reader.folder, target.parent) as temporary:
        copied = temporary.with_name(temporary.name + ".db")
        try:
            os.close(create_private(copied))
            with closing(sqlite3.connect(copied)) as copy:
                reader.connection.backup(copy)
                copy.execute("PRAGMA journal_mode=DELETE")  # leaves one file, without -wal and -shm
            folder = reader.folder
            listed = {DATABASE: copied, KEY_FILE: folder / KEY_FILE}
            listed |= {name: folder / name for name in (STANDING_FILE, SALTS_FILE) if (folder / name).exists()}
            for name in FOLDERS:
                paths = sorted((folder / name).iterdir())
                listed |= {f"{name}/{path.name}": path for path in paths if NAME.fullmatch(f"{name}/{path.name}")}
            content: dict[str, Any] = {"format": BACKUP, "head": reader.value("head"), "files": {}}
            with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
                for name, path in listed.items():
                    archive.write(path, name)
                    with path.open("rb") as stream:
                        digest = hashlib.file_digest(stream, "sha256").hexdigest()
                    content["files"][name] = {"bytes": path.stat().st_size, "digest": digest}
                archive.writestr(MANIFEST, canonical_json(content))
            with temporary.open("rb") as stream:
                os.fsync(stream.fileno())
            copied.unlink()  # a kill after the next line leaves no copy of the database
            os.replace(temporary, target)
            sync_folder(target.parent)
        except sqlite3.OperationalError as error:
            raise InputError(f"the backup {target} cannot be written: {error}") from error


@contextmanager
def read_backup(file: Path, folder: Path) -> Iterator[Path]:
    """Unpack a backup beside `folder`, and rename the unpacked run to `folder` if the block succeeds.

    If the block, which gets the folder with the unpacked run, fails, that folder is deleted.

    Raises:
        InputError: If `folder` exists and is not empty, or the file is not a valid backup.
        RunDamagedError: If the backup holds no database.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not empty: restore the backup into a new folder")
    if not folder.parent.is_dir():
        raise InputError(f"folder {folder.parent} does not exist: make it first, or restore elsewhere")
    for place in {folder.absolute().parent, file.absolute().parent}:
        remove_copies_in(place)
    with unfinished_restoration(folder.parent) as staged:
        with room_to_write(folder):
            _unpack(file, staged)
            for name in ("", *FOLDERS):
                sync_folder(staged / name)
        yield staged
        if folder.exists():
            folder.rmdir()
        os.rename(staged, folder)
        sync_folder(folder.parent)


def _unpack(file: Path, staged: Path) -> None:
    if file.exists() and not file.is_file():  # a pipe could block forever
        raise InputError(f"{file} is not a backup: it is not a regular file")
    for name in FOLDERS:
        private_folder(staged / name)
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            names = [member.filename for member in members]
            if len(names) > MOST_FILES or len(set(names)) != len(names):
                raise ValueError("it has too many files, or a file twice")
            listed = _manifest(archive)
            if set(names) != {*listed, MANIFEST}:
                raise ValueError("its files differ from its list of files")
            for member in members:
                if member.filename != MANIFEST:
                    _unpack_one(archive, member, listed[member.filename], staged / member.filename)
    except OSError as error:
        # EINVAL: a damaged archive contains a negative offset. EISDIR: `file` is a folder.
        if error.errno not in (None, errno.EINVAL, errno.EISDIR):
            raise
        raise InputError(f"{file} is not a backup: {error}") from error
    except (zipfile.BadZipFile, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise InputError(f"{file} is not a backup of sifu, or is damaged: {error}") from error
    if not (staged / DATABASE).is_file():
        raise RunDamagedError(f"{file} holds no {DATABASE}")


def _manifest(archive: zipfile.ZipFile) -> dict[str, dict[str, Any]]:
    info = archive.getinfo(MANIFEST)
    if info.file_size > LARGEST_MANIFEST or info.compress_type != zipfile.ZIP_STORED:
        raise ValueError("its list of files is too large")
    with archive.open(info) as stream:
        content = json.loads(stream.read(LARGEST_MANIFEST + 1))
    if content["format"] != BACKUP:
        raise InputError(f"the backup cannot be restored: {OTHER_FORMAT}")
    listed: dict[str, dict[str, Any]] = content["files"]
    if not isinstance(listed, dict):
        raise ValueError("its list of files is not valid")
    for name, entry in listed.items():
        named = len(name) <= LONGEST_NAME and NAME.fullmatch(name)
        if not named or not isinstance(entry["bytes"], int) or not isinstance(entry["digest"], str):
            raise ValueError(f"its list of files has the invalid entry {name[:60]!r}")
    return listed


def _unpack_one(archive: zipfile.ZipFile, info: zipfile.ZipInfo, listed: dict[str, Any], target: Path) -> None:
    """Unpack one file without reading more bytes than the list states."""
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != listed["bytes"]:
        raise ValueError(f"{info.filename} is compressed, or does not have the length in the list")
    digest, left = hashlib.sha256(), int(listed["bytes"])
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with archive.open(info) as stream, os.fdopen(descriptor, "wb") as output:
        while left > 0:
            piece = stream.read(min(PIECE, left))
            if not piece:
                raise ValueError(f"{info.filename} ends early")
            digest.update(piece)
            output.write(piece)
            left -= len(piece)
        output.flush()
        os.fsync(output.fileno())
    if digest.hexdigest() != listed["digest"]:
        raise ValueError(f"{info.filename} does not have the digest in the list")
