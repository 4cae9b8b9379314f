"""Heads of runs that this user has seen, remembered in one file outside the run folders.

A run folder cannot show that it is the latest state of its run, or that it was not rewritten as a whole with another
key. Each line of the file is a JSON object with a run's id, its folder, its public key, and the number and hash of the
last event seen. Commands that write, and `sifu verify` when it finds nothing, add such a line. Every command that opens
the run compares it with the last line of the run in this folder, as ssh does with `known_hosts`.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from sifu.errors import InputError, RunDamagedError, SifuError
from sifu.store.files import TEMPORARY_PREFIX, append_to, private_folder, sync_folder, write_atomically
from sifu.store.keys import check_keys, keys_of
from sifu.store.reader import RunReader

HEADS = "SIFU_HEADS"
"""Environment variable: file of seen heads, instead of `sifu/heads` in the user's folder; /dev/null keeps none."""
NEW_RUN = "SIFU_NEW_RUN"
"""Environment variable that `--new-run` sets: accept another run in a folder, or a copy of a run."""
FULL_FILE, LARGEST_FILE = 1 << 20, 64 << 20
"""Size from which superseded lines are dropped, and size from which the file is refused, in bytes."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SeenHead:
    """Last event of a run in a folder, when this user last used it."""

    run: str
    folder: str
    key: str
    seq: int
    hash: str


_read: dict[Path, tuple[tuple[int, int, int], tuple[SeenHead, ...]]] = {}
"""Parsed files, reused until the file changes."""


def heads_file() -> Path:
    """Return the path of this user's file of seen heads."""
    named = os.environ.get(HEADS, "").strip()
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")) / "sifu" / "heads"


def seen_heads() -> tuple[SeenHead, ...]:
    """Return the last head seen of each run in each folder, oldest first.

    Raises:
        InputError: If the file cannot be read. Without it a changed run would go unnoticed.
    """
    path = heads_file()
    try:
        status = path.stat()
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
        if path in _read and _read[path][0] == stamp:
            return _read[path][1]
        if status.st_size > LARGEST_FILE:
            raise InputError(f"{path} has {status.st_size} bytes, too many for a file of heads")
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except (OSError, ValueError) as error:
        raise InputError(f"the heads remembered in {path} cannot be read: {error}. See {HEADS}") from error
    seen: dict[tuple[str, str], SeenHead] = {}
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        try:
            head = SeenHead(**json.loads(line))
            if type(head.seq) is not int or not all(isinstance(value, str) for value in (head.run, head.folder)):
                raise ValueError("a value has another type")
        except (ValueError, TypeError, RecursionError) as error:
            if not line.endswith("\n"):  # an interrupted process wrote a part of the last line
                break
            raise InputError(f"{path}, line {number}, is not the head of a run: correct or remove the line") from error
        seen.pop((head.run, head.folder), None)
        seen[head.run, head.folder] = head
    _read[path] = (stamp, tuple(seen.values()))
    return tuple(seen.values())


def head_problem(reader: RunReader, *, writing: bool = False) -> str | None:
    """Return how a run contradicts what this user has seen, or None if it agrees.

    A run that was seen in other folders only has moved if these folders are gone; otherwise it is a copy, which nobody
    may write to (`writing`) before `--new-run`. A copy may be older.
    """
    if reader.folder.name.startswith(TEMPORARY_PREFIX):
        return None  # a restoration in progress, which `lost_since` compares
    run, places, seen = reader.value("run"), _places(reader.folder), seen_heads()
    last = {head.folder: head.run for head in seen}
    before = next((last[place] for place in places if last.get(place, run) != run), None)
    if before is not None and not _accepts_new():
        return (
            f"heads: {reader.folder} held run {before} when it was last used here, and now holds run {run[:40]} "
            f"({heads_file()}). If you know why: sifu --new-run COMMAND"
        )
    of_run = [head for head in seen if head.run == run]
    own = [head for head in of_run if head.folder in places]
    if own or not of_run:
        return next(filter(None, (_contradiction(reader, head) for head in own)), None)
    there = _originals(run, places, seen)
    if there:
        if writing and not _accepts_new():
            return (
                f"heads: run {run} is in {there[-1].folder}, and {reader.folder} is a copy of it. If both continue, "
                "they spend the same budgets twice. To go on here: sifu --new-run COMMAND"
            )
        return next(filter(None, (_contradiction(reader, head, older=True) for head in there)), None)
    moved = [_contradiction(reader, head) for head in of_run]
    return moved[-1] if all(moved) else None


