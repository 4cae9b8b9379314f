"""The operator's Ed25519 key, plain or encrypted, its rotations, and statements signed with it or with a node's key."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sifu.core.client_names import key_fingerprint
from sifu.core.ledger import canonical_json
from sifu.errors import InputError, RunDamagedError
from sifu.store.files import sync_folder, write_atomically
from sifu.store.reader import RunReader

KEY_FILE = "operator.key"
PENDING = "operator.key.new-"
"""Prefix of the name of a new key's file, followed by the public key; a rotation writes the file before its event."""
ROTATED = "key rotated"
PASSPHRASE = "SIFU_PASSPHRASE"
PUBLIC_KEY = re.compile("[0-9a-f]{64}")
SIGNATURE = re.compile("[0-9a-f]{128}")
_typed: list[bytes] = []
"""The passphrase typed on the terminal, kept so that the user is asked only once."""


def passphrase(ask: bool) -> bytes | None:
    """Return the passphrase from the environment or, if `ask` is true, from the terminal, or None if there is none."""
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
    """Generate a new private key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.generate()


def read_key(path: Path) -> Any:
    """Read a private key from a PEM file, and decrypt it if necessary.

    Raises:
        InputError: If the passphrase is missing or wrong.
        ValueError: If the file holds no Ed25519 key.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    content = path.read_bytes()
    try:
        key = load_pem_private_key(content, password=None)
    except TypeError:  # the key is encrypted
        secret = passphrase(ask=True)
        if secret is None:
            raise InputError(f"{path.name} is encrypted: set {PASSPHRASE}, or run the command in a terminal") from None
        try:
            key = load_pem_private_key(content, password=secret)
        except ValueError as error:
            _typed.clear()
            raise InputError(f"the passphrase does not open {path.name}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError("not an Ed25519 key")
    return key


def write_key(path: Path, key: Any, *, like_the_old: bool = False) -> str:
    """Write a private key, encrypted if there is a passphrase.

    Args:
        path: File to write.
        key: Private key.
        like_the_old: True if the key replaces an encrypted key. The new key must then be encrypted as well; if the
            environment has no passphrase, the passphrase typed for the old key is used.

    Returns:
        The public key as hex.
    """
    from cryptography.hazmat.primitives import serialization as forms

    secret = passphrase(ask=like_the_old)
    if like_the_old and not secret:
        raise InputError(f"the old key is encrypted, so the new one must be encrypted too: set {PASSPHRASE}")
    how = forms.BestAvailableEncryption(secret) if secret else forms.NoEncryption()
    write_atomically(path, key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, how))
    return public_hex(key)


def public_hex(key: Any) -> str:
    """Return the public half of a private key, as hex."""
    public: str = key.public_key().public_bytes_raw().hex()
    return public


def create_key(folder: Path) -> str:
    """Write a new private key into the run folder and return its public key as hex."""
    return write_key(folder / KEY_FILE, new_key())


def is_encrypted(folder: Path) -> bool:
    """Return whether the key in the folder needs a passphrase."""
    try:
        return b"ENCRYPTED" in (folder / KEY_FILE).read_bytes()
    except OSError:
        return False


def load_key(folder: Path, public_key: str) -> Any:
    """Return the operator's private key, and check that it matches the run's public key.

    Raises:
        InputError: If the passphrase is missing or wrong.
        RunDamagedError: If the key cannot be read or does not match.
    """
    try:
        key = read_key(folder / KEY_FILE)
    except (OSError, ValueError, TypeError) as error:
        raise RunDamagedError(
            f"the operator's key {KEY_FILE} cannot be read ({error}): restore it from a backup"
        ) from error
    if public_hex(key) != public_key:
        raise RunDamagedError(f"{KEY_FILE} is not the key of this run: restore it from a backup")
    return key


