"""The bundle of a request: a public certificate with the chain of signed events that it stands in, in one JSON file.

format       "sifu bundle 1"
certificate  the public certificate as recorded
keys         the operator's first public key, then one entry for each later key: old key, new key, both signatures
events       of each event its number, time, kind, commitment and signature; no payload, because payloads name others
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sifu.checking.certificate_file import each_once, verify_content
from sifu.checking.verification import Verification, check_public_key, verify_run
from sifu.core.ledger import GENESIS, chain, read_json
from sifu.errors import InputError, RunBusyError, VerificationError
from sifu.requests.certification import no_certificate
from sifu.store.checkpoints import Checkpoint
from sifu.store.files import check_output, read_named, write_atomically
from sifu.store.keys import ROTATED, keys_of, rotation_holds, rotations
from sifu.store.reader import RunReader

FORMAT = "sifu bundle 1"
LARGEST_BUNDLE = 256 << 20


def bundle_bytes(folder: Path, request: str) -> bytes:
    """Return the bundle of a finished request, after verifying its run.

    Raises:
        VerificationError: If the run does not verify.
        InputError: If the request has no public certificate, or the last event is not signed.
    """
    result = verify_run(folder)
    if result.problems:
        raise VerificationError(
            f"{folder} does not verify, so no bundle was written. Problems: {len(result.problems)}, the first: "
            f"{result.problems[0]}"
        )
    if result.in_use:
        raise RunBusyError(f"{folder} is in use, so its files were not verified: write the bundle once it is idle")
    with RunReader(folder) as reader, reader.snapshot():
        text = reader.certificates(request).get((request, "public"))
        if text is None:
            raise no_certificate(request, "public")
        events, changes, keys = reader.events(), rotations(reader), keys_of(reader)
    signed = max((event.seq for event in events if event.signature is not None), default=0)
    content = {
        "format": FORMAT,
        "certificate": read_json(text),
        "keys": [keys[0][1], *({"event": seq} | change for (seq, _), change in zip(keys[1:], changes, strict=True))],
        "events": [
            [event.seq, event.time, event.kind, event.commitment.hex(), event.signature and event.signature.hex()]
            for event in events[:signed]
        ],
    }
    return (json.dumps(content, indent=None, sort_keys=True) + "\n").encode()


def write_bundle(folder: Path, request: str, target: Path) -> Path:
    """Write the bundle of a finished request into a file and return its path."""
    if target.is_dir() or not target.parent.is_dir():
        raise InputError(
            f"{target} is not a file in an existing folder: give the file to write, for example case-1.json"
        )
    check_output(target)
    write_atomically(target, bundle_bytes(folder, request))
    return target


def verify(target: str | Path, public_key: str | None = None, heads: Sequence[str | Path] = ()) -> Verification:
    """Recompute the claims of a run, a certificate or a bundle, offline; nothing is changed.

    Args:
        target: Folder of the run, or file of the certificate or bundle.
        public_key: The operator's published key (hex); None accepts the key that the target names.
        heads: For a run: files of signed heads that others kept, or certificates; each head must be in the chain.

    Returns:
        What was found; it holds if there are no problems.

    Raises:
        InputError: If the target is neither, or if heads are given for a file.
    """
    if Path(target).is_dir():
        return verify_run(target, public_key, heads)
    if heads:
        raise InputError(f"heads are compared with a run, and {target} is not its folder: leave them out")
    return verify_certificate(target, public_key)


def verify_certificate(path: str | Path, public_key: str | None = None) -> Verification:
    """Verify a certificate or a bundle without its run.

    Args:
        path: The file.
        public_key: The operator's published key; None accepts the key that the file names.

    Raises:
        InputError: If the file is neither.
    """
    path = Path(path)
    check_public_key(public_key)
    text = read_named(path, LARGEST_BUNDLE, "a certificate")
    try:
        content = read_json(text, each_once)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not a sifu certificate: it cannot be read as JSON ({error})"[:200]) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return verify_content(path, text, public_key)
    problems: list[str] = []
    try:
        certificate = content["certificate"]
        named = [str(content["keys"][0])]
        problems.extend(_check_chain(content, certificate["body"], named))
        if public_key is not None and public_key.lower() not in named:
            problems.append("keys: the published key is not one of the operator's keys in this bundle")
        if certificate["public_key"] not in named:
            problems.append("keys: the certificate names another key than the events")
        alone = verify_content(path, json.dumps(certificate).encode(), None)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        problems.append(f"bundle: it cannot be read ({type(error).__name__}: {error})"[:200])
        return Verification(str(path), problems=problems)
    return replace(alone, problems=[*problems, *alone.problems])


def _check_chain(content: Mapping[str, Any], body: Mapping[str, Any], keys: list[str]) -> Iterator[str]:
    """Yield a problem for each event, key or head that does not follow from those before it; extend `keys`."""
    run, changes = str(body["run"]), list(content["keys"][1:])
    previous, signed, head, found = GENESIS, 0, body["ledger"], False
    for number, (seq, time, kind, commitment, signature) in enumerate(content["events"], start=1):
        if seq != number:
            yield f"events: event {number} is missing or out of order (found {seq})"
            return
        previous = chain(previous, seq, str(time), str(kind), bytes.fromhex(commitment))
        if signature is not None:
            signed = seq
            if not Checkpoint(run, seq, previous.hex(), str(time), keys[-1], signature).holds:
                yield f"events: the signature of event {seq} is not valid for the operator's key"
        found |= (seq, previous.hex()) == (head["seq"], head["head"])
        if kind == ROTATED:
            change = changes.pop(0)
            if (change["event"], change["old"]) != (seq, keys[-1]) or not rotation_holds(run, change):
                yield f"keys: the change to key {str(change['new'])[:16]}... at event {seq} is not signed by both keys"
                return
            keys.append(str(change["new"]))
    if changes:
        yield f"keys: event {changes[0]['event']} of the chain does not change the key"
    if not signed or signed != len(content["events"]):
        yield "events: the last event is not signed"
    if not found:
        yield "certificate: the head of the ledger that it names is not in the chain"
