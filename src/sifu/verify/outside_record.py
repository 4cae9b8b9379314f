"""Checks beyond the ledger: unnamed files, timestamps, anchors kept elsewhere, and restorations.

Files of models, updates and statistics that no row names come from an interrupted change, or somebody put them there. A
change writes its files, then its event, and then deletes the files that it drops. A process killed in between leaves
files behind, which the next writer deletes before it does anything else. So an untampered folder holds, in addition to
the files of its tables, at most

    files of an event that was never recorded, some of them temporary;
    files that the *last* event dropped, byte for byte as they were recorded;
    an unfinished copy of the run, if a backup was being written or restored next to it.

No certificate makes a statement about such files. Any other file was put there on purpose: a file that an earlier event
dropped, or the same bytes under another name, is an erased model that came back. An event that erases permanently (a
purge, a strict request, a restoration) states that its files are gone; while they exist, the statement is false.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sifu.core.ledger import Event, canonical_json
from sifu.errors import InputError, MissingPackageError, install_extra
from sifu.run.run_view import RunView
from sifu.store import clock, timestamps
from sifu.store.checkpoints import VOUCHED, Checkpoint, signed_events
from sifu.store.events_check import ReplayedLedger, ReplayedTables
from sifu.store.files import STORED, TEMPORARY_PREFIX, TIMESTAMPS, certificate_path, is_locked, read_plain, stored_path
from sifu.store.keys import KEY_FILE, KEY_LOST
from sifu.store.projection import KEYS
from sifu.store.reader import RunReader
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
    """A file left behind by an interrupted change; `why` explains how this was recognised."""

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
        if record.erases_for_good(event.seq):
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

    The marker exists from before such an erasure is recorded until nothing of the data is left in the database.
    """
    claimed = [event.seq for event in record.events if record.erases_for_good(event.seq)]
    if not claimed:
        return Leftover(SCRUB_FILE, "an erasure was about to begin, and its process ended before it recorded it")
    return (
        f"erasure: the file {SCRUB_FILE} says that a permanent erasure was not finished (event {claimed[-1]} was the "
        f"last one): what it erased may still be in the pages or the log of the database; {FINISH}"
    )


class _Record:
    """Files according to the ledger, by path."""

    def __init__(self, reader: RunReader) -> None:
        ledger = ReplayedLedger.of(reader)
        self.folder, self.events = reader.folder, ledger.events
        self.last = self.events[-1]
        self._view = RunView(reader)
        self._nodes = {row.node.node: row.node.kind for row in reader.node_rows()}
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
        """Digests of erased files with their names, except content that is still stored under another name.

        A round without participants leaves the model unchanged, and initial models, which hold no data, may be equal.
        """
        available = {self.digests[path] for path in self.live if path in self.digests}
        initial = {stored_path(self.folder, "models", node) for node, kind in self._nodes.items() if kind == "initial"}
        gone = self.digests.keys() - self.live - initial
        return {
            self.digests[path]: path.relative_to(self.folder).as_posix()
            for path in sorted(gone)
            if self.digests[path] not in available
        }

    def erases_for_good(self, seq: int) -> bool:
        """Return whether an event states that the files it drops are gone from the whole folder."""
        event = self.events[seq - 1]
        if event.kind == "rolled back":
            return event.content["request"] in self._strict
        dropped = any(event.content.get(f"dropped_{what}") for what in STORED)
        return event.kind == "purged" or (event.kind == "restored" and dropped)

    @cached_property
    def _strict(self) -> set[str]:
        return {request.request for request in self._view.requests if request.terms.retention == "strict"}

    def may_be_unrecorded(self, kind: str, path: Path) -> bool:
        """Return whether the next event could have written this file: for a new node, or as rewritten updates."""
        named = STORED[kind].fullmatch(path.name)
        if named is None or (kind == "models" and str(int(named[1])) != named[1]):
            return False
        if kind == "updates":
            node, part, order = map(int, named.groups())
            if path.with_name(f"{node}.{part}.{order - 1}.safetensors") in self.live:
                return True
        return int(named[1]) not in self._nodes


