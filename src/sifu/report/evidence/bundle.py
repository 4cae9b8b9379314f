"""Evidence of a request as a zip file with a printable page, and the check of a received file."""

from __future__ import annotations

import datetime
import hashlib
import io
import json
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from sifu.api.attestation import attest
from sifu.core.certificate_words import exact_words, needs_budget, terms_asked_for, what_was_done, whom_words, words_of
from sifu.core.ledger import canonical_json, read_json
from sifu.core.operator_words import forgotten_words
from sifu.errors import InputError, VerificationError
from sifu.report.evidence.aisvs import aisvs_support
from sifu.report.evidence.check_evidence import LARGEST_FILE, STATEMENT, check_evidence, statement_of
from sifu.report.report_words import LEVEL_WORDS, templates
from sifu.requests.deadlines import deadline_of
from sifu.store.checkpoints import Checkpoint, signed_events
from sifu.store.clock import utc_now
from sifu.store.erased_figures import no_certificate
from sifu.store.files import certificate_path, read_plain, write_atomically
from sifu.store.keys import keys_of, rotations
from sifu.store.projection import RequestRow
from sifu.store.reader import RunReader
from sifu.store.timestamps import timestamp_path
from sifu.verify.certificate_file import verify_certificate
from sifu.verify.verification import Verification, check_public_key, verify_run
from sifu.version import __version__


def render_evidence(body: Mapping[str, Any], **about: Any) -> str:
    """Return the printable page: the request, its execution, its guarantee, and instructions to check it."""
    template = templates("sifu.report", "evidence").get_template("evidence.html")
    return template.render(
        body=body,
        budget=needs_budget(body),
        clients=forgotten_words(body["clients"], body["records"]),
        done=what_was_done(body),
        terms=terms_asked_for(body) if "terms" in body else "",
        level=LEVEL_WORDS[body["level"]],
        promise=_promise(body),
        words=words_of(body),
        version=__version__,
        **about,
    )


def _promise(body: Mapping[str, Any]) -> str:
    if body["level"] == "none":
        return "Nothing is guaranteed: it is unknown how much of the data is still in the model."
    if body["level"] != "exact":
        return ""
    return f"{exact_words(whom_words(len(body['clients']), None), body['method'], body['records'])}."


def write_evidence(run: str | Path, request: str, file: str | Path) -> Path:
    """Write the evidence of a finished request into a zip file.

    Args:
        run: The run folder, which must verify and contain its private key.
        request: Id of the request.
        file: The zip file to write.

    Returns:
        The path of the file.
    """
    target = Path(file)
    if target.is_dir():
        raise InputError(f"{target} is a folder: give the file to write, for example {target / f'{request}.zip'}")
    if not target.parent.is_dir():
        raise InputError(f"there is no folder {target.parent} to write {target.name} into")
    write_atomically(target, evidence_bytes(run, request))
    return target


def evidence_bytes(run: str | Path, request: str) -> bytes:
    """Return the evidence of a request as the bytes of a zip file."""
    folder = Path(run)
    with RunReader(folder) as reader, reader.snapshot():
        row = next((row for row in reader.requests() if row.request == request), None)
        if row is None or row.status != "done":
            standing = "is not in this run" if row is None else f"is {row.status}, not done"
            raise InputError(f"request {request[:80]!r} {standing}: only a finished request has evidence")
        if (request, "public") not in reader.certificates(request):
            raise no_certificate(reader, request, "public")
        verified = _verified(folder, row)
        contents = _contents(reader, row, verified)
        envelope = attest(reader, request, contents)
    contents["statement.dsse.json"] = _json(envelope)
    digests = "".join(f"{hashlib.sha256(text).hexdigest()}  {name}\n" for name, text in sorted(contents.items()))
    contents["SHA256SUMS"] = digests.encode()
    moment = datetime.datetime.strptime(row.finished or "", "%Y-%m-%dT%H:%M:%SZ")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in sorted(contents.items()):
            entry = zipfile.ZipInfo(f"evidence-{request}/{name}", moment.timetuple()[:6])
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o600 << 16
            archive.writestr(entry, text)
    return buffer.getvalue()


def _verified(folder: Path, row: RequestRow) -> dict[str, Any]:
    """Verify the run and the certificate and return the result; raise an error that names the first problem."""
    whole = verify_run(folder)
    alone = verify_certificate(certificate_path(folder, row.request, "public"))
    problems = [*whole.problems, *alone.problems]
    if problems:
        raise VerificationError(
            f"{folder} does not verify, so no evidence was written. {len(problems)} problem(s), the first: "
            f"{problems[0]}"
        )
    erased = whole.not_recomputed.get(row.request)
    return {
        "time": utc_now(),
        "software": f"sifu {__version__}",
        "run": f"verified and then erased on {erased}; its certificate was not recomputed, and the record holds"
        if erased
        else "every claim recomputed from the record, nothing wrong",
        "checked": whole.checked,
        "notes": len(whole.notes),
        "certificate": "its signature holds and its figures agree",
    }


