"""Atomic and durable file operations, file names of a run folder, and the writer's lock.

A run folder contains only regular files and folders. The kernel releases the lock when the process ends. Ctrl-C is
deferred while an event is committed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import signal
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import BinaryIO

import numpy as np

from sifu.core.layout import ModelLayout, Vector
from sifu.core.ledger import read_json
from sifu.core.request_terms import is_request_id
from sifu.errors import DiskError, InputError, NoSpaceError, RunBusyError, RunDamagedError

TEMPORARY_PREFIX = ".tmp-"
SALT = "salt"
"""Metadata key under which a model file holds its salt (32 bytes in hexadecimal digits)."""
SALT_BYTES = 32
LONGEST_LINE = 1 << 16
log = logging.getLogger(__name__)


@contextmanager
def room_to_write(path: Path) -> Iterator[None]:
    """Turn errors of a full or failing disk into `NoSpaceError` or `DiskError`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError(
                f"no space left to write {path}: free some space and run the command again; nothing was lost"
            ) from error
        if error.errno == errno.EIO:
            raise DiskError(
                f"the disk failed to write {path} (Input/output error): check the disk and run the command again; "
                "earlier records are intact"
            ) from error
        raise


def sync_folder(folder: Path) -> None:
    """Make renames and deletions in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with room_to_write(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes | memoryview) -> None:
    """Write a new private file and wait until its content is on disk."""
    descriptor = create_private(path)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Replace the content of `path`, completely or not at all."""
    temporary = path.with_name(TEMPORARY_PREFIX + path.name)
    with room_to_write(path):
        try:
            write_durably(temporary, content)
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def append_line(path: Path, line: bytes) -> None:
    """Append a line of JSON durably to a file, as `append_to` does."""
    with path.open("ab+") as stream:
        append_to(stream, line + b"\n")
        is_new = stream.tell() == len(line) + 1
    if is_new:
        sync_folder(path.absolute().parent)


def append_to(stream: BinaryIO, lines: bytes) -> None:
    """Append lines of JSON durably; first remove an incomplete last line, which an interrupted process left."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - LONGEST_LINE))
    tail = stream.read().rpartition(b"\n")[2]
    if tail:
        try:
            read_json(tail)
            stream.write(b"\n")  # only the end of the line is missing
        except ValueError:
            stream.truncate(size - len(tail))
    stream.write(lines)
    stream.flush()
    os.fsync(stream.fileno())


STORED: dict[str, re.Pattern[str]] = {
    "models": re.compile(r"(\d+)\.safetensors"),
    "statistics": re.compile(r"(\d+)\.(sum|\d+)(?:(?<!sum)\.rows)?\.statistics"),
}
"""Kinds of files that tables name, with the pattern of their file names.

Each kind has a table and a folder of this name. An event lists new files under this name, and deleted files under the
name with the prefix `dropped_`. Models are identified by node, other files by file name.
"""


def stored_path(folder: Path, kind: str, key: int | str) -> Path:
    """Return the path of a stored file.

    Args:
        folder: Folder of the run.
        kind: Kind of file, a key of `STORED`.
        key: Node of a model, or name of another file.

    Raises:
        RunDamagedError: If no file of this kind can have the name; a forged database may name any file.
    """
    name = key if isinstance(key, str) else f"{key}.safetensors"
    if not STORED[kind].fullmatch(name):
        raise RunDamagedError(f"{folder} is damaged: it names the file of {kind} {name[:80]!r}")
    return folder / kind / name


def model_bytes(layout: ModelLayout, vector: Vector, salt: str | None = None) -> bytes:
    """Return a model as safetensors; the same values and salt give the same bytes.

    The ledger keeps the digest of the file permanently. The salt is stored only in the file and is erased with it, so
    the digest of an erased model cannot confirm a guess of its training data.
    """
    from safetensors.numpy import save

    tensors = {name: np.ascontiguousarray(array) for name, array in layout.unflatten(vector).items()}
    return save(tensors, metadata=None if salt is None else {SALT: salt})


def model_salt(content: bytes) -> str:
    """Return the salt of a model's file."""
    length = int.from_bytes(content[:8], "little")
    try:
        return str(json.loads(content[8 : 8 + length])["__metadata__"][SALT])
    except (ValueError, KeyError, TypeError) as error:
        raise RunDamagedError("a model's file has no salt: it was not written by this version of sifu") from error


