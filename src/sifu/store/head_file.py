"""The file `head`, and what else in the folder tells that its database is an older one put back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from sifu.core.ledger import Event
from sifu.store.certificate_path import CERTIFICATES
from sifu.store.files import write_atomically
from sifu.store.reader import RunReader
from sifu.store.regular_files import read_plain

HEAD_FILE = "head"
"""`SEQ:HASH` of a recent event, beside the database."""


def write_head(folder: Path, event: Event) -> None:
    """Note an event that the database has from now on."""
    write_atomically(folder / HEAD_FILE, f"{event.seq}:{event.hash.hex()}\n".encode())


def signs_of_an_older_database(reader: RunReader) -> Iterator[str]:
    """What lies beside the database and speaks of events that it does not have."""
    hashes = {int(seq): bytes(digest).hex() for seq, digest in reader.query("SELECT seq, hash FROM events")}

    def has_event(seq: int, digest: str) -> bool:
        return hashes.get(seq) == digest

    path = reader.folder / HEAD_FILE
    if path.is_file():
        seq, _, digest = path.read_text(encoding="utf-8", errors="replace").strip().partition(":")
        if not (seq.isdecimal() and len(seq) < 19 and has_event(int(seq), digest)):
            yield (
                f"the file {HEAD_FILE} names event {seq[:12]}, which the database does not have, "
                "or has with another hash"
            )
    for certificate in sorted((reader.folder / CERTIFICATES).glob("*.json")):
        try:
            ledger = json.loads(read_plain(certificate))["body"]["ledger"]
            seq_number, head = int(ledger["seq"]), str(ledger["head"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue  # verification names what is wrong with it
        if not has_event(seq_number, head):
            name = certificate.name
            yield f"certificate {name} was issued after event {seq_number}, which the database does not have"
