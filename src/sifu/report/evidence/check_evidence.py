"""Program that checks the evidence in this folder, without sifu and without the operator.

Usage: python verify.py --public-key HEX. The exit code is 0 if everything holds, and 1 otherwise. It needs only the
package cryptography.
"""

import argparse
import base64
import hashlib
import json
import stat
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

STATEMENT, SUMS = "statement.dsse.json", "SHA256SUMS"
LARGEST_FILE = 64 << 20
Finding = tuple[bool, str]
"""A finding: whether a statement holds, and the statement."""


def signed(key: str, signature: bytes, message: bytes) -> bool:
    """Return whether this is the key's signature of the message."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def canonical(value: Any) -> str:
    """Return a value as canonical JSON (RFC 8785), the form in which everything is signed."""
    if isinstance(value, dict):
        keys = sorted(value, key=lambda key: key.encode("utf-16-be"))
        return "{" + ",".join(f"{canonical(key)}:{canonical(value[key])}" for key in keys) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number(value)
    return json.dumps(value, ensure_ascii=False)


def number(value: float) -> str:
    """Return a number as ECMAScript writes it (ECMA-262, Number::toString)."""
    if abs(value) < 2**53 and value == int(value):
        return str(int(value))
    sign, digits, exponent = Decimal(repr(float(value))).normalize().as_tuple()
    text, length = "".join(map(str, digits)), len(digits)
    point = length + int(exponent)
    if length <= point <= 21:
        text += "0" * (point - length)
    elif 0 < point <= 21:
        text = f"{text[:point]}.{text[point:]}"
    elif -6 < point <= 0:
        text = "0." + "0" * -point + text
    else:
        text = text[0] + (f".{text[1:]}" if length > 1 else "") + f"e{point - 1:+d}"
    return "-" * sign + text


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; refuse duplicate keys, which two readers could resolve differently."""
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key is there twice")
    return dict(pairs)


def read(content: bytes) -> Any:
    """Return a JSON value; an integer of 2^53 or more becomes a float64."""
    whole = lambda digits: int(digits) if abs(int(digits)) < 2**53 else float(digits)  # noqa: E731
    return json.loads(content, object_pairs_hook=each_once, parse_int=whole)


def check_files(folder: Path) -> Iterator[Finding]:
    """Check that there are only regular files: reading a pipe or a link to a device might never end."""
    for path, status in ((path, path.lstat()) for path in sorted(folder.iterdir())):
        readable = stat.S_ISREG(status.st_mode) and status.st_size <= LARGEST_FILE
        yield readable, f"{path.name} is a regular file of at most {LARGEST_FILE} bytes"


def check_sums(folder: Path) -> Iterator[Finding]:
    """Check that the list of digests names every other file, with its digest."""
    listed = [line.split("  ", 1) for line in (folder / SUMS).read_text().splitlines()]
    names = {path.name for path in folder.iterdir()} - {SUMS}
    yield sorted(name for _, name in listed) == sorted(names), f"{SUMS} names every other file once"
    for digest, name in listed:
        content = (folder / name).read_bytes() if name in names else b""
        yield hashlib.sha256(content).hexdigest() == digest, f"the digest of {name}"


def statement_of(folder: Path) -> Any:
    """Return the statement in the envelope; its first subject is the certificate."""
    return read(base64.b64decode(read((folder / STATEMENT).read_bytes())["payload"]))


def check_keys(keys: dict[str, Any], published: str | None) -> Iterator[Finding]:
    """Check that every key but the first replaced its predecessor, and that both signed the change."""
    named = keys["keys"]
    yield len(named) == len(keys["changes"]) + 1, "there is a signed change for every key but the first"
    for before, after, change in zip(named, named[1:], keys["changes"], strict=False):
        follows = (change["old"], change["new"]) == (before, after)
        yield follows, f"the change to the key {after[:16]}... is from the key before it"
        statement = {
            "statement": "this key takes the place of the old one",
            "run": keys["run"],
            "old": before,
            "new": after,
        }
        message = canonical(statement).encode()
        both = signed(before, bytes.fromhex(change["signature_by_old"]), message) and signed(
            after, bytes.fromhex(change["signature_by_new"]), message
        )
        yield both, f"the change to the key {after[:16]}... is signed by the old key and by the new one"
    if published is not None:
        yield published.lower() in named, "the published key is the operator's key here"


