"""Changes of the operator's key, and signatures of events that were written without it."""

from __future__ import annotations

from pathlib import Path

from sifu.core.ledger import canonical_json
from sifu.errors import InputError
from sifu.store import keys
from sifu.store.checkpoints import VOUCHED, check_checkpoints, unsigned_tail
from sifu.store.clock import CLOCK_SET
from sifu.store.files import uninterrupted
from sifu.store.head_file import write_head
from sifu.store.keys import ROTATED, check_keys, keys_of
from sifu.store.known_keys import remember_key
from sifu.store.projection import NewEvent
from sifu.store.reader import RunReader
from sifu.store.record_check import check_ledger, check_tables, refuse_problems
from sifu.store.writer import RunWriter
from sifu.verify.verification import check_public_key


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


def accept_key(folder: Path, public_key: str) -> None:
    """Accept the run's key, `public_key`, as the operator's key, even if this account remembers another key."""
    check_public_key(public_key)
    with RunReader(folder) as reader:
        present = reader.value("public_key")
        if public_key.lower() != present:
            raise InputError(f"{folder} is signed with the key {present}, not with the one given: nothing was accepted")
        refuse_problems(reader, (check_ledger, check_checkpoints, check_tables, check_keys))
        remember_key(reader, accepted=True)


def vouch(writer: RunWriter, *, clock: bool) -> tuple[int, int] | None:
    """Sign events that were written without the key (see `Run.sign`); `writer` must be opened with `vouching`.

    A new event records permanently that they were signed late.
    """
    keys.load_key(writer.folder, writer.value("public_key"))  # fail if the key is missing
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
