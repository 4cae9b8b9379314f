"""Safekeeping of a run: backups in one file, restoration from them, the operator's key and its signatures.

Other tools read the public certificate as an in-toto statement in a DSSE envelope:

envelope   DSSE v1, signed with the operator's Ed25519 key; https://github.com/secure-systems-lab/dsse
payload    an in-toto Statement v1 whose predicate is the body of the public certificate
subject    the certificate's file, by the SHA-256 that the event `request done` commits to as well; for an evidence
           bundle also its other files, so that one signature covers them all
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from securesystemslib.dsse import Envelope
from securesystemslib.signer import CryptoSigner  # type: ignore[attr-defined]

from sifu.core.ledger import canonical_json, read_json
from sifu.core.operator_words import forgotten_words
from sifu.core.request_terms import TERMS, RequestTerms
from sifu.errors import InputError, RunDamagedError
from sifu.requests.erasure import forgetting_models, statistics_to_erase
from sifu.run.regimes import behaviour_of
from sifu.run.run_view import RunView
from sifu.store import keys
from sifu.store.actors import actor_name
from sifu.store.backup import read_backup, write_backup
from sifu.store.checkpoints import VOUCHED, check_checkpoints, unsigned_tail
from sifu.store.clock import CLOCK_SET
from sifu.store.database import transaction
from sifu.store.erased_figures import no_certificate
from sifu.store.files import certificate_path, uninterrupted
from sifu.store.head_file import write_head
from sifu.store.kept_outside import check_place, key_problem, known_key_problem, remember_key
from sifu.store.keys import ROTATED, check_keys, keys_of, load_key
from sifu.store.projection import NewEvent, RequestRow
from sifu.store.reader import RunReader, names_now
from sifu.store.record_check import check_ledger, check_tables, refuse_problems
from sifu.store.salts import erase_salts
from sifu.store.statistics_files import only_clients
from sifu.store.writer import RunWriter
from sifu.verify.certificate_file import PAYLOAD_TYPE
from sifu.verify.outside_record import RESTORED, check_anchor, holds_anchor, parse_anchor
from sifu.verify.verification import check_public_key, verify_run

BACKED_UP = "backup made"
LARGEST_CERTIFICATE_BYTES = 64 << 20


def back_up(writer: RunWriter, file: Path) -> str:
    """Write the whole run into one file, and record this in the ledger; return the anchor of that state."""
    if file.exists():
        raise InputError(f"{file} exists: choose another name for the backup, or remove it")
    if not file.parent.is_dir():
        raise InputError(f"there is no folder {file.parent} to write {file.name} into")
    if not (writer.folder / keys.KEY_FILE).is_file():
        raise RunDamagedError(
            f"{writer.folder} has no {keys.KEY_FILE}, and a run restored without it could not be continued: put the "
            "key back first, for example from an older backup"
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
        run: The folder.
        backup_head: Last event of the backup.
        complete: True if the given anchor is that event.
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
        file: The backup.
        folder: The new run folder.
        anchor: Latest head that was published or kept. A backup without this event is not the latest state of the run.
        certificates: Certificates issued since the backup. Their requests are restored: the clients take part no
            longer, and kept models that they influenced, their updates and their statistics are erased at once.
        accept_older: True to accept an older backup. Every certificate made from it is at best conditional, since the
            run may have made releases after the backup.
        whole_clients: True to forget the whole client if a certificate is about records that the backup does not name.
            A certificate states the number of records, not which ones.

    Raises:
        InputError: If the backup is older and not accepted, a certificate does not belong to the run, or restoring its
            request would forget a whole client instead of records. In these cases, nothing is written.
    """
    file, folder = Path(file), Path(folder)
    if anchor is not None:
        parse_anchor(anchor)
    given = [_read_certificate(path) for path in certificates]
    with read_backup(file, folder) as staged:
        if accept_older:
            _accept_earlier_key(staged)
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
            known = {row.request for row in reader.requests()}
            unnamed = [
                body["body"] for body in given if body["body"]["records"] and body["body"]["request"] not in known
            ]
            if unnamed and not whole_clients:
                raise InputError(_why_whole_clients(file, folder, unnamed[0]))
        # Recorded before the folder gets its name, so that the folder never exists without the record of its
        # restoration.
        late, dropped, complete = _record_restoration(
            staged, file, head, anchor, held, [certificate["body"] for certificate in given]
        )
    with RunReader(folder) as reader:
        remember_key(reader)
    return Restoration(str(folder), head, complete, tuple(late), dropped)


def _why_whole_clients(file: Path, folder: Path, body: dict[str, Any]) -> str:
    """Return why a request for records would forget a whole client, and what to do instead."""
    client = ", ".join(body["clients"])
    return (
        f"certificate {body['request']} is about {forgotten_words(body['clients'], body['records'])}, and neither it "
        f"nor {file} says which: restoring it would forget all of {client}. Accept that with --whole-clients, or "
        f"restore without this certificate and at once forget the same records: sifu forget {folder} --client "
        f"{client} --records ..."
    )


def _accept_earlier_key(staged: Path) -> None:
    """Accept the key in a backup made before a key rotation if it is a known earlier key of the run."""
    with RunReader(staged) as reader:
        run, key = reader.value("run"), reader.value("public_key")
        if known_key_problem(run, key) is None and key_problem(reader):
            remember_key(reader, accepted=True)


