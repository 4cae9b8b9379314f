"""The file `head`, and what else in the folder tells that its database is an older one put back."""

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
"""`SEQ:HASH` of the last event; while an event is being committed, a second line names it."""
_CONTENT = re.compile(r"([1-9][0-9]{0,17}:[0-9a-f]{64}\n){1,2}")
"""One line or two, each with its end: the file is written whole or not at all, so anything else was changed."""


def write_head(folder: Path, event: Event) -> None:
    """Note the last event that the database has."""
    write_atomically(folder / HEAD_FILE, f"{_text(event.seq, event.hash)}\n".encode())


def announce_head(folder: Path, seq: int, previous: bytes, event: Event) -> None:
    """Note the event that is about to be committed after event `seq`: killed now, the database has it or has not."""
    lines = f"{_text(seq, previous)}\n{_text(event.seq, event.hash)}\n"
    write_atomically(folder / HEAD_FILE, lines.encode())


def _text(seq: int, digest: bytes) -> str:
    return f"{seq}:{digest.hex()}"


def check_head_file(reader: RunReader) -> Iterator[str]:
    """The file must name the database's last event: an older database put back, or an older file, does not."""
    last = reader.value("head")
    try:
        content = read_plain(reader.folder / HEAD_FILE).decode("ascii")
    except FileNotFoundError:
        yield (
            f"the file {HEAD_FILE} is missing, so nothing says whether this is the latest state of the run. If it is, "
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
            else "the database has gone on, or has another event there"
        )
        yield f"the file {HEAD_FILE} names event {named}, but {how}"


def signs_of_an_older_database(reader: RunReader, *, head_may_be_missing: bool = False) -> Iterator[str]:
    """Files of the run folder that name events which the database does not have."""
    if not head_may_be_missing or (reader.folder / HEAD_FILE).exists():
        yield from check_head_file(reader)
    hashes = {int(seq): bytes(digest).hex() for seq, digest in reader.query("SELECT seq, hash FROM events")}

    def has_event(seq: int, digest: str) -> bool:
        return hashes.get(seq) == digest

    for certificate in sorted((reader.folder / CERTIFICATES).glob("*.json")):
        try:
            seq_number, head = _named_by(read_plain(certificate))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue  # verification names what is wrong with it
        if not has_event(seq_number, head):
            name = certificate.name
            yield f"certificate {name} was issued after event {seq_number}, which the database does not have"


_seen: dict[bytes, tuple[int, str]] = {}
"""The event that each certificate names, by the digest of its bytes: a run is opened for writing again and again."""
_MOST_SEEN = 100_000


def _named_by(certificate: bytes) -> tuple[int, str]:
    """Number and hash of the event that a certificate was issued after."""
    digest = hashlib.sha256(certificate).digest()
    if digest not in _seen:
        ledger = json.loads(certificate)["body"]["ledger"]
        if len(_seen) >= _MOST_SEEN:
            _seen.clear()
        _seen[digest] = int(ledger["seq"]), str(ledger["head"])
    return _seen[digest]
