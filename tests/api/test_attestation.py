"""Exports of the public certificate: an in-toto statement in a DSSE envelope."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import SSlibKey

import sifu
from run_tools import Command
from sifu.errors import InputError
from sifu.store.files import certificate_path


def operator_key(run: Path) -> Ed25519PublicKey:
    content = json.loads(certificate_path(run, "strictly", "public").read_bytes())
    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(content["public_key"]))


def test_the_envelope_verifies_with_the_library_and_by_hand(run_with_requests: Path) -> None:
    content = sifu.open_run(run_with_requests).attestation("strictly")
    public = operator_key(run_with_requests)
    (signature,) = content["signatures"]
    payload, kind = base64.b64decode(content["payload"]), content["payloadType"]
    # the encoding that the text of DSSE v1 defines
    encoded = b"DSSEv1 %d %b %d %b" % (len(kind), kind.encode(), len(payload), payload)
    public.verify(base64.b64decode(signature["sig"]), encoded)
    with pytest.raises(InvalidSignature):
        public.verify(base64.b64decode(signature["sig"]), encoded + b" ")
    key = SSlibKey.from_crypto(public, signature["keyid"])
    Envelope.from_dict(json.loads(json.dumps(content))).verify([key], 1)
    changed = json.loads(json.dumps(content))
    changed["payload"] = base64.b64encode(payload.replace(b'"level":"', b'"level":"x')).decode()
    with pytest.raises(VerificationError):
        Envelope.from_dict(changed).verify([key], 1)


def test_the_statement_is_in_totos_and_names_the_certificate(run_with_requests: Path, cli: Command) -> None:
    answer = cli("certificate", "attest", run_with_requests, "strictly")
    assert answer.code == 0
    statement = json.loads(base64.b64decode(json.loads(answer.out)["payload"]))
    file = certificate_path(run_with_requests, "strictly", "public")
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["subject"] == [
        {"name": file.name, "digest": {"sha256": hashlib.sha256(file.read_bytes()).hexdigest()}}
    ]
    assert statement["predicate"] == json.loads(file.read_bytes())["body"]


def test_a_request_without_a_certificate_is_a_sentence(run_with_requests: Path) -> None:
    with pytest.raises(InputError, match="has no public certificate"):
        sifu.open_run(run_with_requests).attestation("nobody")
