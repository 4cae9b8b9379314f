"""Signatures of events and keys (docs/store.md, sections 6 and 6a)."""

from __future__ import annotations

from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from sifu_verifier.canonical import Row, canonical
from sifu_verifier.run_folder import RunFolder

UNSIGNED = ("request received", "request verified", "request approved", "request refused", "request withdrawn",
            "clients changed", "letter refused", "backup made", "restored")  # fmt: skip


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
    """Check the time of an event and its signature; only some kinds of events may have none (section 6a)."""
    at, events = f"event {event['seq']}", run.tables["events"]
    before = events[event["seq"] - 2] if event["seq"] > 1 else event
    run.check(event["time"] >= before["time"], f"{at}: its time runs backwards")
    if event["signature"] is None:
        run.check(event["kind"] in UNSIGNED, f"{at}: {event['kind']} has no signature")
        return
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
