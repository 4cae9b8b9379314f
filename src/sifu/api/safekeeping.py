"""Backups of a run, and restoration from them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sifu.core.operator_words import forgotten_words
from sifu.errors import InputError, RunDamagedError
from sifu.requests.file_again import file_again, unnamed_records
from sifu.requests.files_to_erase import forgetting_models, statistics_to_erase
from sifu.requests.messages import ingest
from sifu.run.run_view import RunView
from sifu.store import keys
from sifu.store.backup import read_backup, write_backup
from sifu.store.database import transaction
from sifu.store.given_approvals import RESTORED
from sifu.store.inbox import messages
from sifu.store.keys import keys_of
from sifu.store.known_keys import check_place, key_problem, known_key_problem, remember_key
from sifu.store.projection import NewEvent
from sifu.store.reader import RunReader
from sifu.store.salts import erase_salts
from sifu.store.statistics_files import only_clients
from sifu.store.writer import RunWriter
from sifu.verify.outside_record import check_anchor, holds_anchor, parse_anchor
from sifu.verify.verification import verify_run

log = logging.getLogger(__name__)

BACKED_UP = "backup made"
LARGEST_CERTIFICATE_BYTES = 64 << 20


def back_up(writer: RunWriter, file: Path) -> str:
    """Write the whole run into one file, and record this in the ledger; return the anchor of that state.

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
            "%s: examine it (sifu requests show) and back up again",
            len(left),
            left[0].request,
        )
    content = {
        "backup": file.name,
        "held_models": sorted(writer.models()),
        "held_updates": sorted(writer.updates()),
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
        complete: True if an anchor was given and equals `backup_head`.
        requests: Requests restored from certificates issued since the backup.
        erased: Nodes whose models were erased because clients of these requests influenced them. The clients' own
            updates and statistics were erased as well.
    """

    run: str
    backup_head: str
    complete: bool
    requests: tuple[str, ...]
    erased: tuple[int, ...]

    def to_mapping(self) -> dict[str, Any]:
        """Return the restoration as plain values, ready for JSON."""
        return asdict(self)


def restore(
    file: str | Path,
    folder: str | Path,
    anchor: str | None = None,
    certificates: Sequence[Path] = (),
    accept_older: bool = False,
    whole_clients: bool = False,
) -> Restoration:
    """Make a run `folder` from the backup `file`; its ledger records this permanently.

    Args:
        file: Path of the backup.
        folder: Path of the new run folder.
        anchor: Latest head that was published or kept. A backup without this event is not the latest state of the run.
        certificates: Certificates issued since the backup. Their requests are restored: the clients no longer
            take part. Kept models that they influenced, their updates and their statistics are erased at once.
        accept_older: True to accept an older backup. Every certificate made from it is at best conditional, since the
            run may have made releases after the backup.
        whole_clients: True to forget the whole client if a certificate is about records that the backup does not name.
            A certificate states how many records were forgotten, but does not name them.

    Raises:
        InputError: If the backup is older and not accepted, a certificate does not belong to the run, or restoring its
            request would forget a whole client instead of records. In these cases, nothing is written.
    """
    file, folder = Path(file), Path(folder)
    if anchor is not None:
        parse_anchor(anchor)
    given = [_read_certificate(path) for path in certificates]
    with read_backup(file, folder) as staged:
        _check_earlier_key(staged, file, accept_older)
        check_whole(staged, file)
        with RunReader(staged) as reader:
            key_values = {key for _, key in keys_of(reader)}
            head, run = reader.value("head"), reader.value("run")
            check_place(folder, run)
            held = anchor is not None and holds_anchor(reader, anchor)
            if anchor is not None and not held and not accept_older:
                problem = next(iter(check_anchor(reader, anchor)))
                raise InputError(
                    f"{file} is not the latest state of the run. {problem}. It lacks everything erased, released or "
                    "forgotten since then: find a newer backup, or accept this one with --accept-older and the "
                    "certificates issued since"
                )
            for body in given:
                if body["body"]["run"] != run or not any(keys.signature_holds(body, key) for key in key_values):
                    raise InputError(
                        f"certificate {body['body']['request']} does not belong to this run, or its signature does "
                        "not hold"
                    )
            unnamed = unnamed_records(reader, [certificate["body"] for certificate in given])
            if unnamed and not whole_clients:
                raise InputError(_why_whole_clients(file, folder, unnamed[0]))
        # Record this before the folder gets its name, so that the folder never exists without the record of its
        # restoration.
        requests, dropped, complete = _record_restoration(
            staged, file, head, anchor, held, [certificate["body"] for certificate in given]
        )
    with RunReader(folder) as reader:
        remember_key(reader)
    return Restoration(str(folder), head, complete, tuple(requests), dropped)


def _why_whole_clients(file: Path, folder: Path, body: Mapping[str, Any]) -> str:
    """Return why a request for records would forget a whole client, and what to do instead."""
    client = ", ".join(body["clients"])
    return (
        f"certificate {body['request']} is about {forgotten_words(body['clients'], body['records'])}, and neither it "
        f"nor {file} says which: restoring it would forget all of {client}. Accept that with --whole-clients, or "
        f"restore without this certificate and at once forget the same records, if their rows still exist: "
        f"sifu forget {folder} --client {client} --records ..."
    )


def _check_earlier_key(staged: Path, file: Path, accept_older: bool) -> None:
    """Refuse a backup made before a key rotation, or accept its key, if it is a known earlier key of the run."""
    with RunReader(staged) as reader:
        run, key = reader.value("run"), reader.value("public_key")
        if known_key_problem(run, key) is not None or not key_problem(reader):
            return
        if not accept_older:
            raise InputError(
                f"{file} was made before the key of its run was changed, so it is not the run's latest state: find a "
                "newer backup, or accept this one with --accept-older and the certificates issued since"
            )
        remember_key(reader, accepted=True)


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


def _record_restoration(
    staged: Path, file: Path, head: str, anchor: str | None, held: bool, bodies: list[dict[str, Any]]
) -> tuple[list[str], tuple[int, ...], bool]:
    """Restore the requests of `bodies`, erase the files that their clients influenced, and record the restoration."""
    with RunWriter.open(staged) as writer:
        with transaction(writer.connection, None):
            writer.connection.execute("PRAGMA journal_mode=WAL")
        complete = held and anchor is not None and parse_anchor(anchor) == parse_anchor(head)
        requests = file_again(writer, bodies)
        view = RunView(writer)
        names = sorted({name for row in view.requests if row.waits and row.request in requests for name in row.clients})
        gone = view.leaving(names)
        dropped = forgetting_models(view, gone, set(writer.models())) if names else ()
        statistics = statistics_to_erase(writer.statistics().values(), gone)
        touched = [row for row in writer.updates().values() if set(row.clients) & set(gone)]
        staying = [(row, sorted(set(row.clients) - set(gone))) for row in touched]
        content = {
            "backup": file.name,
            "backup_head": head,
            "anchor": anchor,
            "complete": complete,
            "branch": view.path.nodes[-1].branch,
            "requests": requests,
        }
        restored = NewEvent(
            RESTORED,
            content,
            dropped_models=dropped,
            updates=[only_clients(staged, row, stay) for row, stay in staying if stay],
            dropped_updates=sorted(row.file for row in touched),
            dropped_statistics=statistics,
            for_good=bool(dropped or touched or statistics),
        )
        writer.record(restored)
        erase_salts(writer)
        return requests, dropped, complete


def _read_certificate(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > LARGEST_CERTIFICATE_BYTES:
            raise ValueError("it is far too large")
        content: dict[str, Any] = json.loads(path.read_bytes())
        body = content["body"]
        if not all(isinstance(body[key], str) for key in ("run", "request", "method")):
            raise ValueError("it has no readable body")
        if not isinstance(body["clients"], list):
            raise ValueError("it names no clients")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path} is not a sifu certificate: {error}") from error
    return content
