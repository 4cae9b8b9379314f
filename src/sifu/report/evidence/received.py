"""A bundle of evidence as it was received: its own check, and the certificate's figures recomputed from one another."""

from __future__ import annotations

import json
import tempfile
import zipfile
from pathlib import Path

from sifu.errors import InputError
from sifu.report.evidence.check_evidence import STATEMENT, check_evidence
from sifu.verify.certificate_file import verify_certificate
from sifu.verify.verification import Verification, check_public_key

MOST_FILES = 32
LARGEST_BYTES = 64 << 20


def is_evidence(target: Path) -> bool:
    """Whether this is a bundle, unpacked or as a zip file."""
    return (target / STATEMENT).is_file() or (target.is_file() and zipfile.is_zipfile(target))


def verify_evidence(target: str | Path, public_key: str | None = None) -> Verification:
    """Check a bundle of evidence: everything in it is signed with the operator's key, and the certificate is sound."""
    target = Path(target)
    check_public_key(public_key)
    if target.is_dir():
        return _verified(target, target, public_key)
    with tempfile.TemporaryDirectory(prefix="sifu-evidence-") as place:
        _unpack(target, Path(place))
        return _verified(target, Path(place), public_key)


def _unpack(file: Path, place: Path) -> None:
    """The files of the archive by their last names, with limits: anybody may have made it."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = [member for member in archive.infolist() if not member.is_dir()]
            names = [Path(member.filename).name for member in members]
            if len(set(names)) != len(names) or len(names) > MOST_FILES or STATEMENT not in names:
                raise InputError(
                    f"{file} is not a bundle of evidence: its files are not those that sifu evidence writes"
                )
            if sum(member.file_size for member in members) > LARGEST_BYTES:
                raise InputError(f"{file} is far larger than a bundle of evidence")
            for member, name in zip(members, names, strict=True):
                with archive.open(member) as stream:
                    (place / name).write_bytes(stream.read(member.file_size))
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError) as error:
        raise InputError(f"{file} is not a bundle of evidence: {error}") from error


def _verified(target: Path, folder: Path, public_key: str | None) -> Verification:
    result = Verification(str(target), checked=["evidence"])
    findings = list(check_evidence(folder, public_key))
    result.problems.extend(f"evidence: this does not hold: {sentence}" for holds, sentence in findings if not holds)
    if not result.problems:
        result.public_key = str(json.loads((folder / "keys.json").read_bytes())["keys"][-1])
        alone = verify_certificate(next(folder.glob("*.public.json")))
        result.problems.extend(alone.problems)
        result.notes.extend(alone.notes)
        result.content = alone.content
        result.checked.extend(alone.checked)
    return result
