"""Attestations: the public certificate as an in-toto statement in a DSSE envelope, for other tools.

envelope   DSSE v1, signed with the operator's Ed25519 key; https://github.com/secure-systems-lab/dsse
payload    an in-toto Statement v1 whose predicate is the body of the public certificate
subject    the SHA-256 of the certificate's file, which the event `request done` records as well; in an evidence
           bundle also the SHA-256 of every other file, so that one signature covers them all
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from securesystemslib.dsse import Envelope
from securesystemslib.signer import CryptoSigner  # type: ignore[attr-defined]

from sifu.core.ledger import canonical_json, read_json
from sifu.store.erased_figures import no_certificate
from sifu.store.files import certificate_path
from sifu.store.keys import load_key
from sifu.store.reader import RunReader
from sifu.verify.certificate_file import PAYLOAD_TYPE

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:sifu:public-certificate:4"


def attest(reader: RunReader, request: str, others: Mapping[str, bytes] | None = None) -> dict[str, Any]:
    """Return the in-toto statement on a request's public certificate and on `others`, the files delivered with it.

    The result is a DSSE envelope as a JSON object, signed with the operator's key.
    """
    text = reader.certificates(request).get((request, "public"))
    if text is None:
        raise no_certificate(reader, request, "public")
    contents = {certificate_path(reader.folder, request, "public").name: text.encode(), **(others or {})}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in digests.items()],
        "predicateType": PREDICATE_TYPE,
        "predicate": read_json(text)["body"],
    }
    envelope = Envelope(canonical_json(statement), PAYLOAD_TYPE, {})
    envelope.sign(CryptoSigner(load_key(reader.folder, reader.value("public_key"))))
    content: dict[str, Any] = envelope.to_dict()
    return content
