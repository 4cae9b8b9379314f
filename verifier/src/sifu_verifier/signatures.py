"""Signatures of events, keys and timestamps (docs/store.md, sections 6, 6a and 7)."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from sifu_verifier.canonical import Row, canonical, sha256
from sifu_verifier.run_folder import RunFolder


def is_signed(public_key: str, signature: bytes | str, value: Any) -> bool:
    """Return whether a signature of a value's canonical JSON verifies; malformed keys and signatures do not.

    Args:
        public_key: Key in hexadecimal digits.
        signature: The signature, as bytes or in hexadecimal digits.
        value: The signed JSON value.
    """
    try:
        signed = bytes.fromhex(signature) if isinstance(signature, str) else signature
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
        key.verify(signed, canonical(value).encode())
    except Exception:
        return False
    return True


def check_signature(run: RunFolder, event: Row, payload: Row) -> None:
    """Check the time of an event, and that it is signed or covered by the next signed event (section 6a)."""
    at, events = f"event {event['seq']}", run.tables["events"]
    before = events[event["seq"] - 2] if event["seq"] > 1 else event
    if event["kind"] == "clock set":
        run.check(payload.get("before") == before["time"], f"{at}: it sets the clock from another time")
    else:
        run.check(event["time"] >= before["time"], f"{at}: its time runs backwards")
        rest = datetime.fromisoformat(event["time"]) - datetime.fromisoformat(before["time"])
        run.check(rest <= timedelta(days=366), f"{at}: its time jumps without the operator's word")
    first = event["seq"]
    while first > 1 and events[first - 2]["signature"] is None:
        first -= 1
    gap = [first, event["seq"] - 1] if first < event["seq"] else None
    if event["signature"] is None:
        run.check(any(later["signature"] for later in events[event["seq"] :]), f"{at}: no signature covers it")
        return
    vouched = payload.get("unsigned") if event["kind"] == "checkpoint" else None
    run.agree(f"{at}: events without a signature", vouched, gap)
    key = run.keys[-1][1] if run.keys else payload["run"]["public_key"]
    body = {"format": "sifu head 1", "run": run.entries["run"], "seq": event["seq"],
            "head": event["hash"].hex(), "time": event["time"]}  # fmt: skip
    signed = isinstance(event["signature"], bytes) and is_signed(key, event["signature"], body)
    run.check(signed, f"{at}: its signature does not verify")


def take_key(run: RunFolder, seq: int, payload: Row) -> None:
    """Check that a key change is signed by the old and the new key, and record the new one (section 6)."""
    new = payload["run"]["public_key"]
    if run.keys:
        old = run.keys[-1][1]
        said = {
            "statement": "this key takes the place of the old one",
            "run": run.entries["run"],
            "old": old,
            "new": new,
        }
        run.agree(f"event {seq}: old key", payload["old_key"], old)
        for key, name in ((old, "signature_by_old"), (new, "signature_by_new")):
            run.check(is_signed(key, payload.get(name, ""), said), f"event {seq}: {name} does not verify")
    run.keys.append((seq, new))


def check_timestamps(run: RunFolder) -> None:
    """Check that each timestamp belongs to a signed head or a public certificate, by its digest only (section 7)."""
    key, contents = "", {}
    for event in run.tables["events"]:
        named = json.loads(event["payload"]).get("run", {}).get("public_key", key)
        key = key or named
        if event["signature"] is not None:
            said = {"format": "sifu head 1", "run": run.entries["run"], "seq": event["seq"],
                    "head": event["hash"].hex(), "time": event["time"], "public_key": key,
                    "signature": event["signature"].hex()}  # fmt: skip
            contents[f"{event['seq']}.checkpoint.json.tsr"] = canonical(said)
        key = named
    contents |= {f"{row['request']}.public.json.tsr": row["content"] for row in run.tables["certificates"]
                 if row["form"] == "public"}  # fmt: skip
    for path in sorted((run.folder / "timestamps").glob("*")):
        stamped = bytes.fromhex(sha256(contents.get(path.name, "").encode()))
        run.check(stamped in path.read_bytes(), f"timestamps/{path.name} is of something else")