def read_content(path: Path, what: str, digest: str | None) -> bytes:
    """Return the content of a file, and check its digest if one is given.

    Raises:
        RunDamagedError: If the file cannot be read or has another digest.
    """
    try:
        content = read_plain(path)
    except OSError as error:
        raise RunDamagedError(f"{what} cannot be read: {error.strerror}") from error
    if digest is not None and hashlib.sha256(content).hexdigest() != digest:
        raise RunDamagedError(f"{what} does not have the recorded digest: it was changed")
    return content


def read_model(path: Path, layout: ModelLayout, digest: str | None = None) -> Vector:
    """Return the model in `path`, and check its digest if one is given.

    Raises:
        RunDamagedError: If the file cannot be read, has another digest, or holds no model of this layout.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    what = f"the model file {path.name}"
    content = read_content(path, what, digest)
    try:
        return layout.flatten(load(content))
    except (SafetensorError, ValueError) as error:
        raise RunDamagedError(f"{what} is not a safetensors file: {error}") from error


def remove_files(paths: Sequence[Path]) -> None:
    """Delete files permanently; ignore missing files, and warn once of hard links that remain."""
    # Statistics can be hundreds of large files; threads help because deletion waits for the file system.
    with ThreadPoolExecutor(4) as pool:
        linked = [path for path, links in zip(paths, pool.map(_unlink, paths), strict=True) if links > 1]
    for folder in sorted({path.parent for path in paths}):
        sync_folder(folder)
    if linked:
        log.warning(
            "%d deleted files, for example %s, still have hard links elsewhere with their content: delete the links as "
            "well",
            len(linked),
            linked[0],
        )


def _unlink(path: Path) -> int:
    """Delete a file and return how many hard links it had."""
    with room_to_write(path):
        try:
            links = path.lstat().st_nlink
            path.unlink()
        except FileNotFoundError:
            return 0
    return links


CERTIFICATES = "certificates"
RELEASES = "releases"
FOLDERS = (*STORED, CERTIFICATES, RELEASES)
"""Folders of every run."""
FILES = re.compile(
    r"run\.db(-wal|-shm|-journal)?|operator\.key.*|standing\.json|salts\.json|exports\.jsonl|scrub|copying|lock|clients\.json|\.tmp-.*|\.creating",
    re.DOTALL,
)


def check_output(path: Path) -> None:
    """Check that a file that a user wants to write is none of a run's own.

    Raises:
        InputError: If it is, or lies in one of a run's folders.
    """
    absolute = path.resolve()
    for folder in absolute.parents:
        own = absolute.relative_to(folder).parts[0]
        if (own in (*FOLDERS, "inbox") or FILES.fullmatch(own)) and (folder / "run.db").exists():
            raise InputError(f"{path} is a place of the run in {folder}, which needs it: name another file")


def write_output(path: Path, content: bytes) -> None:
    """Write a file that a user named, in one step (see `check_output`)."""
    check_output(path)
    write_atomically(path, content)


def strange_files(folder: Path) -> Iterator[str]:
    """Yield a problem for each entry of a run folder that has the wrong type, such as a link instead of a file.

    The content of the inbox is not examined.
    """
    with os.scandir(folder) as entries:
        by_name = sorted(entries, key=lambda entry: entry.name)
    for entry in by_name:
        if entry.name in (*FOLDERS, "inbox", "report") and not entry.is_dir(follow_symlinks=False):
            yield f"{entry.name} is not a folder, or is a link to one"
        if FILES.fullmatch(entry.name) and not entry.is_file(follow_symlinks=False):
            yield f"{entry.name} is not a regular file, or is a link to one"
    for name in FOLDERS:
        if (folder / name).is_dir():
            with os.scandir(folder / name) as entries:
                inside = sorted(entry.name for entry in entries if not _is_harmless(entry))
            for inner in inside:
                yield f"{name}/{inner} is not a regular file, or is a link to one"


def _is_harmless(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a regular file, or a folder whose name no stored file could have.

    Verification reports the content of such a folder.
    """
    named = entry.name.startswith(".tmp-") or entry.name.endswith((".safetensors", ".statistics", ".json", ".tsr"))
    return entry.is_file(follow_symlinks=False) or (entry.is_dir(follow_symlinks=False) and not named)


