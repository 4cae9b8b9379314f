"""Nothing in a run folder but regular files and folders, where we read, write or erase.

A link leads elsewhere: writing through it changes somebody else's file, deleting it leaves what it names, which may be
a model that was to be erased. A pipe makes its reader wait for ever. A folder under a file's name stops the program
that clears it away. We never make any of them, but a folder from a stranger may hold them.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("models", "updates", "statistics", "certificates", "timestamps", "inbox", "report")
FILES = re.compile(
    r"run\.db(-wal|-shm|-journal)?|operator\.key.*|head|standing\.json|salts\.json|exports\.jsonl|scrub|copying|lock|clients\.json|\.tmp-.*|\.creating",
    re.DOTALL,
)


def strange_files(folder: Path) -> Iterator[str]:
    """What has one of our names, or lies in one of our folders, and is not a regular file or folder; letters aside."""
    with os.scandir(folder) as entries:
        by_name = sorted(entries, key=lambda entry: entry.name)
    for entry in by_name:
        if entry.name in FOLDERS and not entry.is_dir(follow_symlinks=False):
            yield f"{entry.name} is not a folder, or is a link to one"
        if FILES.fullmatch(entry.name) and not entry.is_file(follow_symlinks=False):
            yield f"{entry.name} is not a regular file, or is a link to one"
    for name in ("models", "updates", "statistics", "certificates", "timestamps"):
        if (folder / name).is_dir():
            with os.scandir(folder / name) as entries:
                inside = sorted(entry.name for entry in entries if not _is_harmless(entry))
            for inner in inside:
                yield f"{name}/{inner} is not a regular file, or is a link to one"


def _is_harmless(entry: os.DirEntry[str]) -> bool:
    """A regular file, or a folder that has no name of a file of ours; verification names what lies in it."""
    named = entry.name.startswith(".tmp-") or entry.name.endswith((".safetensors", ".statistics", ".json", ".tsr"))
    return entry.is_file(follow_symlinks=False) or (entry.is_dir(follow_symlinks=False) and not named)


def read_plain(path: Path, *, links: bool = False) -> bytes:
    """The content of a regular file; anything else is an error at once, never a wait.

    In a run folder nothing is a link; a file that a person names may be one (`links`).
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        with open(descriptor, "rb", closefd=False) as stream:
            return stream.read()
    finally:
        os.close(descriptor)


def create_private(path: Path) -> int:
    """A descriptor of a new file, private from its first instant; whatever had its name is taken away, never followed.

    Writing over what is there would write into a file that somebody else made, and may hold open.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o600)
    except FileExistsError:
        path.unlink()
        return os.open(path, flags, 0o600)


def private_folder(path: Path, parents: bool = False) -> None:
    """A folder for its owner only, under any umask; one that is there stays as it is."""
    try:
        path.mkdir(mode=0o700, parents=parents)
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    path.chmod(0o700)
