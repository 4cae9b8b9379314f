"""Files that are whole or absent: written under a temporary name, synced, renamed, the folder synced."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np

from sifu.core.layout import ModelLayout, Vector
from sifu.errors import DiskError, NoSpaceError, RunDamagedError
from sifu.store.regular_files import create_private, read_plain

TEMPORARY_PREFIX = ".tmp-"
SALT = "salt"
"""The key of a model file's metadata that holds its salt, 32 bytes in hexadecimal digits."""
SALT_BYTES = 32
LONGEST_LINE = 1 << 16
Parsed = TypeVar("Parsed")


@contextmanager
def room_to_write(path: Path) -> Iterator[None]:
    """A full disk or quota, or a disk that fails, becomes a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError(
                f"no space left to write {path}: free some and run the command again; nothing was lost"
            ) from error
        if error.errno == errno.EIO:
            raise DiskError(
                f"the disk failed to write {path} (Input/output error): see to it and run the command again; what was "
                "recorded before is there"
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


def write_durably(path: Path, content: bytes) -> None:
    """Write a new private file and wait until its content is on disk."""
    descriptor = create_private(path)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by `content`, or leave it as it was."""
    write_all_atomically({path: content})


def write_all_atomically(contents: Mapping[Path, bytes]) -> None:
    """Replace files of one folder, each of them or none of it; the folder is synced once."""
    for path, content in contents.items():
        temporary = path.with_name(TEMPORARY_PREFIX + path.name)
        with room_to_write(path):
            try:
                write_durably(temporary, content)
                os.replace(temporary, path)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
    for folder in {path.parent for path in contents}:
        sync_folder(folder)


def append_line(path: Path, line: bytes) -> None:
    """Add a line to a file, durable when this returns; half a line that a kill left at its end goes first."""
    with path.open("ab+") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - LONGEST_LINE))
        tail = stream.read()
        if tail and not tail.endswith(b"\n"):
            stream.truncate(size - len(tail) + tail.rfind(b"\n") + 1)
        stream.write(line + b"\n")
        stream.flush()
        os.fsync(stream.fileno())


def model_path(folder: Path, node: int) -> Path:
    """Where the model of a node lies."""
    return folder / "models" / f"{node}.safetensors"


def model_bytes(layout: ModelLayout, vector: Vector, salt: str | None = None) -> bytes:
    """A model as safetensors, byte for byte the same for the same values and salt.

    The ledger keeps the digest of the file for good. The salt lies in the file alone and goes with it, so the digest of
    an erased model does not tell whether a guess of the data it was trained on is right.
    """
    from safetensors.numpy import save

    tensors = {name: np.ascontiguousarray(array) for name, array in layout.unflatten(vector).items()}
    return save(tensors, metadata=None if salt is None else {SALT: salt})


def new_salt(seed: int | None, place: str) -> bytes:
    """A salt from the operating system, or from the seed of an experiment, whose files are to be repeatable."""
    return secrets.token_bytes(SALT_BYTES) if seed is None else hashlib.sha256(f"{seed}:salt:{place}".encode()).digest()


def model_salt(content: bytes) -> str:
    """The salt of a model's file."""
    length = int.from_bytes(content[:8], "little")
    try:
        return str(json.loads(content[8 : 8 + length])["__metadata__"][SALT])
    except (ValueError, KeyError, TypeError) as error:
        raise RunDamagedError("a model's file has no salt: it was not written by this version of sifu") from error


def read_content(path: Path, what: str, digest: str | None) -> bytes:
    """The bytes of a file, which must have the digest if one is given; errors call the file `what`."""
    try:
        content = read_plain(path)
    except OSError as error:
        raise RunDamagedError(f"{what} cannot be read: {error.strerror}") from error
    if digest is not None and hashlib.sha256(content).hexdigest() != digest:
        raise RunDamagedError(f"{what} does not have the recorded digest: it was changed")
    return content


def read_model(path: Path, layout: ModelLayout, digest: str | None = None) -> Vector:
    """The model in `path`, checked against its digest when one is given."""
    return read_tensors(path, f"the model file {path.name}", digest, layout.flatten)


def read_tensors(path: Path, what: str, digest: str | None, parse: Callable[[dict[str, Vector]], Parsed]) -> Parsed:
    """What `parse` makes of the tensors of a safetensors file, whose digest is checked; errors call the file `what`."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    content = read_content(path, what, digest)
    try:
        return parse(load(content))
    except (SafetensorError, ValueError) as error:
        raise RunDamagedError(f"{what} is not a safetensors file: {error}") from error


def remove_files(paths: Sequence[Path]) -> None:
    """Delete files of one folder permanently; missing ones are fine."""
    for path in paths:
        path.unlink(missing_ok=True)
    if paths:
        sync_folder(paths[0].parent)


def remove_temporary(folder: Path) -> None:
    """Delete files that were being written when a process ended."""
    remove_files(sorted(folder.glob(TEMPORARY_PREFIX + "*")))


MODEL_NAME = re.compile(r"\d+\.safetensors")


def remove_strays(folder: Path, pattern: re.Pattern[str], expected: set[str]) -> list[str]:
    """Delete files named like ours that no row names, and temporary files a crash left; returns their names."""
    strays = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.name.startswith(TEMPORARY_PREFIX) or (pattern.fullmatch(path.name) and path.name not in expected):
            path.unlink()
            strays.append(path.name)
    if strays:
        sync_folder(folder)
    return strays