def key_problem(folder: Path, public_key: str) -> str:
    """Return why nothing can be signed with the key in the folder, or "" if nothing shows that.

    An encrypted key is not opened.
    """
    try:
        if not is_encrypted(folder):
            load_key(folder, public_key)
    except (OSError, InputError, RunDamagedError) as error:
        return f"nothing can be carried out or signed: {error}"
    return ""


def finish_rotation(folder: Path, public_key: str) -> None:
    """Replace the operator's key by a new key if the rotation was recorded; otherwise delete the new key."""
    pending = sorted(folder.glob(PENDING + "*"))
    for path in pending:
        if path.name == PENDING + public_key:
            os.replace(path, folder / KEY_FILE)
        else:
            path.unlink()
    if pending:
        sync_folder(folder)


def rotation_statement(run: str, old: str, new: str) -> dict[str, str]:
    """Return the statement that both keys sign when a new key replaces an old one."""
    return {"statement": "this key takes the place of the old one", "run": run, "old": old, "new": new}


def sign(folder: Path, body: dict[str, Any], public_key: str) -> dict[str, Any]:
    """Return a certificate: `body` with an Ed25519 signature over its canonical JSON."""
    key = load_key(folder, public_key)
    return {"body": body, "public_key": public_key, "signature": key.sign(canonical_json(body)).hex()}


def signature_holds(certificate: dict[str, Any], public_key: str | None = None) -> bool:
    """Return whether a certificate's signature over its body is valid.

    Args:
        certificate: Body, public key and signature.
        public_key: The key that must have signed; None accepts the key that the certificate names.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        named, signature = certificate["public_key"], certificate["signature"]
        # Accept only one spelling of key and signature, and nothing outside the signed body.
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
    """Return `body` with the node's public key and its signature over the canonical JSON.

    Args:
        key_file: ECDSA private key made by ssh-keygen, without a passphrase.
        body: The statement to sign.

    Raises:
        InputError: If the key cannot be used.
    """
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
    """Return the fingerprint of the key that signed a statement, or None if the signature is invalid.

    The fingerprint is computed from the key that verified the signature, not from the string that named it.
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


def keys_of(reader: RunReader) -> list[tuple[int, str]]:
    """Return the operator's public keys in order, each with the number of the event that named it."""
    sql = "SELECT seq, payload FROM events WHERE kind IN ('run created', ?) ORDER BY seq"
    return [(seq, str(json.loads(text)["run"]["public_key"])) for seq, text in reader.query(sql, (ROTATED,))]


def rotations(reader: RunReader) -> list[dict[str, str]]:
    """Return every key rotation: the old key, the new key, and the signatures of both."""
    rows = reader.query("SELECT payload FROM events WHERE kind = ? ORDER BY seq", (ROTATED,))
    return [
        {"old": content["old_key"], "new": content["run"]["public_key"]}
        | {name: content[name] for name in ("signature_by_old", "signature_by_new")}
        for content in (json.loads(payload) for (payload,) in rows)
    ]


def rotation_holds(run: str, rotation: Mapping[str, Any]) -> bool:
    """Return whether a key rotation is signed by the old key and by the new one."""
    named = {whose: str(rotation.get(whose)) for whose in ("old", "new")}
    body = rotation_statement(run, **named)
    return all(
        signature_holds({"body": body, "public_key": key, "signature": rotation.get(f"signature_by_{whose}")})
        for whose, key in named.items()
    )


def check_keys(reader: RunReader) -> Iterator[str]:
    """Yield a problem for each key rotation that is not signed by both keys or does not follow the key before it."""
    named = keys_of(reader)
    for rotation in rotations(reader):
        new, place = rotation["new"], [key for _, key in named].index(rotation["new"])
        if place == 0 or named[place - 1][1] != rotation["old"]:
            yield f"keys: the key {new[:16]}... does not follow the one before it"
        if not rotation_holds(reader.value("run"), rotation):
            yield f"keys: the change to key {new[:16]}... is not signed by both keys"
    if not named or reader.value("public_key") != named[-1][1]:
        yield "keys: the run's public key is not the last one the ledger names"
