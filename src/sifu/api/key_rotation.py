"""What the operator's key signs for others, and how another key takes its place.

The public certificate for other people's tools: an in-toto statement in a DSSE envelope.

envelope   DSSE v1, signed with the operator's Ed25519 key; https://github.com/secure-systems-lab/dsse
payload    an in-toto Statement v1 whose predicate is the body of the public certificate
subject    the certificate's file, by the SHA-256 that the event `request done` commits to, too; of a bundle of
           evidence also its other files, so that one signature covers them all
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from securesystemslib.dsse import Envelope
from securesystemslib.signer import CryptoSigner  # type: ignore[attr-defined]

from sifu.core.ledger import canonical_json, read_json
from sifu.errors import InputError
from sifu.store import keys
from sifu.store.checkpoints import ROTATED, VOUCHED, check_checkpoints, check_keys, keys_of, unsigned_tail, write_head
from sifu.store.clock import CLOCK_SET
from sifu.store.files import certificate_path
from sifu.store.keys import load_key
from sifu.store.known_keys import remember_key
from sifu.store.lock import uninterrupted
from sifu.store.new_event import NewEvent
from sifu.store.reader import RunReader
from sifu.store.record_check import check_ledger, check_tables, refuse_problems
from sifu.store.writer import RunWriter
from sifu.verify.certificate_file import PAYLOAD_TYPE
from sifu.verify.verification import check_public_key

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


def rotate_key(writer: RunWriter, brought: Path | None = None) -> str:
    """Put a new key (or the one `brought` as a PEM file) in place of the operator's; returns its public half."""
    old_hex = writer.value("public_key")
    old = keys.load_key(writer.folder, old_hex)
    if brought is None:
        key = keys.new_key()
    else:
        try:
            key = keys.read_key(brought)
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"{brought} is not an Ed25519 private key in PEM form ({error})") from error
    new_hex = keys.public_hex(key)
    if new_hex in [key for _, key in keys_of(writer)]:
        raise InputError("the run has already used this key: make a new one")
    statement = canonical_json(keys.rotation_statement(writer.value("run"), old_hex, new_hex))
    keys.write_key(writer.folder / (keys.PENDING + new_hex), key, like_the_old=keys.is_encrypted(writer.folder))
    with uninterrupted():
        writer.record(
            NewEvent(
                ROTATED,
                {
                    "run": {"public_key": new_hex},
                    "old_key": old_hex,
                    "signature_by_old": old.sign(statement).hex(),
                    "signature_by_new": key.sign(statement).hex(),
                },
            )
        )
        keys.finish_rotation(writer.folder, new_hex)
    return new_hex


def accept_key(folder: Path, public_key: str) -> None:
    """Take a run's key for the operator's although another one is known here; the caller has compared it."""
    check_public_key(public_key)
    with RunReader(folder) as reader:
        present = reader.value("public_key")
        if public_key.lower() != present:
            raise InputError(f"{folder} is signed with the key {present}, not with the one given: nothing was accepted")
        refuse_problems(reader, (check_ledger, check_checkpoints, check_tables, check_keys))
        remember_key(reader, accepted=True)


def vouch(writer: RunWriter, *, clock: bool = False) -> tuple[int, int] | None:
    """Sign for events that were written without the key; returns the first and the last, None if all had a signature.

    The writer was opened `vouching`. The event says permanently that these were signed only now. With `clock` another
    event says before that the clock is right now, whatever the last event was dated.
    """
    keys.load_key(writer.folder, writer.value("public_key"))  # says what is missing, if it is
    events = writer.events()
    tail = unsigned_tail(events)
    with uninterrupted():
        if clock and tail is None:
            writer.record(NewEvent(CLOCK_SET, {"before": events[-1].time}))
        elif tail is not None:
            writer.record(NewEvent(VOUCHED, {"unsigned": list(tail)}))
        else:
            write_head(writer.folder, events[-1])
    return tail