def _originals(run: str, places: Collection[str], seen: Iterable[SeenHead]) -> list[SeenHead]:
    """Return the heads of a run in other folders that still hold it; none if it was seen in one of these places."""
    of_run = [head for head in seen if head.run == run]
    known_here = any(head.folder in places for head in of_run)
    return [] if known_here else [head for head in of_run if _holds(Path(head.folder), run)]


def _contradiction(reader: RunReader, head: SeenHead, *, older: bool = False) -> str | None:
    """Return how a run contradicts a head seen earlier; with `older`, the run may end before that head."""
    known = f"heads: run {head.run} was last seen here ({heads_file()})"
    way_out = "If you accept that, remove its lines from that file"
    # The ledger's keys must lead from that key to the current one, each change signed by both keys.
    if head.key != reader.value("public_key") and (
        head.key not in [named for _, named in keys_of(reader)] or next(check_keys(reader), None) is not None
    ):
        return (
            f"{known} with the key {head.key}, and is now signed with {reader.value('public_key')}, for which that key "
            f"did not sign: its history was rewritten, or an older state was restored. {way_out}"
        )
    rows = reader.query("SELECT lower(hex(hash)) FROM events WHERE seq = ?", (head.seq,))
    if rows and rows[0][0] != head.hash:
        return f"{known} with another event {head.seq}: the history was rewritten, or continued elsewhere. {way_out}"
    if not rows and not older:
        return (
            f"{known} at event {head.seq}, and now ends at event {reader.last_event()[0]}: an older state was put "
            f"back, or its last events were removed. {way_out}"
        )
    return None


def is_copy(reader: RunReader) -> bool:
    """Return whether a folder is a copy of a run, which nobody accepted yet."""
    originals = _originals(reader.value("run"), _places(reader.folder), seen_heads())
    return bool(originals) and not _accepts_new()


def check_seen(reader: RunReader, *, writing: bool = False) -> None:
    """Check that a run agrees with what this user has seen, without remembering anything.

    Raises:
        RunDamagedError: If `head_problem` finds a problem.
    """
    problem = head_problem(reader, writing=writing)
    if problem:
        raise RunDamagedError(f"{problem}. Nothing was done")


def lost_since(reader: RunReader) -> str | None:
    """Return how a run that is being restored contradicts the last head seen of it in any folder, or None."""
    run = reader.value("run")
    return next(filter(None, (_contradiction(reader, head) for head in seen_heads() if head.run == run)), None)


def check_place(folder: Path, run: str) -> None:
    """Check that no other run was last seen in the folder that a run will be restored to.

    Raises:
        InputError: If another run was seen there.
    """
    last = {head.folder: head.run for head in seen_heads()}
    before = next((last[place] for place in _places(folder) if last.get(place, run) != run), None)
    if before is not None and not _accepts_new():
        raise InputError(
            f"{folder} held run {before} when last used here, and the backup is of run {run[:40]}: restore it into "
            "another folder. Nothing was restored"
        )


def remember_head(reader: RunReader) -> None:
    """Remember the last event of a run; only warn if the file cannot be written."""
    path = heads_file()
    if reader.folder.name.startswith(TEMPORARY_PREFIX) or path == Path(os.devnull):
        return  # a restoration in progress is remembered under its final name
    run, key, (seq, digest) = reader.value("run"), reader.value("public_key"), reader.last_event()
    seen = seen_heads()
    last = {head.folder: head for head in seen}
    new = [SeenHead(run, place, key, seq, digest) for place in _places(reader.folder)]
    if all(last.get(head.folder) == head for head in new):
        return
    try:
        private_folder(path.parent, parents=True)
        with os.fdopen(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "ab+") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            if os.fstat(stream.fileno()).st_size < FULL_FILE:
                append_to(stream, _lines(new))
            else:
                write_atomically(path, _lines([*seen, *new]))
        sync_folder(path.parent)
    except OSError as error:
        log.warning(
            "the head of %s cannot be remembered in %s (%s), so a change of the run would go unnoticed: name a file "
            "that can be written with %s",
            reader.folder,
            path,
            error.strerror,
            HEADS,
        )


def _lines(heads: Iterable[SeenHead]) -> bytes:
    return b"".join(json.dumps(asdict(head)).encode() + b"\n" for head in heads)


def _accepts_new() -> bool:
    return bool(os.environ.get(NEW_RUN))


def _holds(folder: Path, run: str) -> bool:
    """Return whether a folder still holds this run."""
    try:
        with RunReader(folder) as reader:
            return reader.value("run") == run
    except (SifuError, OSError):
        return False


def _places(folder: Path) -> tuple[str, ...]:
    """Return the resolved path of a folder, and its unresolved path if that contains a link."""
    return tuple(dict.fromkeys((str(folder.resolve()), os.path.abspath(folder))))
