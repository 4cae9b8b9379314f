"""Checks beyond the ledger: timestamps, anchors kept elsewhere, and restorations."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sifu.core.ledger import Event, canonical_json
from sifu.errors import InputError, MissingPackageError, install_extra
from sifu.requests.files_to_erase import statistics_to_erase
from sifu.store import clock, timestamps
from sifu.store.checkpoints import VOUCHED, Checkpoint, signed_events
from sifu.store.files import TEMPORARY_PREFIX, TIMESTAMPS, certificate_path, read_plain
from sifu.store.given_approvals import RESTORED
from sifu.store.keys import KEY_FILE, KEY_LOST
from sifu.store.reader import RunReader
from sifu.store.replayed_ledger import ReplayedLedger, ReplayedTables

UNCHECKED = "give the authority's certificate with --authority to check who signed it"


@dataclass(frozen=True)
class Authority:
    """Certificates of a timestamp authority from a PEM file. The self-signed certificates are the roots."""

    certificates: tuple[Any, ...]

    @staticmethod
    def read(path: str | Path) -> Authority:
        """Read the certificates from a file that the verifier trusts.

        Raises:
            InputError: If the file cannot be read or holds no certificates.
        """
        from cryptography.x509 import load_pem_x509_certificates

        timestamps.protocol()
        try:
            return Authority(tuple(load_pem_x509_certificates(read_plain(Path(path), links=True))))
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise InputError(f"{path} holds no certificates in PEM form: {error}") from error

    def signed(self, answer: bytes, content: bytes) -> str | None:
        """Return None if the authority signed a timestamp over `content`, otherwise a description of the problem."""
        client = timestamps.protocol()
        builder = client.VerifierBuilder()
        for certificate in self.certificates:
            root = certificate.issuer == certificate.subject
            builder = (builder.add_root_certificate if root else builder.add_intermediate_certificate)(certificate)
        try:
            builder.build().verify_message(timestamps.read_timestamp(answer), content)
        except (client.VerificationError, InputError, ValueError) as error:
            return str(error)[:200]
        return None


def check_timestamp(name: str, answer: bytes, content: bytes, authority: Authority | None) -> tuple[str, list[str]]:
    """Check a timestamp.

    Args:
        name: Name of the timestamp's file.
        answer: Response of the authority.
        content: Bytes that the timestamp must cover.
        authority: The authority that must have signed the timestamp, or None to accept any authority.

    Returns:
        The time at which `content` existed according to the authority (empty if unknown), and the problems found.
    """
    try:
        response = timestamps.read_timestamp(answer)
    except MissingPackageError:
        return "", []
    except InputError as error:
        return "", [f"timestamps: {name}: {error}"]
    time = response.tst_info.gen_time.strftime(clock.TIME_FORMAT)
    if response.tst_info.message_imprint.message != hashlib.sha256(content).digest():
        return time, [f"timestamps: {name} is not a timestamp of its file: one of the two was changed"]
    why = authority.signed(answer, content) if authority is not None else None
    return time, [f"timestamps: {name} is not signed by the authority given: {why}"] if why else []


def check_timestamp_of(path: Path, authority: Authority | None, notes: list[str]) -> list[str]:
    """Return the problems of a certificate's timestamp, the file of the same name with `.tsr` added.

    A given `authority` must have signed the timestamp; without one, the timestamp is optional. A note with its time is
    added to `notes`.
    """
    file = path.with_name(f"{path.name}.tsr")
    if not file.is_file() or file.stat().st_size > timestamps.LARGEST_ANSWER:
        return [f"timestamps: there is no {file.name} next to the certificate"] if authority is not None else []
    time, problems = check_timestamp(file.name, read_plain(file), path.read_bytes(), authority)
    if not problems:
        notes.append(_note(path.name, time, authority))
    return problems


def _note(name: str, time: str, authority: Authority | None) -> str:
    if not time:
        return f"{name} has a timestamp, which this installation cannot read: {install_extra('timestamps')}"
    signed = "" if authority is not None else f"; {UNCHECKED}"
    return f"{name} existed at {time} according to its timestamp{signed}"


def _check_dates(events: list[Event], seq: int, stamped: str) -> Iterator[str]:
    """Yield a problem if the ledger's clock contradicts the time at which the authority stamped a head.

    The head existed at that time, so its date must not be later. The following events did not exist yet, so their dates
    must not be earlier.
    """
    moment = clock.time_of(stamped)
    head, corrected = events[seq - 1], any(event.kind == clock.CLOCK_SET for event in events[seq:])
    if clock.time_of(head.time) - moment > clock.BEHIND and not corrected:
        yield f"clock: event {seq} is dated {head.time}, but by its timestamp it existed at {stamped}"
    for event in events[seq:]:
        if moment - clock.time_of(event.time) > clock.BEHIND:
            yield f"clock: event {event.seq} is dated {event.time}, after event {seq} was stamped at {stamped}"
            return


def check_timestamps(reader: RunReader, authority: Authority | None, notes: list[str]) -> Iterator[str]:
    """Yield a problem for each timestamp that is invalid or belongs to no head or certificate of the run.

    A given `authority` must have signed all timestamps. Notes on the latest valid timestamps, and on missing
    timestamps, are added to `notes`.
    """
    run = reader.value("run")
    contents = {
        f"{event.seq}.checkpoint.json": canonical_json(Checkpoint.of(run, event, key).to_mapping())
        for event, key in signed_events(reader.events())
        if event.signature is not None
    }
    for (request, form), content in reader.certificates().items():
        contents[certificate_path(reader.folder, request, form).name] = content.encode()
    latest: list[tuple[str, str]] = []
    for path in sorted((reader.folder / TIMESTAMPS).glob("*")):
        if path.name.startswith(TEMPORARY_PREFIX):
            continue
        name = path.name.removesuffix(".tsr")
        if not timestamps.NAME.fullmatch(path.name) or name not in contents:
            yield f"timestamps: {path.name[:80]} belongs to no head or certificate of this run"
            continue
        if path.stat().st_size > timestamps.LARGEST_ANSWER:
            yield f"timestamps: {path.name} is far larger than a timestamp"
            continue
        time, problems = check_timestamp(path.name, read_plain(path), contents[name], authority)
        yield from problems
        if not problems:
            latest.append((time, name))
        if time and name.endswith(".checkpoint.json"):
            yield from _check_dates(reader.events(), int(name.partition(".")[0]), time)
    notes.extend(_note(name, time, authority) for time, name in sorted(latest)[-3:])
    # A later head covers an earlier one; every certificate needs its own timestamp.
    still = [
        name
        for event in reader.events()
        if event.kind == timestamps.MISSING
        for name in event.content["missing"]
        if name.endswith(".public.json") and not timestamps.timestamp_path(reader.folder, name).exists()
    ]
    if still:
        notes.append(
            f"a timestamp was asked for and did not come: {', '.join(dict.fromkeys(still))[:200]}; sifu timestamp asks "
            "again"
        )


def parse_anchor(anchor: str) -> tuple[int, str]:
    """Return the event number and the hash of an anchor.

    Raises:
        InputError: If the string is not an anchor.
    """
    match = re.fullmatch(r"\s*([1-9][0-9]{0,17}):([0-9a-fA-F]{64})\s*", anchor)
    if not match:
        raise InputError(
            f"an anchor must be SEQ:HASH with 64 hexadecimal digits, as printed by sifu anchor; found {anchor[:90]!r}"
        )
    return int(match[1]), match[2].lower()


def holds_anchor(reader: RunReader, anchor: str) -> bool:
    """Return whether the chain of events contains the event that an anchor names."""
    seq, digest = parse_anchor(anchor)
    rows = reader.query("SELECT hash FROM events WHERE seq = ?", (seq,))
    return bool(rows) and bytes(rows[0][0]).hex() == digest


def check_anchor(reader: RunReader, anchor: str) -> Iterator[str]:
    """Yield a problem if the chain does not contain the event that an anchor names."""
    if not holds_anchor(reader, anchor):
        seq, _ = parse_anchor(anchor)
        last = reader.query("SELECT MAX(seq) FROM events")[0][0] or 0
        how = (
            f"it ends at event {last}, before the anchor's {seq}: an older state was put back"
            if seq > last
            else f"its event {seq} is another one: the chain was rewritten"
        )
        yield f"anchor: the chain does not hold the anchor given; {how}"


def event_notes(reader: RunReader) -> Iterator[str]:
    """Yield notes on notable past events: a wrong clock, a lost key, unsigned events, a restoration."""
    for event in reader.events():
        seq, time, content = event.seq, event.time, event.content
        if event.kind == clock.CLOCK_SET:
            yield (
                f"the operator set the clock from {content['before']} to {time} (event {seq}): what is dated before "
                "that event may have happened at another time"
            )
        elif event.kind == VOUCHED and content.get("unsigned"):
            gap = "events {} to {} were written without a signature".format(*content["unsigned"])
            yield f"{gap}; the operator vouched for them at {time} (event {seq})"
        elif event.kind == KEY_LOST:
            yield f"the operator's key was gone, or was another one, at {time} (event {seq})"
        elif event.kind == RESTORED:
            lost = "what was done between the backup and then is not in this record"
            gap = "the anchor given then was its last event" if content["complete"] else lost
            yield f"event {seq} restored the run from a backup on {time}; {gap}"
    if not (reader.folder / KEY_FILE).is_file():
        yield (
            f"the folder has no {KEY_FILE}: it can be verified, but nothing more can be signed until the key is put "
            "back, from a backup for example"
        )


def check_restored(reader: RunReader) -> Iterator[str]:
    """Yield a problem for each restoration whose event contradicts the earlier events of the chain."""
    branches = {node.node: node.branch for node in reader.nodes()}
    ledger = ReplayedLedger.of(reader)
    numbers = {client.name: number for number, client in enumerate(reader.clients())}
    for event, before in ledger.moments():
        if event.kind != RESTORED:
            continue
        content, seq = event.content, event.seq
        if event.nonce:  # if the nonce is missing, a purge erased the list of dropped files
            yield from _check_nothing_came_back(event, before, numbers)
        branch = branches.get(ledger.tips[seq])
        if content["branch"] != branch:
            yield f"restored: event {seq} names branch {content['branch']}, the run was at {branch}"
        head = parse_anchor(content["backup_head"])
        if head[0] >= int(seq) or not holds_anchor(reader, content["backup_head"]):
            yield f"restored: event {seq} names a head that the chain does not hold"
        if content["complete"] and (content["anchor"] is None or parse_anchor(content["anchor"]) != head):
            yield f"restored: event {seq} calls itself complete without the anchor for it"


def _check_nothing_came_back(event: Event, before: ReplayedTables, numbers: dict[str, int]) -> Iterator[str]:
    """Yield a problem unless a restoration erased the updates and statistics of the clients it forgets again."""
    # A second certificate of the same client restores no second request, because one is waiting already.
    requests = [row for row in before.read("requests") if row.request in event.content["requests"]]
    gone = {numbers[name] for row in requests for name in row.clients}
    updates = [row.file for row in before.read("updates") if gone & row.clients.keys()]
    statistics = statistics_to_erase(before.read("statistics"), gone)
    for what, wanted in (("updates", sorted(updates)), ("statistics", list(statistics))):
        if sorted(event.content.get(f"dropped_{what}", [])) != wanted:
            yield f"restored: event {event.seq} did not erase the {what} of the clients whose requests it brought back"
    if any({int(client) for client in row["clients"]} & gone for row in event.content.get("updates", [])):
        yield f"restored: event {event.seq} stores updates of clients whose requests it brought back"