def _contents(reader: RunReader, row: RequestRow, verified: dict[str, Any]) -> dict[str, bytes]:
    text = reader.certificates(row.request)[(row.request, "public")].encode()
    certificate = read_json(text)
    checkpoints = _checkpoints(reader, row, certificate)
    certificate_name = certificate_path(reader.folder, row.request, "public").name
    stamped, package = timestamp_path(reader.folder, certificate_name), files("sifu.report.evidence")
    public_key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(reader.value("public_key")))
    keys = {"run": reader.value("run"), "keys": [key for _, key in keys_of(reader)], "changes": rotations(reader)}
    deadline, finished = deadline_of(row).strftime("%Y-%m-%d"), (row.finished or "")[:10]
    return ({stamped.name: read_plain(stamped)} if stamped.exists() else {}) | {
        certificate_name: text,
        "aisvs.json": _json(aisvs_support(certificate["body"])),
        "checkpoints.jsonl": b"".join(canonical_json(entry.to_mapping()) + b"\n" for entry in checkpoints),
        "keys.json": _json(keys),
        "public-key.pem": public_key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
        "verified.json": _json(verified),
        "verify.py": (package / "check_evidence.py").read_bytes(),
        "README.txt": (package / "instructions.txt").read_bytes().replace(b"CERTIFICATE", certificate_name.encode()),
        "index.html": render_evidence(
            certificate["body"],
            deadline=deadline,
            finished=finished,
            in_time=finished <= deadline,
            certificate_name=certificate_name,
            certificate_digest=hashlib.sha256(text).hexdigest(),
            public_key=reader.value("public_key"),
            checkpoint=checkpoints[-1],
            verified=verified,
        ).encode("utf-8", "xmlcharrefreplace"),
    }


def _checkpoints(reader: RunReader, row: RequestRow, certificate: dict[str, Any]) -> list[Checkpoint]:
    """Return two ledger heads: the head named in the certificate, and the head that commits to the certificate."""
    ledger, run = certificate["body"]["ledger"], reader.value("run")
    wanted = {ledger["seq"], reader.steps()[("request done", row.request)]}
    return [
        Checkpoint.of(run, event, key)
        for event, key in signed_events(reader.events())
        if event.seq in wanted and event.signature is not None
    ]


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


MOST_FILES = 32


def is_evidence(target: Path) -> bool:
    """Return whether a path can be a bundle of evidence: a folder with its statement, or any zip file."""
    return (target / STATEMENT).is_file() or (target.is_file() and zipfile.is_zipfile(target))


def verify_evidence(target: str | Path, public_key: str | None = None) -> Verification:
    """Check a bundle of evidence: the operator's key signed all files, and the certificate is consistent.

    Args:
        target: The zip file, or the folder of its unpacked files.
        public_key: The operator's published key in hexadecimal digits. If None, the bundle's own key is used.
    """
    target = Path(target)
    check_public_key(public_key)
    if target.is_dir():
        return _verify_folder(target, target, public_key)
    with tempfile.TemporaryDirectory(prefix="sifu-evidence-") as place:
        _unpack(target, Path(place))
        return _verify_folder(target, Path(place), public_key)


def _unpack(file: Path, place: Path) -> None:
    """Extract the files of the archive by their base names, within limits, because its source is not trusted."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = [member for member in archive.infolist() if not member.is_dir()]
            names = [Path(member.filename).name for member in members]
            if len(set(names)) != len(names) or len(names) > MOST_FILES or STATEMENT not in names:
                raise InputError(
                    f"{file} is not a bundle of evidence: its files are not those that sifu evidence writes"
                )
            if sum(member.file_size for member in members) > LARGEST_FILE:
                raise InputError(f"{file} is far larger than a bundle of evidence")
            for member, name in zip(members, names, strict=True):
                if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise ValueError(f"{name} is compressed in another way than sifu evidence does")
                with archive.open(member) as stream:
                    (place / name).write_bytes(stream.read(member.file_size))
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError) as error:
        raise InputError(f"{file} is not a bundle of evidence: {error}") from error


def _verify_folder(target: Path, folder: Path, public_key: str | None) -> Verification:
    result = Verification(str(target), checked=["evidence"])
    findings = list(check_evidence(folder, public_key))
    result.problems.extend(f"evidence: this does not hold: {sentence}" for holds, sentence in findings if not holds)
    if not result.problems:
        result.public_key = str(json.loads((folder / "keys.json").read_bytes())["keys"][-1])
        alone = verify_certificate(folder / Path(statement_of(folder)["subject"][0]["name"]).name)
        result.problems.extend(alone.problems)
        result.notes.extend(alone.notes)
        result.content = alone.content
        result.checked.extend(alone.checked)
    return result
