"""The operator's keys as the ledger names them, one after the other, each change signed by both."""

from __future__ import annotations

import json
from collections.abc import Iterator

from sifu.store import keys
from sifu.store.checkpoints import ROTATED
from sifu.store.reader import RunReader


def keys_of(reader: RunReader) -> list[tuple[int, str]]:
    """The operator's public keys with the event each was named by, in order."""
    named = []
    for seq, payload in reader.query(
        "SELECT seq, payload FROM events WHERE kind IN ('run created', ?) ORDER BY seq", (ROTATED,)
    ):
        named.append((int(seq), str(json.loads(payload)["run"]["public_key"])))
    return named


def check_keys(reader: RunReader) -> Iterator[str]:
    """Every change of keys must be signed by the old key and by the new one."""
    named = keys_of(reader)
    run = reader.value("run")
    for (payload,) in reader.query("SELECT payload FROM events WHERE kind = ? ORDER BY seq", (ROTATED,)):
        content = json.loads(payload)
        old, new = content["old_key"], content["run"]["public_key"]
        place = [key for _, key in named].index(new)
        body = keys.rotation_statement(run, old, new)
        signed = [(old, content["signature_by_old"]), (new, content["signature_by_new"])]
        if place == 0 or named[place - 1][1] != old:
            yield f"keys: the key {new[:16]}... does not follow the one before it"
        statements = [{"body": body, "public_key": key, "signature": signature} for key, signature in signed]
        if not all(keys.signature_holds(statement) for statement in statements):
            yield f"keys: the change to key {new[:16]}... is not signed by both keys"
    if not named or reader.value("public_key") != named[-1][1]:
        yield "keys: the run's public key is not the last one the ledger names"
