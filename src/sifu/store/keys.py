"""The operator's Ed25519 key: made with the run, private key in a file only the owner can read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sifu.core.errors import RunDamagedError
from sifu.core.ledger import canonical_json
from sifu.store.files import write_atomically

KEY_FILE = "operator.key"


def create_key(folder: Path) -> str:
    """Write a new private key into the run folder; returns the public key as hex."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = Ed25519PrivateKey.generate()
    content = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_atomically(folder / KEY_FILE, content)
    return key.public_key().public_bytes_raw().hex()


def load_key(folder: Path, public_key: str) -> Any:
    """The operator's private key, checked to be the one the run was created with."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key((folder / KEY_FILE).read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise RunDamagedError(
            f"the operator's key {KEY_FILE} cannot be read ({error}): restore it from a backup"
        ) from error
    if not isinstance(key, Ed25519PrivateKey) or key.public_key().public_bytes_raw().hex() != public_key:
        raise RunDamagedError(f"{KEY_FILE} is not the key this run was created with: restore it from a backup")
    return key


def sign(folder: Path, body: dict[str, Any], public_key: str) -> dict[str, Any]:
    """A certificate: `body`, and an Ed25519 signature over its canonical JSON."""
    key = load_key(folder, public_key)
    return {"body": body, "public_key": public_key, "signature": key.sign(canonical_json(body)).hex()}


def signature_holds(certificate: dict[str, Any], public_key: str | None = None) -> bool:
    """Whether the signature is that of the key named (or of the one expected) over the body."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        named = str(certificate["public_key"])
        if public_key is not None and named != public_key:
            return False
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(named))
        key.verify(bytes.fromhex(str(certificate["signature"])), canonical_json(certificate["body"]))
    except (InvalidSignature, KeyError, ValueError, TypeError):
        return False
    return True