def check_whole(staged: Path, file: Path) -> None:
    """Check that the run in a backup verifies, because its list of files is as easily forged as its files."""
    verification = verify_run(staged)
    if verification.problems:
        raise RunDamagedError(f"{file} is damaged or was changed, nothing was restored. {verification.problems[0]}")
    if not keys.is_encrypted(staged):  # an encrypted key is opened with its passphrase when it is needed
        try:
            keys.load_key(staged, verification.public_key)
        except RunDamagedError as error:
            raise RunDamagedError(
                f"{file} is damaged or was changed, nothing was restored: its operator's key is missing or different, "
                "so nothing could be certified"
            ) from error


def _record_restoration(
    staged: Path, file: Path, head: str, anchor: str | None, held: bool, bodies: list[dict[str, Any]]
) -> tuple[list[str], tuple[int, ...], bool]:
    """Restore the requests of `bodies`, erase the files that their clients influenced, and record the restoration."""
    with RunWriter.open(staged) as writer:
        with transaction(writer.connection, None):
            writer.connection.execute("PRAGMA journal_mode=WAL")
        complete = held and anchor is not None and parse_anchor(anchor) == parse_anchor(head)
        recorded = {row.request: row for row in writer.requests()}
        late = {body["request"]: body for body in bodies if not _executed(recorded.get(body["request"]))}
        now = names_now(writer)
        late = {
            request: body | {"clients": [now.get(name, name) for name in body["clients"]]}
            for request, body in late.items()
        }
        leaving: set[str] = set()
        for body in late.values():
            if body["request"] not in recorded and not set(body["clients"]) <= leaving:
                writer.record(NewEvent("request received", {"request": _request_again(body), "actor": actor_name()}))
                leaving |= set(body["clients"])
        view = RunView(writer)
        names = sorted({name for body in late.values() for name in body["clients"]})
        view.indices(names)  # raises if one is unknown or forgotten
        gone = view.leaving(names)
        dropped = forgetting_models(view, gone, set(writer.models())) if names else ()
        networks = behaviour_of(view).networks_among(dropped)
        statistics = statistics_to_erase(writer.statistics().values(), gone, networks)
        touched = [row for row in writer.updates().values() if set(row.clients) & set(gone)]
        staying = [(row, sorted(set(row.clients) - set(gone))) for row in touched]
        content = {
            "backup": file.name,
            "backup_head": head,
            "anchor": anchor,
            "complete": complete,
            "branch": view.path.nodes[-1].branch,
            "requests": sorted(late),
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
        return sorted(late), dropped, complete


def _executed(row: RequestRow | None) -> bool:
    return row is not None and row.status in ("running", "done")


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


def _request_again(body: dict[str, Any]) -> dict[str, Any]:
    """Return the request behind a certificate, to be executed again.

    A certificate does not say which records it is about, so the whole client is forgotten.
    """
    stated = {name: body[name] for name in TERMS if name in body and name not in ("records", "level")}
    if body["level"] == "none":  # certificates omit the demanded level; the request must have accepted `none`
        stated["level"] = "none"
    terms = RequestTerms.from_mapping(stated | {"sigma": body["sigma"] or "auto"})
    return terms.to_mapping() | {"request": body["request"], "deadline_days": 0}


STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:sifu:public-certificate:4"


def statement_of(reader: RunReader, request: str, others: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the in-toto statement of a request's public certificate, and of the `others` files handed out with it."""
    text = reader.certificates(request).get((request, "public"))
    if text is None:
        raise no_certificate(reader, request, "public")
    contents = {certificate_path(reader.folder, request, "public").name: text.encode(), **others}
    return {
        "_type": STATEMENT_TYPE,
        "subject": [
            {"name": name, "digest": {"sha256": hashlib.sha256(content).hexdigest()}}
            for name, content in contents.items()
        ],
        "predicateType": PREDICATE_TYPE,
        "predicate": read_json(text)["body"],
    }


def attest(reader: RunReader, request: str, others: Mapping[str, bytes] | None = None) -> dict[str, Any]:
    """Return the statement in an envelope signed with the operator's key, as a JSON object."""
    statement = canonical_json(statement_of(reader, request, others or {}))
    envelope = Envelope(statement, PAYLOAD_TYPE, {})
    envelope.sign(CryptoSigner(load_key(reader.folder, reader.value("public_key"))))
    content: dict[str, Any] = envelope.to_dict()
    return content


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


def accept_key(folder: Path, public_key: str) -> None:
    """Accept a run's key as the operator's even if another key is known here; the caller vouches for it.

    Args:
        folder: The run folder.
        public_key: Key to accept; it must be the key of the run.
    """
    check_public_key(public_key)
    with RunReader(folder) as reader:
        present = reader.value("public_key")
        if public_key.lower() != present:
            raise InputError(f"{folder} is signed with the key {present}, not with the one given: nothing was accepted")
        refuse_problems(reader, (check_ledger, check_checkpoints, check_tables, check_keys))
        remember_key(reader, accepted=True)


def vouch(writer: RunWriter, *, clock: bool = False) -> tuple[int, int] | None:
    """Sign events that were written without the key; the new event records permanently that they were signed late.

    Args:
        writer: Writer of the run, opened with `vouching`.
        clock: True to record that the clock is now correct, whatever the date of the last event.

    Returns:
        The first and the last unsigned event; None if all were signed.
    """
    keys.load_key(writer.folder, writer.value("public_key"))  # raises if the key is missing
    events = writer.events()
    tail = unsigned_tail(events)
    with uninterrupted():
        if clock and tail is None:
            writer.record(NewEvent(CLOCK_SET, {"before": events[-1].time}))
        elif tail is not None:
            writer.record(NewEvent(VOUCHED, {"unsigned": list(tail)}))
        else:
            write_head(writer.folder, events[-1])
    return tail
