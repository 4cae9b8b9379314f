"""Files of models, updates and statistics that no row names: left by an interrupted change, or put there.

A change writes its files before its event and deletes those it drops after it. A process killed in between leaves files
behind, which the next one that opens the run for writing sweeps away before it does anything else. So an honest folder
holds, in addition to the files of its tables, at most

    files of an event that was never recorded, some of them temporary;
    files that the *last* event dropped, byte for byte as they were recorded;
    an unfinished copy of the run, where a backup was being written or restored next to it.

No certificate says anything about either. Everything else was put there on purpose: a file that an earlier event
dropped, or the same bytes under another name, is a model that was erased and came back. And an event that erases
permanently (a purge, a strict request, a restoration) says that its files are gone; while they exist, it is false.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sifu.run.run_view import RunView
from sifu.store import files
from sifu.store.events_check import ERASED, ReplayedLedger
from sifu.store.files import read_plain
from sifu.store.lock import is_locked
from sifu.store.reader import RunReader
from sifu.store.statistics_files import FILE_NAME, STATISTICS, STATISTICS_NAME, UPDATES
from sifu.store.unfinished_copies import unfinished_copies
from sifu.store.writer import SCRUB_FILE

MODELS = "models"
STRAY = "should not be there: no record names it, or it was erased before. Find out where it comes from, and delete it"
FINISH = "the next command that writes to the run finishes it: sifu purge, for example"

LEFT_COPY = "an interrupted backup or restore left it: it holds a copy of the operator's key"
OUT_OF_REACH = (
    "an interrupted backup may have left it, with a copy of the operator's key; the folder it lay in is not there now. "
    "Delete it where that disk is"
)


@dataclass(frozen=True)
class Leftover:
    """A file that an interrupted change left, with the reason why it is taken for one."""

    file: str
    why: str


@dataclass(frozen=True)
class Stray:
    """A file that an interrupted change does not explain, or that contradicts an erasure: a sentence about it."""

    problem: str


def files_of_no_row(reader: RunReader) -> Iterator[Leftover | Stray]:
    """Every file that no table names, and the mark of an erasure that was not finished.

    Nothing while a writer is at work: it is about to record or to delete such files.
    """
    if is_locked(reader.folder):
        return
    record = _Record(reader)
    for folder in (MODELS, UPDATES, STATISTICS):
        for path in sorted((reader.folder / folder).rglob("*")):
            name = path.relative_to(reader.folder).as_posix()
            if name not in record.live and not path.is_dir():
                yield _judged(record, path, name)
    for copy in unfinished_copies(reader.folder):
        yield Leftover(str(copy.path), LEFT_COPY if copy.reachable else OUT_OF_REACH)
    if (reader.folder / SCRUB_FILE).exists():
        yield _unfinished_erasure(record)


def _judged(record: _Record, path: Path, name: str) -> Leftover | Stray:
    if path.parent != record.folder / path.parent.name:
        return Stray(f"{name.partition('/')[0]}: {name} {STRAY}")
    kind = path.parent.name
    digest = hashlib.sha256(read_plain(path)).hexdigest()
    event = record.last
    if name in record.dropped_last and digest == record.digests[name]:
        if record.erases_for_good(event.seq):
            return Stray(
                f"{kind}: event {event.seq} ({event.kind}) permanently erases {name}, but it is still there: that "
                f"erasure was interrupted; {FINISH}"
            )
        return Leftover(name, f"event {event.seq} ({event.kind}) dropped it, and its process ended before deleting it")
    if digest in record.erased:
        return Stray(f"{kind}: {name} holds what was recorded as {record.erased[digest]} and erased; delete it")
    if name in record.digests:
        return Stray(f"{kind}: {name} {STRAY}")
    if path.name.startswith(files.TEMPORARY_PREFIX):
        return Leftover(name, "a temporary file: the process that wrote it ended before it was finished")
    if record.may_be_unrecorded(path):
        return Leftover(name, "no event names it: the process that wrote it ended before recording it")
    return Stray(f"{kind}: {name} {STRAY}")


def _unfinished_erasure(record: _Record) -> Leftover | Stray:
    """The mark exists from before a permanent erasure is recorded until nothing of it is left in the database."""
    claimed = [event.seq for event in record.events if record.erases_for_good(event.seq)]
    if not claimed:
        return Leftover(SCRUB_FILE, "an erasure was about to begin, and its process ended before it recorded it")
    return Stray(
        f"erasure: the file {SCRUB_FILE} says that a permanent erasure was not finished (event {claimed[-1]} was the "
        f"last one): what it erased may still be in the pages or the log of the database; {FINISH}"
    )


class _Record:
    """What the ledger says of files, by their names in the folder."""

    def __init__(self, reader: RunReader) -> None:
        ledger = ReplayedLedger.of(reader)
        self.folder, self.events = reader.folder, ledger.events
        self.last = self.events[-1]
        self._view = RunView(reader)
        self._nodes = {row.node.node: row.node.kind for row in reader.node_rows()}
        self.live = {
            *(_model_name(node) for node in reader.models()),
            *(_updates_name(file) for file in reader.updates()),
            *(_statistics_name(file) for file in reader.statistics()),
        }
        self.digests = {
            **{_model_name(node): digest for node, digest in ledger.model_digests.items()},
            **{_updates_name(row["file"]): str(row["digest"]) for row in ledger.updates},
            **{_statistics_name(row["file"]): str(row["digest"]) for row in ledger.statistics},
        }
        """Of every file that was ever recorded."""
        self.dropped_last = {
            *(_model_name(node) for node in self.last.content.get("dropped_models", [])),
            *(_updates_name(file) for file in self.last.content.get("dropped_updates", [])),
            *(_statistics_name(file) for file in self.last.content.get("dropped_statistics", [])),
        }

    @cached_property
    def erased(self) -> dict[str, str]:
        """Digests of what was erased, with its name, except what is still stored under another name.

        A round without participants leaves the model as it was, and initial models, which hold no data, may be alike.
        """
        at_hand = {self.digests[name] for name in self.live if name in self.digests}
        initial = {_model_name(node) for node, kind in self._nodes.items() if kind == "initial"}
        gone = self.digests.keys() - self.live - initial
        return {self.digests[name]: name for name in sorted(gone) if self.digests[name] not in at_hand}

    def erases_for_good(self, seq: int) -> bool:
        """Whether an event says that what it drops is gone from the whole folder."""
        event = self.events[seq - 1]
        if event.kind == "rolled back":
            return event.content["request"] in self._strict
        dropped = any(event.content.get(f"dropped_{what}") for what in ERASED)
        return event.kind == "purged" or (event.kind == "restored" and dropped)

    @cached_property
    def _strict(self) -> set[str]:
        return {request.request for request in self._view.requests if request.terms.retention == "strict"}

    def may_be_unrecorded(self, path: Path) -> bool:
        """Whether the next event could have written a file of this name."""
        if path.parent.name == MODELS:
            number = path.stem if files.MODEL_NAME.fullmatch(path.name) else ""
            return number.isdecimal() and str(int(number)) == number and int(number) not in self._nodes
        if path.parent.name == STATISTICS:
            own = STATISTICS_NAME.fullmatch(path.name)
            return own is not None and int(own[1]) not in self._nodes
        named = FILE_NAME.fullmatch(path.name)
        return named is not None and (int(named[1]) not in self._nodes or self._is_rewritten(*map(int, named.groups())))

    def _is_rewritten(self, node: int, part: int, order: int) -> bool:
        """Whether a file of this name is the next one that takes the place of a stored file of updates."""
        return _updates_name(f"{node}.{part}.{order - 1}.safetensors") in self.live


def _model_name(node: int) -> str:
    return f"{MODELS}/{node}.safetensors"


def _updates_name(file: str) -> str:
    return f"{UPDATES}/{file}"


def _statistics_name(file: str) -> str:
    return f"{STATISTICS}/{file}"