UNCHECKED = "give the authority's certificate with --authority to check who signed it"


@dataclass(frozen=True)
class Authority:
    """Certificates of a timestamp authority from a PEM file; the self-signed ones are the roots."""

    certificates: tuple[Any, ...]

    @staticmethod
    def read(path: str | Path) -> Authority:
        """Read the certificates from a file that the verifier trusts.

        Raises:
            InputError: If the file cannot be read or holds no certificates.
        """
        from cryptography.x509 import load_pem_x509_certificates

        timestamps.protocol()
        try:
            return Authority(tuple(load_pem_x509_certificates(read_plain(Path(path), links=True))))
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise InputError(f"{path} holds no certificates in PEM form: {error}") from error

    def signed(self, answer: bytes, content: bytes) -> str | None:
        """Return None if the authority signed a timestamp over `content`, otherwise the reason."""
        client = timestamps.protocol()
        builder = client.VerifierBuilder()
        for certificate in self.certificates:
            root = certificate.issuer == certificate.subject
            builder = (builder.add_root_certificate if root else builder.add_intermediate_certificate)(certificate)
        try:
            builder.build().verify_message(timestamps.read_timestamp(answer), content)
        except (client.VerificationError, InputError, ValueError) as error:
            return str(error)[:200]
        return None


def check_timestamp(name: str, answer: bytes, content: bytes, authority: Authority | None) -> tuple[str, list[str]]:
    """Check a timestamp.

    Args:
        name: Name of the timestamp's file.
        answer: Response of the authority.
        content: Bytes that the timestamp must cover.
        authority: The authority that must have signed it; None accepts any.

    Returns:
        The time at which `content` existed according to the authority (empty if unknown), and the problems found.
    """
    try:
        response = timestamps.read_timestamp(answer)
    except MissingPackageError:
        return "", []
    except InputError as error:
        return "", [f"timestamps: {name}: {error}"]
    time = response.tst_info.gen_time.strftime(clock.TIME_FORMAT)
    if response.tst_info.message_imprint.message != hashlib.sha256(content).digest():
        return time, [f"timestamps: {name} is not a timestamp of its file: one of the two was changed"]
    why = authority.signed(answer, content) if authority is not None else None
    return time, [f"timestamps: {name} is not signed by the authority given: {why}"] if why else []


def check_timestamp_of(path: Path, authority: Authority | None, notes: list[str]) -> list[str]:
    """Return the problems of a certificate's timestamp, the file of the same name with `.tsr` added.

    Args:
        path: The certificate.
        authority: The authority that must have signed the timestamp; None makes the timestamp optional.
        notes: List that receives a note with the time of the timestamp.
    """
    file = path.with_name(f"{path.name}.tsr")
    if not file.is_file() or file.stat().st_size > timestamps.LARGEST_ANSWER:
        return [f"timestamps: there is no {file.name} next to the certificate"] if authority is not None else []
    time, problems = check_timestamp(file.name, read_plain(file), path.read_bytes(), authority)
    if not problems:
        notes.append(_note(path.name, time, authority))
    return problems


def _note(name: str, time: str, authority: Authority | None) -> str:
    if not time:
        return f"{name} has a timestamp, which this installation cannot read: {install_extra('timestamps')}"
    signed = "" if authority is not None else f"; {UNCHECKED}"
    return f"{name} existed at {time} according to its timestamp{signed}"


