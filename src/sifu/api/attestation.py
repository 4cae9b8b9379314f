"""The public certificate for other people's tools: an in-toto statement in a DSSE envelope.

envelope   DSSE v1, signed with the operator's Ed25519 key; https://github.com/secure-systems-lab/dsse
payload    an in-toto Statement v1 whose predicate is the body of the public certificate
subject    the certificate's file, by the SHA-256 that the event `request done` commits to, too; of a bundle of
           evidence also its other files, so that one signature covers them all
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from securesystemslib.dsse import Envelope
from securesystemslib.signer import CryptoSigner  # type: ignore[attr-defined]

from sifu.core.ledger import canonical_json, read_json
from sifu.errors import InputError
from sifu.store.files import certificate_path
from sifu.store.keys import load_key
from sifu.store.reader import RunReader
from sifu.verify.certificate_file import PAYLOAD_TYPE

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:sifu:public-certificate:4"


def statement_of(reader: RunReader, request: str, others: Mapping[str, bytes]) -> dict[str, Any]:
    """The in-toto statement of a request's public certificate, and of the `others` that are handed out with it."""
    text = reader.certificates(request).get((request, "public"))
    if text is None:
        raise InputError(f"request {request[:80]!r} has no public certificate: is it done? See sifu requests list")
    contents = {certificate_path(reader.folder, request, "public").name: text.encode(), **others}
    return {
        "_type": STATEMENT_TYPE,
        "subject": [
            {"name": name, "digest": {"sha256": hashlib.sha256(content).hexdigest()}}
            for name, content in contents.items()
        ],
        "predicateType": PREDICATE_TYPE,
        "predicate": read_json(text)["body"],
    }


def attest(reader: RunReader, request: str, others: Mapping[str, bytes] | None = None) -> dict[str, Any]:
    """The statement in a signed envelope, as a JSON object; needs the operator's key."""
    statement = canonical_json(statement_of(reader, request, others or {}))
    envelope = Envelope(statement, PAYLOAD_TYPE, {})
    envelope.sign(CryptoSigner(load_key(reader.folder, reader.value("public_key"))))
    content: dict[str, Any] = envelope.to_dict()
    return content
