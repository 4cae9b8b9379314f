"""Changes of the operator's key."""

from __future__ import annotations

from pathlib import Path

from sifu.core.ledger import canonical_json
from sifu.errors import InputError
from sifu.store import keys
from sifu.store.files import uninterrupted
from sifu.store.keys import ROTATED, keys_of
from sifu.store.projection import NewEvent
from sifu.store.writer import RunWriter


def rotate_key(writer: RunWriter, brought: Path | None = None) -> str:
    """Replace the operator's key by a new one (or the key in the PEM file `brought`); return the new public key."""
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
    content = {
        "run": {"public_key": new_hex},
        "old_key": old_hex,
        "signature_by_old": old.sign(statement).hex(),
        "signature_by_new": key.sign(statement).hex(),
    }
    with uninterrupted():
        writer.record(NewEvent(ROTATED, content))
        keys.finish_rotation(writer.folder, new_hex)
    return new_hex
