"""The operator's Ed25519 key, statements signed with it or with a node's key, checkpoints, and the file `head`.

The signature of a checkpoint covers an event and all events before it. The operator's key is stored plain or encrypted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sifu.core.identity import key_fingerprint
from sifu.core.ledger import Event, canonical_json, read_json
from sifu.errors import InputError, RunDamagedError
from sifu.store.files import CERTIFICATES, read_plain, sync_folder, write_atomically
from sifu.store.reader import RunReader

KEY_FILE = "operator.key"
PENDING = "operator.key.new-"
"""Prefix of the file with a new key, which a rotation writes before its event; its public key completes the name."""
PASSPHRASE = "SIFU_PASSPHRASE"
PUBLIC_KEY = re.compile("[0-9a-f]{64}")
SIGNATURE = re.compile("[0-9a-f]{128}")
_typed: list[bytes] = []
"""The passphrase typed on the terminal, so that the user is asked once and not for every event."""


def passphrase(ask: bool) -> bytes | None:
    """Return the passphrase from the environment or the terminal, or None.

    Args:
        ask: True to ask on the terminal if the environment has none.
    """
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
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        KeySerializationEncryption,
        NoEncryption,
        PrivateFormat,
    )

    secret = passphrase(ask=like_the_old)
    if like_the_old and not secret:
        raise InputError(f"the old key is encrypted, so the new one must be encrypted too: set {PASSPHRASE}")
    how: KeySerializationEncryption = BestAvailableEncryption(secret) if secret else NoEncryption()
    write_atomically(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, how))
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
        RunDamagedError: If the key cannot be read or does not match.
    """
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
    """Put a new key in place if its event was recorded; delete it otherwise."""
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

    The fingerprint is computed from the key that verified the signature, not from the text that named it.
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


HEAD_FILE = "head"
"""File with `SEQ:HASH` of the last event. While an event is being committed, a second line names that event."""
_CONTENT = re.compile(r"([1-9][0-9]{0,17}:[0-9a-f]{64}\n){1,2}")
"""Pattern of one or two complete lines. The file is written atomically, so any other content was changed by hand."""


def write_head(folder: Path, event: Event) -> None:
    """Write the last event of the database to the file `head`."""
    write_atomically(folder / HEAD_FILE, f"{event.head}\n".encode())


def announce_head(folder: Path, before: str, event: Event) -> None:
    """Write the current last event to the file `head`, and after it the event that is about to be committed.

    If the process is killed now, either of the two may be the last event of the database.
    """
    write_atomically(folder / HEAD_FILE, f"{before}\n{event.head}\n".encode())


def check_head_file(reader: RunReader) -> Iterator[str]:
    """Yield a problem unless the file `head` names the last event of the database.

    This detects an older database, or an older file, that was put back.
    """
    last = reader.value("head")
    try:
        content = read_plain(reader.folder / HEAD_FILE).decode("ascii")
    except FileNotFoundError:
        yield (
            f"the file {HEAD_FILE} is missing, so it is unknown whether this is the latest state of the run. If it is, "
            "sifu sign writes the file again"
        )
        return
    except UnicodeDecodeError:
        content = ""
    except OSError as error:
        yield f"the file {HEAD_FILE} cannot be read: {error.strerror}"
        return
    lines = content.splitlines()
    if not _CONTENT.fullmatch(content):
        yield f"the file {HEAD_FILE} cannot be read: it holds no SEQ:HASH of an event"
    elif last not in lines:
        named, ends = int(lines[0].partition(":")[0]), int(last.partition(":")[0])
        how = (
            f"the database ends at event {ends}: an older state was put back"
            if named > ends
            else "the database has later events, or another event at this position"
        )
        yield f"the file {HEAD_FILE} names event {named}, but {how}"


