"""What an operator does with the key itself: put a new one in its place, vouch for what was written without it."""

from __future__ import annotations

from pathlib import Path

from sifu.core.ledger import canonical_json
from sifu.errors import InputError
from sifu.record.interrupts import uninterrupted
from sifu.store import keys
from sifu.store.checkpoints import ROTATED, VOUCHED, unsigned_tail
from sifu.store.head_file import write_head
from sifu.store.writer import RunWriter
from sifu.verify.operator_keys import keys_of


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
    keys.write_key(writer.folder / (keys.PENDING + new_hex), key)
    with uninterrupted():
        writer.record(
            ROTATED,
            {
                "run": {"public_key": new_hex},
                "old_key": old_hex,
                "signature_by_old": old.sign(statement).hex(),
                "signature_by_new": key.sign(statement).hex(),
            },
        )
        keys.finish_rotation(writer.folder, new_hex)
    return new_hex


def vouch(writer: RunWriter) -> tuple[int, int] | None:
    """Sign for events that were written without the key; returns the first and the last, None if all had a signature.

    The writer was opened `vouching`. The event says permanently that these were signed only now.
    """
    keys.load_key(writer.folder, writer.value("public_key"))  # says what is missing, if it is
    events = writer.events()
    tail = unsigned_tail(events)
    with uninterrupted():
        if tail is not None:
            writer.record(VOUCHED, {"unsigned": list(tail)})
        else:
            write_head(writer.folder, events[-1])
    return tail