def check_statement(folder: Path, envelope: dict[str, Any], latest: str) -> Iterator[Finding]:
    """Check that the operator's latest key signed the digest of every file."""
    payload, kind = base64.b64decode(envelope["payload"]), envelope["payloadType"].encode()
    encoded = b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)
    signature = base64.b64decode(envelope["signatures"][0]["sig"])
    yield signed(latest, signature, encoded), "the statement is signed with the operator's latest key"
    stated = {subject["name"]: subject["digest"]["sha256"] for subject in read(payload)["subject"]}
    present = {path.name for path in folder.iterdir()} - {STATEMENT, SUMS}
    for name in sorted(stated.keys() | present):
        same = name in present and hashlib.sha256((folder / name).read_bytes()).hexdigest() == stated.get(name)
        yield same, f"{name} is the file that the statement is about"


def check_certificate(folder: Path, keys: dict[str, Any], statement: dict[str, Any]) -> Iterator[Finding]:
    """Check the certificate: its signature, its keys, and the signed head of the ledger that it names."""
    named, text = keys["keys"], (folder / Path(statement["subject"][0]["name"]).name).read_bytes()
    certificate = read(text)
    body = certificate["body"]
    yield set(certificate) == {"body", "public_key", "signature"}, "the certificate has nothing but what is signed"
    yield statement["predicate"] == body, "the statement says what the certificate says"
    yield certificate["public_key"] in named, "the certificate names a key of the operator"
    signature = bytes.fromhex(certificate["signature"])
    holds = signed(certificate["public_key"], signature, canonical(body).encode())
    yield holds, "the certificate is signed with the key it names"
    yield body["run"] == keys["run"], "the certificate is of the run that the keys belong to"
    heads = set()
    for line in (folder / "checkpoints.jsonl").read_bytes().splitlines():
        checkpoint = read(line)
        fields = {name: checkpoint[name] for name in ("format", "run", "seq", "head", "time")}
        message = canonical(fields).encode()
        holds = signed(checkpoint["public_key"], bytes.fromhex(checkpoint["signature"]), message)
        yield holds and checkpoint["public_key"] in named, f"the signed head of event {checkpoint['seq']}"
        heads.add((checkpoint["run"], checkpoint["seq"], checkpoint["head"]))
    ledger = body["ledger"]
    yield (body["run"], ledger["seq"], ledger["head"]) in heads, "the certificate names one of these heads"


def check_evidence(folder: Path, published: str | None) -> Iterator[Finding]:
    """Check every file of a folder; an unreadable file is a failed check."""
    try:
        yield from (strange := [finding for finding in check_files(folder) if not finding[0]])
        if strange:
            return
        yield from check_sums(folder)
        keys, envelope = (read((folder / name).read_bytes()) for name in ("keys.json", STATEMENT))
        yield from check_keys(keys, published)
        yield from check_statement(folder, envelope, keys["keys"][-1])
        yield from check_certificate(folder, keys, statement_of(folder))
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        yield False, f"everything here can be read ({type(error).__name__}: {error})"


def main() -> int:
    """Check the folder of this file."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--public-key", help="the key that the operator published, in hexadecimal digits")
    published = arguments.parse_args().public_key
    folder = Path(__file__).resolve().parent
    problems = 0
    for holds, sentence in check_evidence(folder, published):
        print(("holds   " if holds else "WRONG   ") + sentence)
        problems += not holds
    print()
    if problems:
        print(f"{problems} problem(s): do not rely on this evidence.")
        return 1
    key = read((folder / "keys.json").read_bytes())["keys"][-1]
    print(f"Everything holds, signed with the key {key}.")
    if published is None:
        print("Compare that key with the one the operator published, or give it with --public-key.")
    body = statement_of(folder)["predicate"]
    print(f"Request {body['request']}, level {body['level']}. What that is worth is on the page index.html.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