def _check_dates(events: list[Event], seq: int, stamped: str) -> Iterator[str]:
    """Yield a problem if the ledger's clock contradicts the time at which the authority stamped a head.

    The head existed at that time, so its date must not be later. The following events did not exist yet, so their dates
    must not be earlier.
    """
    moment = clock.time_of(stamped)
    head, corrected = events[seq - 1], any(event.kind == clock.CLOCK_SET for event in events[seq:])
    if clock.time_of(head.time) - moment > clock.BEHIND and not corrected:
        yield f"clock: event {seq} is dated {head.time}, but by its timestamp it existed at {stamped}"
    for event in events[seq:]:
        if moment - clock.time_of(event.time) > clock.BEHIND:
            yield f"clock: event {event.seq} is dated {event.time}, after event {seq} was stamped at {stamped}"
            return


def check_timestamps(reader: RunReader, authority: Authority | None, notes: list[str]) -> Iterator[str]:
    """Yield a problem for each timestamp that is invalid or belongs to no head or certificate of the run.

    Args:
        reader: Reader of the run.
        authority: The authority that must have signed the timestamps; None accepts any.
        notes: List to which times and missing timestamps are added.
    """
    run = reader.value("run")
    contents = {
        f"{event.seq}.checkpoint.json": canonical_json(Checkpoint.of(run, event, key).to_mapping())
        for event, key in signed_events(reader.events())
        if event.signature is not None
    }
    for (request, form), content in reader.certificates().items():
        contents[certificate_path(reader.folder, request, form).name] = content.encode()
    latest: list[tuple[str, str]] = []
    for path in sorted((reader.folder / TIMESTAMPS).glob("*")):
        if path.name.startswith(TEMPORARY_PREFIX):
            continue
        name = path.name.removesuffix(".tsr")
        if not timestamps.NAME.fullmatch(path.name) or name not in contents:
            yield f"timestamps: {path.name[:80]} belongs to no head or certificate of this run"
            continue
        if path.stat().st_size > timestamps.LARGEST_ANSWER:
            yield f"timestamps: {path.name} is far larger than a timestamp"
            continue
        time, problems = check_timestamp(path.name, read_plain(path), contents[name], authority)
        yield from problems
        if not problems:
            latest.append((time, name))
        if time and name.endswith(".checkpoint.json"):
            yield from _check_dates(reader.events(), int(name.partition(".")[0]), time)
    notes.extend(_note(name, time, authority) for time, name in sorted(latest)[-3:])
    wanted = [
        name for event in reader.events() if event.kind == timestamps.MISSING for name in event.content["missing"]
    ]
    # A later head covers an earlier one; every certificate needs its own timestamp.
    still = [
        name
        for name in wanted
        if name.endswith(".public.json") and not timestamps.timestamp_path(reader.folder, name).exists()
    ]
    if still:
        notes.append(
            f"a timestamp was asked for and did not come: {', '.join(dict.fromkeys(still))[:200]}; sifu timestamp asks "
            "again"
        )


def parse_anchor(anchor: str) -> tuple[int, str]:
    """Return event number and hash of an anchor.

    Raises:
        InputError: If the text is not an anchor.
    """
    match = re.fullmatch(r"\s*([1-9][0-9]{0,17}):([0-9a-fA-F]{64})\s*", anchor)
    if not match:
        raise InputError(
            f"an anchor must be SEQ:HASH with 64 hexadecimal digits, as printed by sifu anchor; found {anchor[:90]!r}"
        )
    return int(match[1]), match[2].lower()


def holds_anchor(reader: RunReader, anchor: str) -> bool:
    """Return whether the chain has this event."""
    seq, digest = parse_anchor(anchor)
    rows = reader.query("SELECT hash FROM events WHERE seq = ?", (seq,))
    return bool(rows) and bytes(rows[0][0]).hex() == digest


def check_anchor(reader: RunReader, anchor: str) -> Iterator[str]:
    """Yield a problem if a published anchor is no longer in the chain."""
    if not holds_anchor(reader, anchor):
        seq, _ = parse_anchor(anchor)
        last = reader.query("SELECT MAX(seq) FROM events")[0][0] or 0
        how = (
            f"it ends at event {last}, before the anchor's {seq}: an older state was put back"
            if seq > last
            else f"its event {seq} is another one: the chain was rewritten"
        )
        yield f"anchor: the chain does not hold the anchor given; {how}"