def linked_files(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield each stored file that has other hard links, with their number; links keep the content of a deleted file."""
    for kind in STORED:
        try:
            with os.scandir(folder / kind) as entries:
                counts = sorted((entry.name, entry.stat(follow_symlinks=False).st_nlink) for entry in entries)
        except OSError:
            continue
        yield from (
            (f"{kind}/{name}", count - 1) for name, count in counts if count > 1 and STORED[kind].fullmatch(name)
        )


def read_plain(path: Path, *, links: bool = False, most: int = -1) -> bytes:
    """Return the content of a regular file; raise `OSError` for anything else, because reading a pipe could block.

    Args:
        path: The file.
        links: True to follow a symbolic link. A run folder contains no links, but a user may name one.
        most: Maximum number of bytes to read, or a negative number for the whole file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        with open(descriptor, "rb", closefd=False) as stream:
            return stream.read(most)
    finally:
        os.close(descriptor)


def read_named(path: Path, most: int, what: str) -> bytes:
    """Return the content of a file that a user named.

    Raises:
        InputError: If the file cannot be read or is too large.
    """
    try:
        if path.stat().st_size > most:
            raise InputError(f"{path} has {path.stat().st_size} bytes, far more than {what}")
        return read_plain(path, links=True)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


def create_private(path: Path) -> int:
    """Create a private file and return its descriptor; an existing file or link of that name is replaced.

    Overwriting in place would write into a file that another process created and may still have open.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o600)
    except FileExistsError:
        path.unlink()
        return os.open(path, flags, 0o600)


def private_folder(path: Path, parents: bool = False) -> None:
    """Durably create a folder that only its owner can access, under any umask; leave an existing folder unchanged."""
    above = path.absolute().parent
    if parents and not above.exists():
        above.mkdir(parents=True, exist_ok=True)
        for place in above.parents:  # every parent folder may be new
            if os.access(place, os.R_OK):
                sync_folder(place)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    path.chmod(0o700)
    sync_folder(above)


FORMS = ("auditor", "public")
"""Forms in which the certificate of every completed request is written."""


def certificate_path(folder: Path, request: str, form: str) -> Path:
    """Return the path of a certificate.

    Raises:
        RunDamagedError: If id or form is invalid; a forged database may name any file.
    """
    if not is_request_id(request) or form not in FORMS:
        raise RunDamagedError(f"{folder} is damaged: it has a certificate {request[:80]!r} ({form[:20]!r})")
    return folder / CERTIFICATES / f"{request}.{form}.json"


LOCK_FILE = "lock"


class WriterLock:
    """Lock of a run's writer, held from construction to `release`; a second writer gets `RunBusyError` at once."""

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            _take(self._descriptor)
        except OSError as error:
            holder = os.read(self._descriptor, 32).decode(errors="replace").strip() or "unknown"
            self.release()
            raise RunBusyError(
                f"{path.parent} is in use by another process (pid {holder}): wait for it, or stop it; "
                "nothing was changed"
            ) from error
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, str(os.getpid()).encode())

    def release(self) -> None:
        """Release the lock; calling it twice is harmless."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> WriterLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def _take(descriptor: int) -> None:
    """Take the lock, with retries because a reader that tests it (`is_locked`) holds it for an instant."""
    for attempt in range(5):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError:
            if attempt == 4:
                raise
            time.sleep(0.02)


def is_locked(folder: Path) -> bool:
    """Return whether a writer holds the lock of a run now."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer Ctrl-C to the end of the block, so that it never interrupts a commit.

    Blocking the signal is not enough, because the kernel would deliver it to another thread, such as a thread of torch.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held and callable(before):
            before(*held[0])
