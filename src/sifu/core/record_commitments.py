"""Commitments to identities of forgotten records, which let a person check that a certificate covers a record.

    commitment = SHA-256(nonce || run, request, client and identity as canonical JSON)

The nonce consists of 32 random bytes and is given to the person when the request is filed. The run keeps only the
commitment, so its files do not reveal the identities.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from sifu.core.ledger import NONCE_BYTES, canonical_json, commit
from sifu.errors import InputError

HEX = re.compile(rf"[0-9a-f]{{{2 * NONCE_BYTES}}}", re.ASCII)


def new_nonces(identities: Iterable[object]) -> dict[str, str]:
    """Return a fresh nonce for each of `identities`, keyed by the identity as a string."""
    return {str(identity): secrets.token_hex(NONCE_BYTES) for identity in identities}


def is_commitment(value: object) -> bool:
    """Return whether `value` has the form of a commitment: 64 lower-case hexadecimal digits."""
    return isinstance(value, str) and HEX.fullmatch(value) is not None


def record_commitment(run: str, request: str, client: str, identity: str, nonce: str) -> str:
    """Return the commitment to one record's identity.

    Args:
        run: Id of the run.
        request: Id of the request.
        client: Name under which the client first joined.
        identity: Value of the column `data.id`, or the row number as a string.
        nonce: 64 hexadecimal digits.

    Returns:
        64 hexadecimal digits.

    Raises:
        InputError: If `nonce` is not 64 hexadecimal digits.
    """
    if not HEX.fullmatch(nonce):
        raise InputError(f"a nonce has {2 * NONCE_BYTES} hexadecimal digits (0-9, a-f), found {nonce[:80]!r}")
    named = {"run": run, "request": request, "client": client, "identity": identity}
    return commit(bytes.fromhex(nonce), canonical_json(named)).hex()


def commitments_to(run: str, request: str, client: str, nonces: Mapping[str, str]) -> list[str]:
    """Return the commitments to all identities of a request, sorted so that their order reveals nothing."""
    return sorted(record_commitment(run, request, client, *named) for named in nonces.items())


def names_record(body: Mapping[str, Any], identity: str, nonce: str) -> bool:
    """Return whether a certificate covers the record with this identity, whose commitment was made with `nonce`."""
    stated = body["commitments"].get("records", [])
    return record_commitment(body["run"], body["request"], body["clients"][0], identity, nonce) in stated
