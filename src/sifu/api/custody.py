"""Looking after a run: its anchor, its operator's keys, its backups."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sifu.api.erasure import forgetting_models
from sifu.core.errors import InputError, RunDamagedError
from sifu.core.ledger import canonical_json
from sifu.methods.training import uninterrupted
from sifu.methods.view import RunView
from sifu.store import keys
from sifu.store.backup import read_backup, write_backup
from sifu.store.database import transaction
from sifu.store.reader import RunReader
from sifu.store.small_tables import RequestRow
from sifu.store.writer import RunWriter

ROTATED, BACKED_UP, RESTORED = "key rotated", "backup made", "restored"
LARGEST_CERTIFICATE_BYTES = 64 << 20


def anchor_of(reader: RunReader) -> str:
    """`SEQ:HASH` of the last event: publish it, and nobody can rewrite what came before it unnoticed."""
    return reader.value("head")


def parse_anchor(anchor: str) -> tuple[int, str]:
    """An anchor as somebody kept it."""
    match = re.fullmatch(r"\s*([1-9][0-9]{0,17}):([0-9a-fA-F]{64})\s*", anchor)
    if not match:
        raise InputError(
            f"an anchor is SEQ:HASH with 64 hexadecimal digits, as sifu anchor prints it; found {anchor[:90]!r}"
        )
    return int(match[1]), match[2].lower()


def holds_anchor(reader: RunReader, anchor: str) -> bool:
    """Whether the chain has this event."""
    seq, found = parse_anchor(anchor)
    rows = reader.query("SELECT hash FROM events WHERE seq = ?", (seq,))
    return bool(rows) and bytes(rows[0][0]).hex() == found


def check_anchor(reader: RunReader, anchor: str) -> Iterator[str]:
    """An anchor that was published must still be in the chain."""
    if not holds_anchor(reader, anchor):
        seq, _ = parse_anchor(anchor)
        last = reader.query("SELECT MAX(seq) FROM events")[0][0] or 0
        how = (
            f"it ends at event {last}, before the anchor's {seq}: an older state was put back"
            if seq > last
            else f"its event {seq} is another one: the chain was rewritten"
        )
        yield f"anchor: the chain does not hold the anchor given; {how}"


def keys_of(reader: RunReader) -> list[tuple[int, str]]:
    """The operator's public keys with the event each was named by, in order."""
    found = []
    for seq, payload in reader.query(
        "SELECT seq, payload FROM events WHERE kind IN ('run created', ?) ORDER BY seq", (ROTATED,)
    ):
        found.append((int(seq), str(json.loads(payload)["run"]["public_key"])))
    return found


def check_keys(reader: RunReader) -> Iterator[str]:
    """Every change of keys must be signed by the old key and by the new one."""
    known = keys_of(reader)
    run = reader.value("run")
    for (payload,) in reader.query("SELECT payload FROM events WHERE kind = ? ORDER BY seq", (ROTATED,)):
        content = json.loads(payload)
        old, new = content["old_key"], content["run"]["public_key"]
        place = [key for _, key in known].index(new)
        body = keys.rotation_statement(run, old, new)
        signed = [(old, content["signature_by_old"]), (new, content["signature_by_new"])]
        if place == 0 or known[place - 1][1] != old:
            yield f"keys: the key {new[:16]}... does not follow the one before it"
        if not all(keys.signature_holds({"body": body, "public_key": k, "signature": s}) for k, s in signed):
            yield f"keys: the change to key {new[:16]}... is not signed by both keys"
    if not known or reader.value("public_key") != known[-1][1]:
        yield "keys: the run's public key is not the last one the ledger names"


def rotate_key(writer: RunWriter, brought: Path | None = None) -> str:
    """Put a new key (or the one `brought` as a PEM file) in place of the operator's; returns its public half."""
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
    if new_hex in [one for _, one in keys_of(writer)]:
        raise InputError("this key was used by the run already: make a new one")
    statement = canonical_json(keys.rotation_statement(writer.value("run"), old_hex, new_hex))
    keys.write_key(writer.folder / (keys.PENDING + new_hex), key)
    with uninterrupted():
        writer.record(
            ROTATED,
            {
                "run": {"public_key": new_hex},
                "old_key": old_hex,
                "signature_by_old": old.sign(statement).hex(),
                "signature_by_new": key.sign(statement).hex(),
            },
        )
        keys.finish_rotation(writer.folder, new_hex)
    return new_hex


def back_up(writer: RunWriter, file: Path) -> str:
    """Write everything the run is into one file; the ledger remembers that it was made. Returns its anchor."""
    if file.exists():
        raise InputError(f"{file} exists: choose another name for the backup, or remove it")
    if not file.parent.is_dir():
        raise InputError(f"there is no folder {file.parent} to write {file.name} into")
    with uninterrupted():
        writer.record(
            BACKED_UP,
            {"backup": file.name, "held_models": sorted(writer.models()), "held_updates": sorted(writer.updates())},
        )
    write_backup(writer, file)
    return anchor_of(writer)


