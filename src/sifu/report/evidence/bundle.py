"""The evidence of a request as a zip file: the public certificate, and all that is needed to check it without us.

It is meant to leave the operator's hands, so it holds nothing of other clients, no path of this machine, no name of
who worked on the request, and no private key. What it says was verified is verified when it is made: a run that does
not verify gives no evidence.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import io
import json
import zipfile
from importlib.resources import files
from pathlib import Path
from typing import Any

from sifu.api.attestation import attest
from sifu.core.ledger import canonical_json, read_json
from sifu.errors import InputError, VerificationError
from sifu.report.evidence.page import render_evidence
from sifu.requests.deadlines import deadline_of
from sifu.store.certificate_path import certificate_path
from sifu.store.checkpoints import Checkpoint, signed_events
from sifu.store.files import write_atomically
from sifu.store.operator_keys import keys_of
from sifu.store.reader import RunReader
from sifu.store.regular_files import read_plain
from sifu.store.table_rows import RequestRow
from sifu.store.timestamps import timestamp_path
from sifu.verify.certificate_file import verify_certificate
from sifu.verify.verification import verify_run
from sifu.version import __version__

ED25519_HEADER = bytes.fromhex("302a300506032b6570032100")
"""What stands before the 32 bytes of an Ed25519 public key in its DER form (RFC 8410)."""


def write_evidence(run: str | Path, request: str, file: str | Path) -> Path:
    """Write the evidence of a finished request into a zip file; needs the operator's key, and a run that verifies."""
    target = Path(file)
    if target.is_dir():
        raise InputError(f"{target} is a folder: name the file to write, for example {target / f'{request}.zip'}")
    if not target.parent.is_dir():
        raise InputError(f"there is no folder {target.parent} to write {target.name} into")
    write_atomically(target, evidence_bytes(run, request))
    return target


def evidence_bytes(run: str | Path, request: str) -> bytes:
    """The zip file's bytes."""
    folder = Path(run)
    with RunReader(folder) as reader, reader.snapshot():
        row = next((row for row in reader.requests() if row.request == request), None)
        if row is None or row.status != "done":
            standing = "is not in this run" if row is None else f"is {row.status}, not done"
            raise InputError(f"request {request[:80]!r} {standing}: only a request that was carried out has evidence")
        verified = _verified(folder, row)
        contents = _contents(reader, row, verified)
        envelope = attest(reader, request, contents)
    contents["statement.dsse.json"] = _json(envelope)
    digests = "".join(f"{hashlib.sha256(text).hexdigest()}  {name}\n" for name, text in sorted(contents.items()))
    contents["SHA256SUMS"] = digests.encode()
    moment = datetime.datetime.strptime(row.finished or "", "%Y-%m-%dT%H:%M:%SZ")
    stamp = (moment.year, moment.month, moment.day, moment.hour, moment.minute, moment.second)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in sorted(contents.items()):
            entry = zipfile.ZipInfo(f"evidence-{request}/{name}", stamp)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o600 << 16
            archive.writestr(entry, text)
    return buffer.getvalue()


def _verified(folder: Path, row: RequestRow) -> dict[str, Any]:
    """What holds at this moment; what does not is an error that names it."""
    whole = verify_run(folder)
    alone = verify_certificate(certificate_path(folder, row.request, "public"))
    problems = [*whole.problems, *alone.problems]
    if problems:
        raise VerificationError(
            f"{folder} does not verify, so there is no evidence to hand out. {len(problems)} problem(s), the first: "
            f"{problems[0]}"
        )
    return {
        "time": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "software": f"sifu {__version__}",
        "run": "every claim recomputed from the record, nothing wrong",
        "checked": whole.checked,
        "notes": len(whole.notes),
        "certificate": "its signature holds and its figures agree",
    }


def _contents(reader: RunReader, row: RequestRow, verified: dict[str, Any]) -> dict[str, bytes]:
    text = reader.certificates(row.request)[(row.request, "public")].encode()
    certificate = read_json(text)
    checkpoints = _checkpoints(reader, row, certificate)
    keys = _keys(reader)
    certificate_name = certificate_path(reader.folder, row.request, "public").name
    stamped = timestamp_path(reader.folder, certificate_name)
    return ({stamped.name: read_plain(stamped)} if stamped.exists() else {}) | {
        certificate_name: text,
        "checkpoints.jsonl": b"".join(canonical_json(entry.to_mapping()) + b"\n" for entry in checkpoints),
        "keys.json": _json(keys),
        "public-key.pem": _pem(reader.value("public_key")),
        "verified.json": _json(verified),
        "verify.py": files("sifu.report.evidence").joinpath("check_evidence.py").read_bytes(),
        "README.txt": _instructions(certificate_name).encode(),
        "index.html": render_evidence(
            certificate["body"],
            deadline=deadline_of(row).strftime("%Y-%m-%d"),
            finished=(row.finished or "")[:10],
            certificate_name=certificate_name,
            certificate_digest=hashlib.sha256(text).hexdigest(),
            public_key=reader.value("public_key"),
            checkpoint=checkpoints[-1],
            verified=verified,
        ).encode("utf-8", "xmlcharrefreplace"),
    }


def _checkpoints(reader: RunReader, row: RequestRow, certificate: dict[str, Any]) -> list[Checkpoint]:
    """The head that the certificate names, and the head at which the ledger commits to the certificate."""
    ledger, run = certificate["body"]["ledger"], reader.value("run")
    wanted = {ledger["seq"], reader.steps()[("request done", row.request)]}
    return [
        Checkpoint(run, event.seq, event.hash.hex(), event.time, key, event.signature.hex())
        for event, key in signed_events(reader.events())
        if event.seq in wanted and event.signature is not None
    ]


def _keys(reader: RunReader) -> dict[str, Any]:
    """The operator's public keys, and the statements, signed by both, with which one took another's place."""
    changes = [
        {
            "old": event.content["old_key"],
            "new": event.content["run"]["public_key"],
            "signature_by_old": event.content["signature_by_old"],
            "signature_by_new": event.content["signature_by_new"],
        }
        for event in reader.events()
        if event.kind == "key rotated"
    ]
    return {"run": reader.value("run"), "keys": [key for _, key in keys_of(reader)], "changes": changes}


def _pem(public_key: str) -> bytes:
    body = base64.b64encode(ED25519_HEADER + bytes.fromhex(public_key)).decode()
    return f"-----BEGIN PUBLIC KEY-----\n{body}\n-----END PUBLIC KEY-----\n".encode()


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def _instructions(certificate_name: str) -> str:
    text = files("sifu.report.evidence").joinpath("instructions.txt").read_text(encoding="utf-8")
    return text.replace("CERTIFICATE", certificate_name)