RESTORED = "restored"


def event_notes(reader: RunReader) -> Iterator[str]:
    """Yield notes on notable past events: a wrong clock, a lost key, unsigned events, a restoration."""
    for event in reader.events():
        seq, time, content = event.seq, event.time, event.content
        if event.kind == clock.CLOCK_SET:
            yield (
                f"the operator set the clock from {content['before']} to {time} (event {seq}): what is dated before "
                "that event may have happened at another time"
            )
        elif event.kind == VOUCHED and content.get("unsigned"):
            gap = "events {} to {} were written without a signature".format(*content["unsigned"])
            yield f"{gap}; the operator vouched for them at {time} (event {seq})"
        elif event.kind == KEY_LOST:
            yield f"the operator's key was gone, or was another one, at {time} (event {seq})"
        elif event.kind == RESTORED:
            lost = "what was done between the backup and then is not in this record"
            gap = "the anchor given then was its last event" if content["complete"] else lost
            yield f"event {seq} restored the run from a backup on {time}; {gap}"
    if not (reader.folder / KEY_FILE).is_file():
        yield (
            f"the folder has no {KEY_FILE}: it can be verified, but nothing more can be signed until the key is put "
            "back, from a backup for example"
        )


def check_restored(reader: RunReader) -> Iterator[str]:
    """Yield a problem for each restoration whose statements about the chain before it are false."""
    branches = {row.node.node: row.node.branch for row in reader.node_rows()}
    ledger = ReplayedLedger.of(reader)
    numbers = {client.name: number for number, client in enumerate(reader.clients())}
    for event, before in ledger.moments():
        if event.kind != RESTORED:
            continue
        content, seq = event.content, event.seq
        if event.nonce:  # if the nonce is missing, a purge erased the list of dropped files
            yield from _check_nothing_came_back(event, before, numbers)
        branch = branches.get(ledger.tips[seq])
        if content["branch"] != branch:
            yield f"restored: event {seq} names branch {content['branch']}, the run was at {branch}"
        head = parse_anchor(content["backup_head"])
        if head[0] >= int(seq) or not holds_anchor(reader, content["backup_head"]):
            yield f"restored: event {seq} names a head that the chain does not hold"
        if content["complete"] and (content["anchor"] is None or parse_anchor(content["anchor"]) != head):
            yield f"restored: event {seq} calls itself complete without the anchor for it"


def _check_nothing_came_back(event: Event, before: ReplayedTables, numbers: dict[str, int]) -> Iterator[str]:
    """Yield a problem unless a restoration erased updates and statistics of the clients whose requests it restored."""
    received = before.rows["requests"]
    # A second certificate of the same client restores no second request, because one is waiting already.
    requests = [received[request,] for request in event.content["requests"] if (request,) in received]
    gone = {numbers[name] for row in requests for name in json.loads(row["terms"])["clients"]}
    networks = {node for node in event.content.get("dropped_models", []) if (node,) in before.rows["group_models"]}
    for what in ("updates", "statistics"):
        held = {
            file: {int(client) for client in json.loads(row["clients"])} for (file,), row in before.rows[what].items()
        }
        through = {file: set(json.loads(row.get("trunks", "[]"))) for (file,), row in before.rows[what].items()}
        wanted = sorted(str(file) for file, clients in held.items() if clients & gone or through[file] & networks)
        if sorted(event.content.get(f"dropped_{what}", [])) != wanted:
            yield f"restored: event {event.seq} did not erase the {what} of the clients whose requests it brought back"
    if any({int(client) for client in row["clients"]} & gone for row in event.content.get("updates", [])):
        yield f"restored: event {event.seq} stores updates of clients whose requests it brought back"
