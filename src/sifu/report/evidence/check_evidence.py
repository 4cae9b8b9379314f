"""Checks the evidence in this folder, without sifu and without the operator: python verify.py --public-key HEX

Exit code 0 if everything holds, 1 if something does not. It needs the package cryptography and nothing else.
"""

import argparse
import base64
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

FOLDER = Path(__file__).resolve().parent
problems: list[str] = []


def demand(holds: bool, sentence: str) -> None:
    """Say whether something holds, and remember what does not."""
    print(("holds   " if holds else "WRONG   ") + sentence)
    if not holds:
        problems.append(sentence)


def signed(key: str, signature: bytes, message: bytes) -> bool:
    """Whether this is the signature of the key over the message."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def canonical(value: dict[str, Any]) -> bytes:
    """Canonical JSON (RFC 8785) of plain texts and small whole numbers, which is all that is signed here."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def main() -> int:
    """Check every file of this folder."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--public-key", help="the key that the operator published, in hexadecimal digits")
    published = arguments.parse_args().public_key

    sums = [line.split("  ", 1) for line in (FOLDER / "SHA256SUMS").read_text().splitlines()]
    for digest, name in sums:
        content = (FOLDER / name).read_bytes() if "/" not in name else b""
        demand(hashlib.sha256(content).hexdigest() == digest, f"the digest of {name}")

    keys = json.loads((FOLDER / "keys.json").read_text())
    named = keys["keys"]
    changes = keys["changes"]
    chain = [changes[0]["old"] if changes else named[0], *(change["new"] for change in changes)]
    demand(named == chain, "the operator's keys follow one another")
    for change in changes:
        body = canonical(
            {
                "statement": "this key takes the place of the old one",
                "run": keys["run"],
                "old": change["old"],
                "new": change["new"],
            }
        )
        both = signed(change["old"], bytes.fromhex(change["signature_by_old"]), body) and signed(
            change["new"], bytes.fromhex(change["signature_by_new"]), body
        )
        demand(both, f"the change to the key {change['new'][:16]}... is signed by the old key and by the new one")
    if published is not None:
        demand(published.lower() in named, "the published key is the operator's key here")

    envelope = json.loads((FOLDER / "statement.dsse.json").read_text())
    payload, kind = base64.b64decode(envelope["payload"]), envelope["payloadType"].encode()
    encoded = b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)
    signature = base64.b64decode(envelope["signatures"][0]["sig"])
    demand(signed(named[-1], signature, encoded), "the statement is signed with the operator's latest key")
    statement = json.loads(payload)
    subject = statement["subject"][0]
    text = (FOLDER / Path(subject["name"]).name).read_bytes()
    demand(hashlib.sha256(text).hexdigest() == subject["digest"]["sha256"], "the statement is about this certificate")
    certificate = json.loads(text)
    body = certificate["body"]
    demand(statement["predicate"] == body, "the statement says what the certificate says")
    demand(certificate["public_key"] in named, "the certificate names a key of the operator")

    heads = set()
    for line in (FOLDER / "checkpoints.jsonl").read_text().splitlines():
        checkpoint = json.loads(line)
        fields = {name: checkpoint[name] for name in ("format", "run", "seq", "head", "time")}
        holds = signed(checkpoint["public_key"], bytes.fromhex(checkpoint["signature"]), canonical(fields))
        demand(holds and checkpoint["public_key"] in named, f"the signed head of event {checkpoint['seq']}")
        heads.add((checkpoint["run"], checkpoint["seq"], checkpoint["head"]))
    ledger = body["ledger"]
    demand((body["run"], ledger["seq"], ledger["head"]) in heads, "the certificate names one of these heads")

    print()
    if problems:
        print(f"{len(problems)} problem(s): do not rely on this evidence.")
        return 1
    print(f"Everything holds, signed with the key {named[-1]}.")
    if published is None:
        print("Compare that key with the one the operator published, or give it with --public-key.")
    print(f"Request {body['request']}, level {body['level']}: {body['guarantee']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
