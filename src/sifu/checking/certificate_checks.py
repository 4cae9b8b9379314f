"""Checks of a run's certificates: fields (docs/store.md, section 7), agreement with the ledger, and recomputation."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

from sifu.checking.stored_models import differing, said
from sifu.choices import Level, Retention
from sifu.core.certificate_words import Start
from sifu.core.premises import Status
from sifu.core.request_terms import is_request_id
from sifu.requests.certification import (
    MODELS,
    SOLVE_FIELDS,
    STATED_TERMS,
    RecordedRequest,
    payload_of_request,
    public_form,
)
from sifu.store import files
from sifu.store.checkpoints import Checkpoint
from sifu.store.files import CERTIFICATES, certificate_path, is_locked
from sifu.store.keys import SIGNATURE, signature_holds
from sifu.store.projection import RequestRow
from sifu.store.reader import RunReader
from sifu.store.record_check import TIME
from sifu.store.replayed_ledger import ReplayedLedger

Check = Callable[[Any], bool]
DIGEST = re.compile(r"[0-9a-f]{64}")


def _is(kind: type) -> Check:
    return lambda value: isinstance(value, kind)


def _whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _figure(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _figure_or_infinite(value: Any) -> bool:
    return value == "inf" or _figure(value)


def _of(words: Any) -> Check:
    return lambda value: isinstance(value, str) and value in get_args(words)


def _like(pattern: re.Pattern[str]) -> Check:
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


def _or_null(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list_of(check: Check, least: int = 0) -> Check:
    return lambda value: isinstance(value, list) and len(value) >= least and all(map(check, value))


def _object(**checks: Check) -> Check:
    """Return a check for an object with exactly these keys."""
    return lambda value: (
        isinstance(value, dict)
        and value.keys() == checks.keys()
        and all(check(value[name]) for name, check in checks.items())
    )


def _map_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _plain(value: Any) -> bool:
    """Return whether a value is a finite number, a string, a boolean, or null."""
    return value is None or isinstance(value, str | bool) or (type(value) in (int, float) and math.isfinite(value))


_text, _truth = _is(str), _is(bool)
NAMES, NODES = _list_of(_text, 1), _list_of(_whole)
SUBJECTS = _list_of(
    _object(clients=NAMES, psi=_figure_or_infinite, charge=_or_null(_figure_or_infinite), budget=_figure)
)
PREMISE = {"name": _text, "status": _of(Status), "case": _text, "values": _map_of(_plain)}
SOLVE: dict[str, Check] = {"sum": _like(DIGEST), "samples": _whole, "relative_penalty": _figure, "penalty": _figure}
MODEL = _object(node=_whole, digest=_like(DIGEST), nonce=_like(DIGEST), commitment=_like(DIGEST))
COMMITTED = _object(**dict.fromkeys(MODELS, _like(DIGEST)))
TYPES: dict[str, Check] = {
    "attacker_true_positive_rate_at_1_percent": _or_null(_figure),
    "before_after": _object(epsilon=_figure, delta=_figure),
    "carried_out": _like(TIME),
    "clients": NAMES,
    "commitments": lambda value: (
        isinstance(value, dict)
        and COMMITTED({name: value[name] for name in value if name != "records"})
        and _list_of(_like(DIGEST), 1)(value.get("records", ["0" * 64]))
    ),
    "delta": _figure,
    "delta_at_most": _figure,
    "delta_reached": _figure,
    "earlier_subjects": SUBJECTS,
    "epsilon": _figure,
    "erased_nodes": NODES,
    "final_node": _whole,
    "form": _text,
    "format": _text,
    "issued": _like(TIME),
    "keeps_statistics": lambda value: value is None or (isinstance(value, str) and value in ("clients", "sum")),
    "ledger": _object(seq=_whole, head=_like(DIGEST), time=_like(TIME), signature=_like(SIGNATURE)),
    "level": _of(Level),
    "method": _text,
    "models": _object(**dict.fromkeys(MODELS, MODEL)),
    "node": _whole,
    "noise_multiplier": _figure,
    "noise_node": _whole,
    "noise_source": _text,
    "participation": _text,
    "psi": _figure_or_infinite,
    "psi_star": _figure,
    "received": _like(TIME),
    "records": lambda value: value is None or (type(value) is int and value >= 1),
    "remaining_nodes": NODES,
    "request": is_request_id,
    "retention": _of(Retention),
    "rounds": _whole,
    "run": _text,
    "sigma": _figure,
    "solve": _or_null(_object(**{name: SOLVE[name] for name in SOLVE_FIELDS})),
    "start": _of(Start),
    "subjects": SUBJECTS,
    "terms": lambda value: isinstance(value, dict) and value.keys() == set(STATED_TERMS),
    "untouched": _truth,
    "versions": _map_of(_text),
}
"""Checks of all fields except `premises`, whose objects have one more key in the auditor's form."""


