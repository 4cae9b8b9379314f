"""The operator's Ed25519 key, plain or encrypted, and statements signed by the key of a client's node."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from sifu.core.identity import key_fingerprint
from sifu.core.ledger import canonical_json
from sifu.errors import InputError, RunDamagedError
from sifu.store.files import sync_folder, write_atomically

KEY_FILE = "operator.key"
PENDING = "operator.key.new-"
"""With the public key behind it: a new key that a rotation wrote before its event."""
PASSPHRASE = "SIFU_PASSPHRASE"
PUBLIC_KEY = re.compile("[0-9a-f]{64}")
SIGNATURE = re.compile("[0-9a-f]{128}")
_typed: list[bytes] = []
"""What was typed on the terminal: asked for once, not for every event."""


def passphrase(ask: bool) -> bytes | None:
    """From the environment, or typed on a terminal where `ask` says that one is needed."""
    given = os.environ.get(PASSPHRASE)
    if given:
        return given.encode()
    if ask and not _typed and sys.stdin is not None and sys.stdin.isatty():
        import getpass

        secret = getpass.getpass("Passphrase of the operator's key: ").encode()
        if secret:
            _typed.append(secret)
    return _typed[-1] if ask and _typed else None


def new_key() -> Any:
    """A fresh private key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.generate()


def read_key(path: Path) -> Any:
    """A private key in a PEM file, decrypted if need be."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    content = path.read_bytes()
    try:
        key = load_pem_private_key(content, password=None)
    except TypeError:  # it is encrypted
        secret = passphrase(ask=True)
        if secret is None:
            raise InputError(f"{path.name} is encrypted: set {PASSPHRASE}, or call from a terminal") from None
        try:
            key = load_pem_private_key(content, password=secret)
        except ValueError as error:
            _typed.clear()
            raise InputError(f"the passphrase does not open {path.name}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError("not an Ed25519 key")
    return key


def write_key(path: Path, key: Any, *, like_the_old: bool = False) -> str:
    """Write a private key, encrypted if there is a passphrase; returns the public key as hex.

    In the place of an encrypted one (`like_the_old`) it is encrypted, too: with the passphrase that was typed for it.
    """
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        KeySerializationEncryption,
        NoEncryption,
        PrivateFormat,
    )

    secret = passphrase(ask=like_the_old)
    if like_the_old and not secret:
        raise InputError(f"the old key is encrypted, so the new one must be, too: set {PASSPHRASE}")
    how: KeySerializationEncryption = BestAvailableEncryption(secret) if secret else NoEncryption()
    write_atomically(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, how))
    return public_hex(key)


def public_hex(key: Any) -> str:
    """The public half of a private key, as hex."""
    public: str = key.public_key().public_bytes_raw().hex()
    return public


def create_key(folder: Path) -> str:
    """Write a new private key into the run folder; returns the public key as hex."""
    return write_key(folder / KEY_FILE, new_key())


def is_encrypted(folder: Path) -> bool:
    """Whether the key in the folder needs a passphrase."""
    try:
        return b"ENCRYPTED" in (folder / KEY_FILE).read_bytes()
    except OSError:
        return False


def load_key(folder: Path, public_key: str) -> Any:
    """The operator's private key, checked to be the one the run names."""
    try:
        key = read_key(folder / KEY_FILE)
    except (OSError, ValueError, TypeError) as error:
        raise RunDamagedError(
            f"the operator's key {KEY_FILE} cannot be read ({error}): restore it from a backup"
        ) from error
    if public_hex(key) != public_key:
        raise RunDamagedError(f"{KEY_FILE} is not the key this run was created with: restore it from a backup")
    return key


def finish_rotation(folder: Path, public_key: str) -> None:
    """Put a new key in its place if its event was recorded, and delete it if it was not."""
    pending = sorted(folder.glob(PENDING + "*"))
    for path in pending:
        if path.name == PENDING + public_key:
            os.replace(path, folder / KEY_FILE)
        else:
            path.unlink()
    if pending:
        sync_folder(folder)


def rotation_statement(run: str, old: str, new: str) -> dict[str, str]:
    """What both keys sign when one takes the other's place."""
    return {"statement": "this key takes the place of the old one", "run": run, "old": old, "new": new}


def sign(folder: Path, body: dict[str, Any], public_key: str) -> dict[str, Any]:
    """A certificate: `body`, and an Ed25519 signature over its canonical JSON."""
    key = load_key(folder, public_key)
    return {"body": body, "public_key": public_key, "signature": key.sign(canonical_json(body)).hex()}


def signature_holds(certificate: dict[str, Any], public_key: str | None = None) -> bool:
    """Whether the signature is that of the key named (or of the one expected) over the body."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        named, signature = certificate["public_key"], certificate["signature"]
        # Exactly one spelling of each, and nothing outside the signed body.
        if not (PUBLIC_KEY.fullmatch(named) and SIGNATURE.fullmatch(signature)) or len(certificate) != 3:
            return False
        if public_key is not None and named != public_key:
            return False
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(named))
        key.verify(bytes.fromhex(signature), canonical_json(certificate["body"]))
    except (InvalidSignature, KeyError, ValueError, TypeError):
        return False
    return True


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