def restore(
    file: Path, folder: Path, anchor: str | None = None, certificates: Sequence[Path] = (), accept_older: bool = False
) -> dict[str, Any]:
    """Make a run folder from a backup, in a way that its ledger tells ever after.

    `anchor` is the latest head that was published or kept. A backup that does not hold it is older than the run was:
    it is refused unless `accept_older`, and then every certificate made from it is conditional at best, since
    releases may have been made that it knows nothing of. `certificates` issued since the backup bring their requests
    back: the clients are asked for no more, and kept models that hold their part are erased at once.
    """
    if anchor is not None:
        parse_anchor(anchor)
    given = [_read_certificate(path) for path in certificates]
    with read_backup(file, folder) as staged:
        check_whole(staged, file)
        reader = RunReader(staged)
        try:
            known = {key for _, key in keys_of(reader)}
            head, run = anchor_of(reader), reader.value("run")
            held = anchor is not None and holds_anchor(reader, anchor)
            if anchor is not None and not held and not accept_older:
                problem = next(iter(check_anchor(reader, anchor)))
                raise InputError(
                    f"{file} is not the latest state of the run. {problem}. What was erased, released or forgotten "
                    "since is not in it: find a newer backup, or accept it with --accept-older and the certificates "
                    "issued since"
                )
            for body in given:
                if body["body"]["run"] != run or not any(keys.signature_holds(body, key) for key in known):
                    raise InputError(
                        f"certificate {body['body']['request']} is not one of this run, or its signature fails"
                    )
        finally:
            reader.close()
        # Recorded before the folder gets its name: there is no instant at which it looks as if nothing had happened.
        late, dropped, complete = _record_restoration(staged, file, head, anchor, held, [one["body"] for one in given])
    return {
        "run": str(folder),
        "backup_head": head,
        "complete": complete,
        "requests": late,
        "erased": list(dropped),
    }


def check_whole(staged: Path, file: Path) -> None:
    """Refuse a backup whose run does not verify: its list of files is as easily forged as its files."""
    from sifu.api.verification import verify_run  # which imports this file

    verification = verify_run(staged)
    if verification.problems:
        raise RunDamagedError(f"{file} is damaged or was changed, nothing was restored. {verification.problems[0]}")
    if not keys.is_encrypted(staged):  # an encrypted one is opened when it is needed, with its passphrase
        try:
            keys.load_key(staged, verification.public_key)
        except RunDamagedError as error:
            raise RunDamagedError(
                f"{file} is damaged or was changed, nothing was restored: the operator's key in it is missing or "
                "another one, and nothing could be certified with it"
            ) from error


def _record_restoration(
    staged: Path, file: Path, head: str, anchor: str | None, held: bool, bodies: list[dict[str, Any]]
) -> tuple[list[str], tuple[int, ...], bool]:
    """Bring back the requests of `bodies`, erase what holds their clients' part, and say that this is a restoration."""
    writer = RunWriter.open(staged)
    try:
        with transaction(writer.connection, None):
            writer.connection.execute("PRAGMA journal_mode=WAL")
        complete = held and anchor is not None and parse_anchor(anchor) == parse_anchor(head)
        known = {one.request: one for one in writer.requests()}
        late = {one["request"]: one for one in bodies if not _carried_out(known.get(one["request"]))}
        for one in late.values():
            if one["request"] not in known:
                writer.record("request received", {"request": _request_again(one)})
        view = RunView(writer)
        names = sorted({name for one in late.values() for name in one["clients"]})
        dropped = forgetting_models(view, view.indices(names), set(writer.models())) if names else ()
        content = {
            "backup": file.name,
            "backup_head": head,
            "anchor": anchor,
            "complete": complete,
            "branch": view.path.nodes[-1].branch,
            "requests": sorted(late),
        }
        writer.record(RESTORED, content, dropped_models=dropped, for_good=bool(dropped))
        return sorted(late), dropped, complete
    finally:
        writer.close()


def _carried_out(row: RequestRow | None) -> bool:
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
    """The request behind a certificate, to be carried out once more."""
    kept = ("request", "clients", "method", "epsilon", "delta", "unit", "scope", "calibration", "retention")
    return {key: body[key] for key in kept} | {
        "sigma": str(body["sigma"]) if body["sigma"] else "auto",
        "reserve": 0.0,
        "max_rounds": 0,
        "target": None,
        "deadline_days": 0,
    }


def restored_notes(reader: RunReader) -> Iterator[str]:
    """That a run was restored is never forgotten."""
    for seq, time, payload in reader.query("SELECT seq, time, payload FROM events WHERE kind = ?", (RESTORED,)):
        content = json.loads(payload)
        known = (
            "the anchor given then was its last event"
            if content["complete"]
            else "what was done between the backup and then is not in this record"
        )
        yield f"event {seq} restored the run from a backup on {time}; {known}"


def check_restored(reader: RunReader) -> Iterator[str]:
    """What a restoration says of the chain before it must be so."""
    branches = {row.node.node: row.node.branch for row in reader.node_rows()}
    tip = 0
    for event in reader.events():
        content, seq = event.content, event.seq
        tip = int(content.get("run", {}).get("tip", tip))
        if event.kind != RESTORED:
            continue
        if content["branch"] != branches.get(tip):
            yield f"restored: event {seq} names branch {content['branch']}, the run was at {branches.get(tip)}"
        head = parse_anchor(content["backup_head"])
        if head[0] >= int(seq) or not holds_anchor(reader, content["backup_head"]):
            yield f"restored: event {seq} names a head that the chain does not hold"
        if content["complete"] and (content["anchor"] is None or parse_anchor(content["anchor"]) != head):
            yield f"restored: event {seq} calls itself complete without the anchor for it"