def wrong_types(body: dict[str, Any]) -> Iterator[str]:
    """Yield a problem for each field of a certificate whose value is invalid; `form` must be a known form."""
    confidential: dict[str, Check] = {"confidential": _map_of(_plain)} if body["form"] == "auditor" else {}
    checks = TYPES | {"premises": _list_of(_object(**PREMISE, **confidential), 1)}
    for name in sorted(body):
        if not checks[name](body[name]):
            yield f"{name} says {str(body[name])[:80]!r}, which is not valid"
    if isinstance(body["commitments"], dict) and len(body["commitments"].get("records", ())) > (body["records"] or 0):
        yield "commitments.records has more commitments than there are records"
    if body["records"] is not None and isinstance(body["clients"], list) and len(body["clients"]) != 1:
        yield f"records must belong to one client, but clients names {len(body['clients'])}"


def check_certificates(reader: RunReader) -> Iterator[str]:
    """Yield a problem where table, ledger and files disagree on a certificate, or its signature is invalid.

    Each certificate must be signed with the key that the operator had when it was issued.
    """
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
            continue  # the file is being written, or the process was killed before writing it
        if not path.is_file():
            yield f"certificates: the file {path.name} is missing"
        elif path.read_bytes() != stored[key].encode():
            yield from _differences(path, json.loads(stored[key]))


def _issued_last(reader: RunReader) -> set[tuple[str, str]]:
    """Return the certificates of the last event, whose files may be missing if the process was killed."""
    last = ReplayedLedger.of(reader).events[-1].content
    return {(last["request"], form) for form in last.get("certificates", {})}


def unwritten_notes(reader: RunReader) -> Iterator[str]:
    """Yield a note for each certificate of the last event that has no file yet."""
    for key in sorted(_issued_last(reader)):
        path = certificate_path(reader.folder, *key)
        if not path.is_file():
            yield (
                f"the file {path.name} is not there yet: the command that issued it was interrupted, or the file was "
                "deleted. The next command that writes to the run writes it"
            )


def check_no_other_certificates(reader: RunReader) -> Iterator[str]:
    """Yield a problem for each file in `certificates/` that is not recorded, unless a writer is active."""
    if is_locked(reader.folder):
        return
    names = {certificate_path(reader.folder, *key).name for key in reader.certificates()}
    for path in sorted((reader.folder / CERTIFICATES).glob("*")):
        if path.name not in names and not path.name.startswith(files.TEMPORARY_PREFIX):
            yield f"certificates: the file {path.name} is in no record of this run"


def _differences(path: Path, stored: dict[str, Any]) -> Iterator[str]:
    """Yield a problem for each field in which a certificate's file differs from the recorded certificate."""
    try:
        different = list(differing(json.loads(path.read_bytes()), stored))
    except (ValueError, RecursionError):
        yield f"certificates: the file {path.name} is not readable as JSON"
        return
    if not different:
        yield f"certificates: the file {path.name} was changed (its fields are the same, its bytes are not)"
    for name, stated, issued in different[:8]:
        yield f"certificates: {path.name}: {name} is {said(stated)}, the issued certificate says {said(issued)}"


def check_statements(reader: RunReader, request: RequestRow, recorded: RecordedRequest) -> Iterator[str]:
    """Yield a problem for each statement, in either form of a certificate, that differs from its recomputation."""
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
    for form in files.FORMS:
        text = stored.get((request.request, form))
        if text is None:
            continue  # `check_certificates` reports this problem
        certificate = json.loads(text)
        body, event = certificate["body"], ledger.events[done_at - 2]
        if not event.time <= body["issued"] <= max(known.time for known in ledger.events[:done_at]):
            yield f"certificate {request.request} ({form}): issued says {body['issued']}, not the time of its event"
        key, signed = ledger.certificates[request.request, form][1], str(body["ledger"].get("signature"))
        stated = Checkpoint.of(reader.value("run"), event, key, signed)
        signature = stated.signature if stated.holds else (event.signature or b"").hex()
        recomputed_form = recorded.auditor_form(done["certified_models"], event, signature, str(body["issued"]))
        expected = json.loads(json.dumps(recomputed_form if form == "auditor" else public_form(recomputed_form)))
        for name, says, recomputed in differing(body, expected):
            yield f"certificate {request.request} ({form}): {name} says {said(says)}, recomputed {said(recomputed)}"
        if form == "auditor" and request.level != (level := expected["level"]):
            yield f"request {request.request}: its level is recorded as {request.level!r}, recomputed {level!r}"
