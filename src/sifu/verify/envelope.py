"""A public certificate in a DSSE envelope (`sifu certificate attest`, or `statement.dsse.json` of the evidence)."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from sifu.core.ledger import read_json
from sifu.errors import InputError

FIELDS = {"payload", "payloadType", "signatures"}
PAYLOAD_TYPE = "application/vnd.in-toto+json"


def is_envelope(content: Any) -> bool:
    """Whether a JSON value is a DSSE envelope and not a certificate."""
    return isinstance(content, dict) and set(content) == FIELDS


def statement_in(envelope: dict[str, Any]) -> dict[str, Any]:
    """The in-toto statement that an envelope holds; what is none raises a ValueError, KeyError or TypeError."""
    if envelope["payloadType"] != PAYLOAD_TYPE:
        raise ValueError(f"its payload is of the type {str(envelope['payloadType'])[:60]!r}")
    statement: dict[str, Any] = read_json(base64.b64decode(envelope["payload"], validate=True))
    return statement


def check_envelope(envelope: dict[str, Any], path: Path, public_key: str | None) -> tuple[str, list[str], list[str]]:
    """The key that should have signed, problems, and notes.

    An envelope does not name its key: it is the one given, or that of the certificate in the same folder.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    payload, kind = base64.b64decode(envelope["payload"]), PAYLOAD_TYPE.encode()
    subject = statement_in(envelope)["subject"][0]
    beside = path.with_name(Path(subject["name"]).name)
    problems, notes = [], []
    if beside.is_file():
        text = beside.read_bytes()
        if hashlib.sha256(text).hexdigest() != subject["digest"]["sha256"]:
            problems.append(f"envelope: it is about another certificate than {beside.name} in the same folder")
        public_key = public_key or str(read_json(text)["public_key"])
    elif public_key is None:
        raise InputError(
            f"{path} is a DSSE envelope, which does not hold the key it was signed with: give the operator's with "
            f"--public-key, or put {beside.name} into the same folder"
        )
    else:
        notes.append(f"{beside.name}, which the envelope is about, is not in the same folder")
    message = b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)
    for entry in envelope["signatures"]:
        try:
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
            key.verify(base64.b64decode(entry["sig"]), message)
            break
        except (InvalidSignature, ValueError, KeyError, TypeError):
            continue
    else:
        problems.append("signature: no signature of the envelope is that of the operator's key over its content")
    return public_key.lower(), problems, notes
