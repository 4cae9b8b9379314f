"""The file `head` of a run folder: it names the last event, so an older database in the folder is detected."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

from sifu.core.ledger import Event
from sifu.store.files import CERTIFICATES, read_plain, write_atomically
from sifu.store.reader import RunReader

HEAD_FILE = "head"
"""File with `SEQ:HASH` of the last event. While an event is being committed, a second line names that event."""
_CONTENT = re.compile(r"([1-9][0-9]{0,17}:[0-9a-f]{64}\n){1,2}")
"""Pattern of one or two complete lines. The file is written atomically, so any other content was changed by hand."""


def write_head(folder: Path, event: Event) -> None:
    """Write the last event of the database to the file `head`."""
    write_atomically(folder / HEAD_FILE, f"{event.head}\n".encode())


def announce_head(folder: Path, before: str, event: Event) -> None:
    """Write the current last event to the file `head`, and after it the event that is about to be committed.

    If the process is killed now, either of the two may be the last event of the database.
    """
    write_atomically(folder / HEAD_FILE, f"{before}\n{event.head}\n".encode())


def check_head_file(reader: RunReader) -> Iterator[str]:
    """Yield a problem unless the file `head` names the last event of the database.

    This detects an older database, or an older file, that was put back.
    """
    last = reader.value("head")
    try:
        content = read_plain(reader.folder / HEAD_FILE).decode("ascii")
    except FileNotFoundError:
        yield (
            f"the file {HEAD_FILE} is missing, so it is unknown whether this is the latest state of the run. If it is, "
            "sifu sign writes the file again"
        )
        return
    except UnicodeDecodeError:
        content = ""
    except OSError as error:
        yield f"the file {HEAD_FILE} cannot be read: {error.strerror}"
        return
    lines = content.splitlines()
    if not _CONTENT.fullmatch(content):
        yield f"the file {HEAD_FILE} cannot be read: it holds no SEQ:HASH of an event"
    elif last not in lines:
        named, ends = int(lines[0].partition(":")[0]), int(last.partition(":")[0])
        how = (
            f"the database ends at event {ends}: an older state was put back"
            if named > ends
            else "the database has later events, or another event at this position"
        )
        yield f"the file {HEAD_FILE} names event {named}, but {how}"


def signs_of_an_older_database(reader: RunReader, *, head_may_be_missing: bool = False) -> Iterator[str]:
    """Yield a problem for each file of the run folder that names an event missing from the database.

    With `head_may_be_missing`, a run without the file `head` is accepted.
    """
    if not head_may_be_missing or (reader.folder / HEAD_FILE).exists():
        yield from check_head_file(reader)
    hashes = reader.hashes()
    for certificate in sorted((reader.folder / CERTIFICATES).glob("*.json")):
        try:
            seq, head = _named_by(read_plain(certificate))
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue  # verification reports the unreadable file
        if hashes.get(seq) != head:
            yield f"certificate {certificate.name} was issued after event {seq}, which the database does not have"


_seen: dict[bytes, tuple[int, str]] = {}
"""Cache of the event that a certificate names, by the certificate's SHA-256; opening a run reads all of them."""
_MOST_SEEN = 100_000


def _named_by(certificate: bytes) -> tuple[int, str]:
    """Return the number and hash of the last event before a certificate was issued."""
    digest = hashlib.sha256(certificate).digest()
    if digest not in _seen:
        ledger = json.loads(certificate)["body"]["ledger"]
        if len(_seen) >= _MOST_SEEN:
            _seen.clear()
        _seen[digest] = int(ledger["seq"]), str(ledger["head"])
    return _seen[digest]
