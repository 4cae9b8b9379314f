"""Salts of the clients' sample digests, in a file that can be erased.

The ledger keeps a digest of each client's samples for ever. It is salted, and the salt is in `salts.json` alone. Once
the client is forgotten its salt is erased, and the digest can no longer confirm that some samples were the client's.
A client whose records are being forgotten keeps its salt until it has joined again with the rest. Clients of Flower
keep their samples to themselves and have neither.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sifu.core.ledger import canonical_json
from sifu.errors import InputError
from sifu.store.files import SALT_BYTES, read_plain, write_atomically
from sifu.store.reader import RunReader, remainder_to_join

SALTS_FILE = "salts.json"
WITHOUT_SALTS = (
    "put the file back from a backup of the run. Where there is none, nothing more can be trained or forgotten here: "
    "train the clients that stay in a new folder, which never sees the others' data, and delete this one "
    "(docs/security.md, a lost salts.json)"
)
"""What an operator can do once salts are lost."""


def salted_sample_digest(salt: str, digest: str) -> str:
    """SHA-256 over the salt and the digest of the samples, all of them in hexadecimal digits.

    >>> salted_sample_digest("00" * 32, "11" * 32)[:8]
    '8878b15a'
    """
    return hashlib.sha256(bytes.fromhex(salt) + bytes.fromhex(digest)).hexdigest()


def add_salts(folder: Path, digests: Mapping[int, str]) -> dict[int, str]:
    """Write a new salt for each client, before the event that records the salted digests, which are returned."""
    new = {client: secrets.token_hex(SALT_BYTES) for client in digests}
    if new:
        _write(folder, read_salts(folder) | new)
    return {client: salted_sample_digest(new[client], digest) for client, digest in digests.items()}


def recorded_digests(reader: RunReader) -> dict[int, str]:
    """The salted digest of each client's samples by the client's number, of those that have one."""
    joined, count = reader.joined(), len(reader.clients())
    recorded: dict[int, str] = dict(enumerate(reader.payload(1).get("sample_digests", [])))
    for client, seq in enumerate(joined, start=count - len(joined)):
        payload = reader.payload(seq)
        if "sample_digest" in payload:
            recorded[client] = payload["sample_digest"]
    return recorded


def outlived(reader: RunReader) -> set[int]:
    """Clients whose salt is to be erased: everyone forgotten, but for whom is still to join again with less.

    Clients forgotten after a backup stay forgotten in a restoration, before their request is carried out again.
    """
    waiting = remainder_to_join(reader)
    forgotten = {client for subject in reader.subjects() for client in subject.clients}
    restored = reader.query("SELECT payload FROM events WHERE kind = 'restored'")
    again = {request for (payload,) in restored for request in json.loads(payload)["requests"]}
    names = {name for row in reader.requests() if row.request in again for name in row.clients}
    forgotten |= {client for client, profile in enumerate(reader.clients()) if profile.name in names}
    return forgotten - ({waiting.before} if waiting else set())


def erase_salts(reader: RunReader) -> None:
    """Erase the salts of everyone forgotten, and of clients that were never recorded."""
    salts = read_salts(reader.folder)
    gone = outlived(reader) if salts else set()
    stay = {client: salt for client, salt in salts.items() if client not in gone and client < len(reader.clients())}
    if stay != salts:
        _write(reader.folder, stay)


def read_salts(folder: Path) -> dict[int, str]:
    """Salts by the client's number; none where there is no file. A file that is not ours is refused."""
    path = folder / SALTS_FILE
    try:
        content: dict[str, Any] = json.loads(read_plain(path))
        salts = {int(client): str(salt) for client, salt in content.items()}
        if any(len(bytes.fromhex(salt)) != SALT_BYTES for salt in salts.values()):
            raise ValueError("a salt has another length")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} cannot be read ({error}): {WITHOUT_SALTS}") from error
    return salts


def _write(folder: Path, salts: Mapping[int, str]) -> None:
    write_atomically(folder / SALTS_FILE, canonical_json({str(client): salt for client, salt in sorted(salts.items())}))
