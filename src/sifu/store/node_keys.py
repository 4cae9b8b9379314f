"""A statement that a client signed with the private key of its node (ECDSA over SHA-256)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sifu.core.identity import key_fingerprint
from sifu.core.ledger import canonical_json
from sifu.errors import InputError


def sign_statement(key_file: Path, body: dict[str, Any]) -> dict[str, Any]:
    """`body` with the node's public key and its signature over the canonical JSON."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key

    try:
        key = load_ssh_private_key(key_file.read_bytes(), None)
    except OSError as error:
        raise InputError(f"cannot read the key {key_file}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise InputError(f"{key_file} is not a private key of ssh-keygen without a passphrase ({error})") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError(f"{key_file} is not an ECDSA key: make one with ssh-keygen -t ecdsa -b 384")
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    signature = key.sign(canonical_json(body), ec.ECDSA(SHA256()))
    return {"body": body, "key": pem.decode(), "signature": signature.hex()}


def signer_of(statement: dict[str, Any]) -> str | None:
    """The fingerprint of the key that signed the body, or None where the signature does not hold.

    It is taken of the very key that the signature was checked with, not of the text that named it.
    """
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

    try:
        key = load_pem_public_key(str(statement["key"]).encode())
        if not isinstance(key, ec.EllipticCurvePublicKey):
            return None
        signature = bytes.fromhex(str(statement["signature"]))
        key.verify(signature, canonical_json(statement["body"]), ec.ECDSA(SHA256()))
    except (InvalidSignature, UnsupportedAlgorithm, KeyError, ValueError, TypeError):
        return None
    return key_fingerprint(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