def signs_of_an_older_database(reader: RunReader, *, head_may_be_missing: bool = False) -> Iterator[str]:
    """Yield a problem for each file of the run folder that names an event missing from the database.

    Args:
        reader: Reader of the run.
        head_may_be_missing: True to accept a run without the file `head`.
    """
    if not head_may_be_missing or (reader.folder / HEAD_FILE).exists():
        yield from check_head_file(reader)
    hashes = reader.hashes()
    for certificate in sorted((reader.folder / CERTIFICATES).glob("*.json")):
        try:
            seq, head = _named_by(read_plain(certificate))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue  # verification reports the unreadable file
        if hashes.get(seq) != head:
            yield f"certificate {certificate.name} was issued after event {seq}, which the database does not have"


_seen: dict[bytes, tuple[int, str]] = {}
"""Event that each certificate names, keyed by the certificate's SHA-256; every opening of a run needs these events."""
_MOST_SEEN = 100_000


def _named_by(certificate: bytes) -> tuple[int, str]:
    """Return number and hash of the last event before a certificate was issued."""
    digest = hashlib.sha256(certificate).digest()
    if digest not in _seen:
        ledger = json.loads(certificate)["body"]["ledger"]
        if len(_seen) >= _MOST_SEEN:
            _seen.clear()
        _seen[digest] = int(ledger["seq"]), str(ledger["head"])
    return _seen[digest]


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


FORMAT = "sifu-checkpoint-1"
VOUCHED = "checkpoint"
"""Kind of the event by which an operator vouches for events written without a signature."""
ROTATED = "key rotated"
KEY_LOST = "key lost"
"""Kind of the event that records a missing or wrong operator's key, before anything is written without it."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A signed head of the chain of events, as sent to witnesses."""

    run: str
    seq: int
    head: str
    time: str
    public_key: str
    signature: str

    @staticmethod
    def of(run: str, event: Event, public_key: str, signature: str | None = None) -> Checkpoint:
        """Return the checkpoint of an event.

        Args:
            run: Id of the run.
            event: Event that the checkpoint names.
            public_key: Key that signed it.
            signature: Signature as hex; None to use the event's own signature.
        """
        signature = (event.signature or b"").hex() if signature is None else signature
        return Checkpoint(run, event.seq, event.hash.hex(), event.time, public_key, signature)

    @staticmethod
    def in_certificate(body: dict[str, Any], public_key: str) -> Checkpoint:
        """Return the checkpoint that the body of a certificate names, under the certificate's key."""
        ledger = body["ledger"]
        return Checkpoint(body["run"], ledger["seq"], ledger["head"], ledger["time"], public_key, ledger["signature"])

    def to_mapping(self) -> dict[str, Any]:
        """Return the checkpoint as a JSON object."""
        return {"format": FORMAT} | asdict(self)

    @staticmethod
    def from_json(text: bytes | str) -> Checkpoint:
        """Parse a line of a witness's file, which anybody may have written.

        Raises:
            InputError: If the line is not a checkpoint.
        """
        try:
            content = read_json(text)
            stated = content.pop("format")
            types = {column.name: column.type for column in fields(Checkpoint)}
            if stated != FORMAT or {name: type(value).__name__ for name, value in content.items()} != types:
                raise ValueError("its fields are not those of a checkpoint")
            return Checkpoint(**content)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise InputError(f"not a checkpoint of sifu: {type(error).__name__} {error}"[:200]) from error

    @property
    def holds(self) -> bool:
        """True if the signature is valid for the key that the checkpoint names."""
        body = checkpoint_body(self.run, self.seq, self.head, self.time)
        return signature_holds({"body": body, "public_key": self.public_key, "signature": self.signature})


def checkpoint_body(run: str, seq: int, head: str, time: str) -> dict[str, Any]:
    """Return the content of a checkpoint that the operator signs."""
    return {"format": FORMAT, "run": run, "seq": seq, "head": head, "time": time}


