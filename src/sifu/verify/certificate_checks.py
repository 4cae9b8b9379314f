"""Whether the certificates of a run are those of its ledger, signed, and say what is recomputed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sifu.core.certificate import auditor_form, public_form
from sifu.core.guarantee import WORDING
from sifu.requests.certification import RecordedRequest, payload_of_request
from sifu.store import files
from sifu.store.checkpoints import Checkpoint
from sifu.store.files import CERTIFICATES, certificate_path
from sifu.store.keys import signature_holds
from sifu.store.lock import is_locked
from sifu.store.projection import RequestRow
from sifu.store.reader import RunReader
from sifu.store.replayed_ledger import ReplayedLedger
from sifu.verify.value_comparison import differing, said


def check_certificates(reader: RunReader) -> Iterator[str]:
    """Table, ledger and files hold the same certificates, each signed with the key of its time."""
    stored = reader.certificates()
    recorded = ReplayedLedger.of(reader).certificates
    unwritten = _issued_last(reader)
    for key in sorted(set(stored) | set(recorded)):
        name = f"certificate {key[0]} ({key[1]})"
        if key not in stored or key not in recorded:
            yield f"certificates: {name} is {'missing' if key in recorded else 'not in the ledger'}"
            continue
        digest, public_key = recorded[key]
        if hashlib.sha256(stored[key].encode()).hexdigest() != digest:
            yield f"certificates: {name} is not the one the ledger commits to"
        if not signature_holds(json.loads(stored[key]), public_key):
            yield f"certificates: the signature of {name} does not hold"
        path = certificate_path(reader.folder, *key)
        if not path.is_file() and (is_locked(reader.folder) or key in unwritten):
            continue  # it is being written, or was to be
        if not path.is_file():
            yield f"certificates: the file {path.name} is missing"
        elif path.read_bytes() != stored[key].encode():
            yield from _differences(path, json.loads(stored[key]))


def _issued_last(reader: RunReader) -> set[tuple[str, str]]:
    """The certificates of the last event: if its process was killed they are in the database, but not yet in files."""
    last = ReplayedLedger.of(reader).events[-1].content
    return {(last["request"], form) for form in last.get("certificates", {})}


def unwritten_notes(reader: RunReader) -> Iterator[str]:
    """Files that the last event's process was killed before it wrote; their certificates were checked all the same."""
    for key in sorted(_issued_last(reader)):
        path = certificate_path(reader.folder, *key)
        if not path.is_file():
            yield (
                f"the file {path.name} is not there yet: the command that issued it was interrupted, or the file was "
                "deleted. The next command that writes to the run writes it"
            )


def check_no_other_certificates(reader: RunReader) -> Iterator[str]:
    """No file among the certificates is in no record; a writer at work may be about to record one."""
    if is_locked(reader.folder):
        return
    names = {certificate_path(reader.folder, *key).name for key in reader.certificates()}
    for path in sorted((reader.folder / CERTIFICATES).glob("*")):
        if path.name not in names and not path.name.startswith(files.TEMPORARY_PREFIX):
            yield f"certificates: the file {path.name} is in no record of this run"


def _differences(path: Path, stored: dict[str, Any]) -> Iterator[str]:
    """Name the fields in which a certificate's file differs from the recorded one."""
    try:
        different = list(differing(json.loads(path.read_bytes()), stored))
    except (ValueError, RecursionError):
        yield f"certificates: the file {path.name} is not readable as JSON"
        return
    if not different:
        yield f"certificates: the file {path.name} was changed (its fields are the same, its bytes are not)"
    for name, stated, issued in different[:8]:
        yield f"certificates: {path.name}: {name} is {said(stated)}, the issued certificate says {said(issued)}"


def check_statements(
    reader: RunReader, request: RequestRow, recorded: RecordedRequest, rolled: dict[str, Any]
) -> Iterator[str]:
    """Both forms of the certificate, field by field."""
    ledger, stored = ReplayedLedger.of(reader), reader.certificates(request.request)
    done = payload_of_request(reader, request.request, "request done")
    noised = request.noise_node
    certified = {which: model["node"] for which, model in done["certified_models"].items()}
    source = noised if request.source_node is None else request.source_node
    if certified != {"source": source, "noised": noised, "final": done["final_node"]}:
        yield f"certificate {request.request}: it names the models of nodes {certified}, which are not the request's"
    if ledger.tips[done_at := reader.steps()["request done", request.request]] != done["final_node"]:
        yield f"certificate {request.request}: node {done['final_node']} was not the current model when it was issued"
    for model in done["certified_models"].values():
        if ledger.model_digests.get(model["node"]) != model["digest"]:
            yield f"certificate {request.request}: model {model['node']} is not the one that was recorded"
    for form, build in (("auditor", auditor_form), ("public", public_form)):
        text = stored.get((request.request, form))
        if text is None:
            continue  # reported above
        certificate = json.loads(text)
        body, event = certificate["body"], ledger.events[done_at - 2]
        stated = Checkpoint(
            reader.value("run"),
            event.seq,
            event.hash.hex(),
            event.time,
            ledger.certificates[request.request, form][1],
            str(body["ledger"].get("signature")),
        )
        facts = recorded.facts(
            final_node=int(done["final_node"]),
            models=done["certified_models"],
            erased=tuple(rolled.get("dropped_models", [])),
            remaining=tuple(rolled["remaining_models"]),
            ledger=event,
            ledger_signature=stated.signature if stated.holds else (event.signature or b"").hex(),
            issued=str(body["issued"]),
        )
        expected = json.loads(json.dumps(build(facts)))
        if type(body.get("wording")) is int and 1 <= body["wording"] <= WORDING:
            expected["wording"] = body["wording"]  # that of its time: sentences are no part of a certificate
        for name, says, recomputed in differing(body, expected):
            yield f"certificate {request.request} ({form}): {name} says {said(says)}, recomputed {said(recomputed)}"
        if form == "auditor" and request.level != facts.level:
            yield f"request {request.request}: its level is recorded as {request.level!r}, recomputed {facts.level!r}"
