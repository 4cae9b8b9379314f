"""Changes of the operator's key, backups of a run, and restoration from them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sifu.checking.bundle import verify_certificate
from sifu.checking.verification import Verification, verify_run
from sifu.core.ledger import canonical_json
from sifu.errors import InputError, RunDamagedError
from sifu.requests.lost_requests import lost_requests, lost_words
from sifu.requests.messages import ingest
from sifu.store import keys
from sifu.store.backup import read_backup, write_backup
from sifu.store.database import transaction
from sifu.store.files import uninterrupted
from sifu.store.inbox import messages
from sifu.store.kept_heads import check_given_heads
from sifu.store.keys import ROTATED, keys_of
from sifu.store.projection import NewEvent
from sifu.store.reader import RESTORED, RunReader
from sifu.store.seen_heads import check_place, lost_since, remember_head
from sifu.store.writer import RunWriter

log = logging.getLogger(__name__)

BACKED_UP = "backup made"


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


def back_up(writer: RunWriter, file: Path) -> str:
    """Write the whole run into one file, and record this in the ledger; return the head of that state.

    The event is signed, and the run is verified first: what is written can be restored. Inbox messages are ingested
    first, because a backup has no inbox. A warning counts messages that cannot be ingested.
    """
    if file.exists():
        raise InputError(f"{file} exists: choose another name for the backup, or remove it")
    if not file.parent.is_dir():
        raise InputError(f"there is no folder {file.parent} to write {file.name} into")
    keys.load_key(writer.folder, writer.value("public_key"))
    ingest(writer)
    if problems := verify_run(writer.folder).problems:
        raise RunDamagedError(f"no backup was written, because it could not be restored. {problems[0]}")
    if left := messages(writer.folder):
        log.warning(
            "the backup lacks %d inbox messages that were submitted but not examined, or cannot be read; the first is "
            "%s: examine it (sifu requests) and back up again",
            len(left),
            left[0].request,
        )
    content = {
        "backup": file.name,
        "held_models": sorted(writer.models()),
        "held_statistics": sorted(writer.statistics()),
    }
    writer.record(NewEvent(BACKED_UP, content))
    write_backup(writer, file)
    return writer.value("head")


@dataclass(frozen=True)
class Restoration:
    """A run folder made from a backup.

    Attributes:
        run: Path of the new run folder.
        backup_head: Head (`SEQ:HASH`) of the backup's ledger.
        requests: Sentences on the requests to file again: their certificates were issued since the backup.
    """

    run: str
    backup_head: str
    requests: tuple[str, ...]

    def to_mapping(self) -> dict[str, Any]:
        """Return the restoration as plain values, ready for JSON."""
        return asdict(self)


def restore(
    file: str | Path,
    folder: str | Path,
    heads: Sequence[str | Path] = (),
    certificates: Sequence[str | Path] = (),
    accept_older: bool = False,
) -> Restoration:
    """Make a run `folder` from the backup `file`; its ledger records this permanently.

    Args:
        file: Path of the backup.
        folder: Path of the new run folder.
        heads: Files of signed heads kept elsewhere. A backup without one of them is not the latest state of the run.
        certificates: Certificates issued since the backup. The result names their requests, which must be filed again.
        accept_older: True to accept a backup although this user, a witness or `heads` know a later state.

    Returns:
        What was restored, and what was lost.

    Raises:
        InputError: If the backup is older and not accepted, or a certificate does not belong to the run. In these
            cases, nothing is written.
    """
    file, folder = Path(file), Path(folder)
    given = [verify_certificate(path) for path in certificates]
    with read_backup(file, folder) as staged:
        check_whole(staged, file)
        with RunReader(staged) as reader:
            check_place(folder, reader.value("run"))
            problem = lost_since(reader) or next(check_given_heads(reader, [Path(path) for path in heads]), None)
            if problem and not accept_older:
                raise InputError(
                    f"{file} is not the latest state of the run. {problem}. It lacks everything erased, released or "
                    "forgotten since then: find a newer backup, or accept this one with --accept-older and the "
                    "certificates issued since"
                )
            _check_certificates(reader, given)
        # Record this before the folder gets its name, so that the folder never exists without the record of its
        # restoration.
        head, lost = _record_restoration(staged, file, [found.content["body"] for found in given])
    with RunReader(folder) as reader:
        remember_head(reader)
    return Restoration(str(folder), head, tuple(map(lost_words, lost)))


def _check_certificates(reader: RunReader, given: Sequence[Verification]) -> None:
    run, named = reader.value("run"), {key for _, key in keys_of(reader)}
    for found in given:
        if not found.holds or found.content["body"]["run"] != run:
            raise InputError(f"{found.subject} does not belong to this run, or it does not verify")
        if found.public_key not in named:
            raise InputError(
                f"{found.subject} is signed with the key {found.public_key}, which the backup does not know. If the "
                f"key was rotated since: restore without it, and file {found.content['body']['request']} again"
            )


def check_whole(staged: Path, file: Path) -> None:
    """Check that the run in a backup verifies; a matching list of files proves nothing, because it can be forged."""
    verification = verify_run(staged)
    if verification.problems:
        raise RunDamagedError(f"{file} does not verify, nothing was restored. {verification.problems[0]}")
    if not keys.is_encrypted(staged):  # an encrypted key is opened with its passphrase when it is needed
        try:
            keys.load_key(staged, verification.public_key)
        except RunDamagedError as error:
            raise RunDamagedError(
                f"nothing was restored: {file} lacks the operator's key of its run, so nothing could be certified"
            ) from error


def _record_restoration(staged: Path, file: Path, bodies: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """Record the restoration and the requests of `bodies` that the run lacks; return the backup's head and these."""
    with RunWriter.open(staged) as writer:
        with transaction(writer.connection, None):
            writer.connection.execute("PRAGMA journal_mode=WAL")
        head, lost = writer.value("head"), lost_requests(writer, bodies)
        writer.record(NewEvent(RESTORED, {"backup": file.name, "backup_head": head, "requests": lost}))
        return head, lost