class Signer:
    """Signer of events with the operator's key; it warns once if the key is not available."""

    def __init__(self, folder: Path, public_key: str) -> None:
        self.public_key = public_key
        self.key: Any = None
        self.reason, self.lost, self.noted = "", False, False
        try:
            self.key = load_key(folder, public_key)
        except (InputError, RunDamagedError) as error:
            self.reason = str(error)
            self.lost = isinstance(error, RunDamagedError)  # missing or wrong, not merely locked by a passphrase
        self._said = False

    def sign(self, run: str, event: Event) -> bytes | None:
        """Return the signature over an event, or None if the key is not available."""
        if self.key is None:
            if not self._said:
                log.warning(
                    "events written now have no signature: %s. Nothing is lost; sign them later with sifu sign",
                    self.reason,
                )
            self._said = True
            return None
        body = checkpoint_body(run, event.seq, event.hash.hex(), event.time)
        signature: bytes = self.key.sign(canonical_json(body))
        return signature


def signed_events(events: list[Event]) -> Iterator[tuple[Event, str]]:
    """Yield each event with the key that must have signed it.

    This is the last key named by an earlier event; for the first event, it is the key that the event itself names.
    """
    key = ""
    for event in events:
        named = event.content.get("run", {}).get("public_key", key) if event.kind in ("run created", ROTATED) else key
        key = key or str(named)
        yield event, key
        key = str(named)


def unsigned_tail(events: list[Event]) -> tuple[int, int] | None:
    """Return the numbers of the first and last event after the last signature, or None if the last event is signed."""
    covered = next((event.seq for event in reversed(events) if event.signature is not None), 0)
    return (covered + 1, events[-1].seq) if covered < len(events) else None


def check_checkpoints(reader: RunReader, only_last: bool = False) -> Iterator[str]:
    """Yield a problem for each invalid signature, and for unsigned events that no signed event vouches for.

    Args:
        reader: Reader of the run.
        only_last: True to verify the last signature only.
    """
    events = reader.events()
    run = str(events[0].content["run"]["run"])
    tail, first_unsigned = unsigned_tail(events), 0
    last = tail[0] - 1 if tail else len(events)
    for event, key in signed_events(events):
        if event.signature is None:
            first_unsigned = first_unsigned or event.seq
            continue
        gap = [first_unsigned, event.seq - 1] if first_unsigned else None
        if (gap or event.kind == VOUCHED) and (event.kind != VOUCHED or event.content.get("unsigned") != gap):
            yield (
                f"signatures: events {first_unsigned or event.seq} to {event.seq - 1} have no signature, and event "
                f"{event.seq} ({event.kind}) does not vouch for them"
            )
        first_unsigned = 0
        if only_last and event.seq != last:
            continue
        if not Checkpoint.of(run, event, key).holds:
            yield (
                f"signatures: the signature of event {event.seq} ({event.kind}) is not that of the operator's key over "
                f"it: events up to {event.seq} were changed, or the signature was"
            )


def check_covered(reader: RunReader) -> Iterator[str]:
    """Yield a problem if no signature covers the last events."""
    tail = unsigned_tail(reader.events())
    if tail is not None:
        yield f"signatures: {uncovered(tail)}"


def uncovered(tail: tuple[int, int]) -> str:
    """Return a sentence about the unsigned events at the end of the ledger."""
    first, last = tail
    which = f"event {first}" if first == last else f"events {first} to {last}"
    return (
        f"no signature covers {which}: written without the operator's key, or changed by someone without it. "
        "An operator who knows them to be right, for example from a witness, vouches for them with sifu sign"
    )


def latest_checkpoint(reader: RunReader) -> Checkpoint | None:
    """Return the checkpoint of the last signed event, or None."""
    rows = reader.query(
        "SELECT seq, time, hash, signature FROM events WHERE signature IS NOT NULL ORDER BY seq DESC LIMIT 1"
    )
    if not rows:
        return None
    seq, time, digest, signature = rows[0]
    # The event of a rotation is signed with the old key, which it names.
    old = reader.query("SELECT payload FROM events WHERE seq = ? AND kind = ?", (seq, ROTATED))
    key = str(read_json(old[0][0])["old_key"]) if old else reader.value("public_key")
    return Checkpoint(reader.value("run"), int(seq), bytes(digest).hex(), str(time), key, bytes(signature).hex())
