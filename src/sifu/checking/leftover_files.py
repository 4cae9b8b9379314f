"""Check of the files that no table names, which an interrupted change left behind or somebody added.

A change writes its files, then its event, and then deletes the files that it drops. A process killed in between leaves
files behind, which the next writer deletes before it does anything else. So an untampered folder holds, in addition to
the files of its tables, at most

    files of an event that was never recorded, some of them temporary;
    files that the *last* event dropped, byte for byte as they were recorded;
    an unfinished copy of the run, if a backup was being written or restored next to it.

No certificate makes a statement about such files. No interrupted change explains any other file, so somebody added it.
A file that an earlier event dropped, or the same bytes under another name, is erased content that was put back. An
event that erases permanently (a purge, a strict request, a restoration) states that its files no longer exist. While
they exist, the statement is false.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sifu.core.ledger import Event
from sifu.store.database import DATABASE
from sifu.store.files import STORED, TEMPORARY_PREFIX, is_locked, read_plain, stored_path
from sifu.store.projection import KEYS
from sifu.store.reader import RunReader
from sifu.store.replayed_ledger import ReplayedLedger
from sifu.store.unfinished import unfinished_copies
from sifu.store.writer import SCRUB_FILE

STRAY = "should not be there: no record names it, or it was erased before. Find out where it comes from, and delete it"
FINISH = "the next command that writes to the run finishes it: sifu purge, for example"

LEFT_COPY = "an interrupted backup or restore left it: it holds a copy of the operator's key"
OUT_OF_REACH = (
    "an interrupted backup may have left it, with a copy of the operator's key; its folder cannot be found now. "
    "Delete it on the disk that holds the folder"
)


@dataclass(frozen=True)
class Leftover:
    """A file that an interrupted change left behind, and the reason why it was left."""

    file: str
    why: str


def files_of_no_row(reader: RunReader) -> Iterator[Leftover | str]:
    """Yield every file that no table names, and the marker of an unfinished erasure.

    A file that an interrupted change explains is a `Leftover`. Any other file, and any file that contradicts an
    erasure, is a problem. While a writer is active, nothing is yielded, because the writer may be about to record or
    delete such files.
    """
    if is_locked(reader.folder):
        return
    record = _Record(reader)
    for kind in STORED:
        for path in sorted((reader.folder / kind).rglob("*")):
            if path not in record.live and not path.is_dir():
                yield _judged(record, kind, path)
    for path in sorted(reader.folder.rglob("*")):
        name = path.relative_to(reader.folder).as_posix()
        if name in (DATABASE, f"{DATABASE}-shm"):  # closing it would drop this process's own locks (POSIX)
            continue
        if name.partition("/")[0] not in STORED and path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest in record.erased:
                yield f"folder: {name} holds what was recorded as {record.erased[digest]} and erased; delete it"
    for copy in unfinished_copies(reader.folder):
        yield Leftover(str(copy.path), LEFT_COPY if copy.reachable else OUT_OF_REACH)
    if (reader.folder / SCRUB_FILE).exists():
        yield _unfinished_erasure(record)


def _judged(record: _Record, kind: str, path: Path) -> Leftover | str:
    name = path.relative_to(record.folder).as_posix()
    if path.parent != record.folder / kind:
        return f"{kind}: {name} {STRAY}"
    digest = hashlib.sha256(read_plain(path)).hexdigest()
    event = record.last
    if path in record.dropped_last and digest == record.digests[path]:
        if record.erases_for_good(event):
            return (
                f"{kind}: event {event.seq} ({event.kind}) permanently erases {name}, but it is still there: that "
                f"erasure was interrupted; {FINISH}"
            )
        return Leftover(name, f"event {event.seq} ({event.kind}) dropped it, and its process ended before deleting it")
    if digest in record.erased:
        return f"{kind}: {name} holds what was recorded as {record.erased[digest]} and erased; delete it"
    if path not in record.digests and path.name.startswith(TEMPORARY_PREFIX):
        return Leftover(name, "a temporary file: the process that wrote it ended before it was finished")
    if path not in record.digests and record.may_be_unrecorded(kind, path):
        return Leftover(name, "no event names it: the process that wrote it ended before recording it")
    return f"{kind}: {name} {STRAY}"


def _unfinished_erasure(record: _Record) -> Leftover | str:
    """Return a problem if a recorded permanent erasure is unfinished, or a leftover if none was recorded.

    The marker is written before such an erasure is recorded, and deleted once the database holds none of the data.
    """
    claimed = [event.seq for event in record.events if record.erases_for_good(event)]
    if not claimed:
        return Leftover(SCRUB_FILE, "an erasure was about to begin, and its process ended before it recorded it")
    return (
        f"erasure: the file {SCRUB_FILE} says that a permanent erasure was not finished (event {claimed[-1]} was the "
        f"last one): what it erased may still be in the pages or the log of the database; {FINISH}"
    )


class _Record:
    """The files that the ledger records, by path."""

    def __init__(self, reader: RunReader) -> None:
        ledger = ReplayedLedger.of(reader)
        self.folder, self.events = reader.folder, ledger.events
        self.last = self.events[-1]
        self._strict = {row.request for row in reader.requests() if row.terms.retention == "strict"}
        self._nodes = {node.node: node.kind for node in reader.nodes()}
        self.live = reader.stored_files()
        self.digests = {
            stored_path(self.folder, kind, row[KEYS[kind][0]]): str(row["digest"])
            for kind in STORED
            for row in ledger.recorded(kind)
        }
        """Digest of every file ever recorded."""
        self.dropped_last = {
            stored_path(self.folder, kind, key)
            for kind in STORED
            for key in self.last.content.get(f"dropped_{kind}", [])
        }

    @cached_property
    def erased(self) -> dict[str, str]:
        """Name of each erased file, by digest.

        Content that is still stored under another name is left out, because a round without participants stores an
        unchanged model. Initial models are left out because they hold no client's data and may be equal.
        """
        available = {self.digests[path] for path in self.live if path in self.digests}
        initial = {stored_path(self.folder, "models", node) for node, kind in self._nodes.items() if kind == "initial"}
        gone = self.digests.keys() - self.live - initial
        return {
            self.digests[path]: path.relative_to(self.folder).as_posix()
            for path in sorted(gone)
            if self.digests[path] not in available
        }

    def erases_for_good(self, event: Event) -> bool:
        """Return whether an event states that the folder no longer contains the files that it drops."""
        if event.kind == "rolled back":
            return event.content["request"] in self._strict
        return event.kind == "purged"

    def may_be_unrecorded(self, kind: str, path: Path) -> bool:
        """Return whether an unrecorded event could have written this file: for a new node."""
        named = STORED[kind].fullmatch(path.name)
        if named is None or (kind == "models" and str(int(named[1])) != named[1]):
            return False
        return int(named[1]) not in self._nodes
