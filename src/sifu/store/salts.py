"""Salts of the digests of clients' samples, in a file from which individual salts can be erased.

The ledger keeps a digest of each client's samples permanently. The digest is salted, and only `salts.json` holds the
salt. When a client is forgotten, its salt is erased; its digest can then no longer confirm a guess of the client's
samples. If only some records of a client are forgotten, the salt is erased once the client has joined again with its
remaining records. For closed-form heads, salts are erased only once the head without the clients is solved. Clients in
a Flower federation do not disclose their samples and have neither digest nor salt.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sifu.core.ledger import canonical_json, commit
from sifu.errors import InputError
from sifu.store.files import SALT_BYTES, read_plain, write_atomically
from sifu.store.reader import RunReader, remainder_to_join

SALTS_FILE = "salts.json"
WITHOUT_SALTS = (
    "put the file back from a backup of the run. Where there is none, nothing more can be trained or forgotten here: "
    "train the clients that stay in a new folder, which never sees the others' data, and delete this one "
    "(docs/security.md, a lost salts.json)"
)
"""Advice to an operator whose salts are lost."""


def salted_sample_digest(salt: str, digest: str) -> str:
    """Return the SHA-256 of the salt and the digest of the samples, all as hexadecimal digits.

    >>> salted_sample_digest("00" * 32, "11" * 32)[:8]
    '8878b15a'
    """
    return commit(bytes.fromhex(salt), bytes.fromhex(digest)).hex()


def add_salts(folder: Path, digests: Mapping[int, str]) -> dict[int, str]:
    """Write a new salt for each client and return the salted digests.

    Call it before recording the event that holds the salted digests.
    """
    new = {client: secrets.token_hex(SALT_BYTES) for client in digests}
    if new:
        _write(folder, read_salts(folder) | new)
    return {client: salted_sample_digest(new[client], digest) for client, digest in digests.items()}


def recorded_digests(reader: RunReader) -> dict[int, str]:
    """Return the recorded salted digest of each client's samples, by client index, for the clients that have one."""
    joined, count = reader.joined(), len(reader.clients())
    recorded: dict[int, str] = dict(enumerate(reader.payload(1).get("sample_digests", [])))
    for client, seq in enumerate(joined, start=count - len(joined)):
        payload = reader.payload(seq)
        if "sample_digest" in payload:
            recorded[client] = payload["sample_digest"]
    return recorded


def obsolete_clients(reader: RunReader) -> set[int]:
    """Return the clients whose samples are no longer needed: forgotten clients, except a client that has yet to rejoin.

    A client that lost some records rejoins with its remaining records.
    """
    waiting = remainder_to_join(reader)
    forgotten = {client for subject in reader.subjects() for client in subject.clients}
    return forgotten - ({waiting.before} if waiting else set())


def erase_salts(reader: RunReader) -> None:
    """Erase the salts of the clients in `obsolete_clients`, and of clients that were never recorded."""
    salts = read_salts(reader.folder)
    gone = obsolete_clients(reader) if salts else set()
    stay = {client: salt for client, salt in salts.items() if client not in gone and client < len(reader.clients())}
    if stay != salts:
        _write(reader.folder, stay)


def read_salts(folder: Path) -> dict[int, str]:
    """Return the salts by client index, or an empty mapping if there is no file.

    Raises:
        InputError: If the file cannot be read or holds anything but salts.
    """
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
