"""Verification: recompute every claim of a run from its recorded scalars, offline, trusting no stored conclusion."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sifu.api.certification import RecordedRequest, nodes_to_erase, payload_of_request
from sifu.api.custody import check_anchor, check_keys, check_restored, keys_of, parse_anchor, restored_notes
from sifu.api.erasure import check_purges
from sifu.api.events_check import check_events
from sifu.api.integrity import check_database, check_ledger, check_rounds, check_tables, payload_of
from sifu.api.requests import check_lifecycles
from sifu.api.updates_check import check_updates, check_updates_erased
from sifu.core.certificate import auditor_form, public_form
from sifu.core.errors import InputError
from sifu.core.ledger import finite_or_text
from sifu.core.rollback import charge, choose_node
from sifu.methods.registry import method_named
from sifu.methods.view import RunView
from sifu.store import files
from sifu.store.keys import signature_holds
from sifu.store.lock import is_locked
from sifu.store.plain import strange_files
from sifu.store.projection import Tables, apply_change, changes, empty_tables
from sifu.store.reader import CERTIFICATES, ChargeRow, ModelRow, RequestRow, RunReader
from sifu.store.writer import LOCK_FILE, certificate_path

TOLERANCE = 1e-9
"""Another processor or library may differ in the last digits; recomputed figures may differ by this share."""


@dataclass
class Verification:
    """What was checked and what is wrong; empty `problems` means that everything recomputes."""

    subject: str
    public_key: str = ""
    checked: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    content: dict[str, Any] = field(default_factory=dict, repr=False)
    """Of a certificate: what was checked, as it was read."""

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.holds


def verify_run(folder: str | Path, public_key: str | None = None, anchor: str | None = None) -> Verification:
    """Check a run folder. `public_key` (hex) is the operator's, if it is known from elsewhere.

    `anchor` is a head of the chain that was published or kept: a chain rewritten as a whole does not hold it.

    Files change under a run that is being written to; those at work are then left out, and a note says so.
    """
    folder = Path(folder)
    check_public_key(public_key)
    if anchor is not None:
        parse_anchor(anchor)
    result = Verification(str(folder))
    if folder.is_dir():
        result.problems.extend(f"folder: {one}" for one in strange_files(folder))
    if result.problems:  # reading on might never end, or end in another folder
        result.checked.append("folder")
        return result
    reader = RunReader(folder)
    try:
        with reader.snapshot():
            if is_locked(folder / LOCK_FILE):
                result.notes.append("the run is in use: files its writer is at work on were not checked")
            result.public_key = reader.value("public_key", "")
            for name, check in (
                ("database", check_database),
                ("ledger", check_ledger),
                ("events", check_events),
                ("tables", check_tables),
                ("rounds", check_rounds),
                ("history", _check_history),
                ("models", _check_models),
                ("models", _check_moved),
                ("updates", check_updates),
                ("keys", check_keys),
                ("certificates", _check_certificates),
                ("folder", _check_outside_files),
                ("requests", _check_requests),
                ("lifecycles", check_lifecycles),
                ("purges", check_purges),
                ("restored", check_restored),
            ):
                try:
                    result.problems.extend(check(reader))
                except Exception as error:  # what was tampered with may fail anywhere; that is a finding too
                    result.problems.append(f"{name}: cannot be recomputed: {type(error).__name__}: {error}")
                if name not in result.checked:
                    result.checked.append(name)
                if result.problems and name in ("database", "ledger"):
                    break  # what follows would only repeat it
            try:
                _check_against_outside(reader, result, public_key, anchor)
            except Exception as error:
                result.problems.append(f"ledger: cannot be read: {type(error).__name__}: {error}")
    finally:
        reader.close()
    return result


def _check_against_outside(reader: RunReader, result: Verification, public_key: str | None, anchor: str | None) -> None:
    """What is known from elsewhere: the operator's key, a head of the chain."""
    known = [key for _, key in keys_of(reader)]
    if public_key is not None and public_key.lower() not in known:
        result.problems.append("key: the run was signed with another key than the one given")
    if anchor is not None:
        result.problems.extend(check_anchor(reader, anchor))
        result.checked.append("anchor")
    result.notes.extend(restored_notes(reader))


def check_public_key(public_key: str | None) -> None:
    """Refuse what cannot be an Ed25519 public key."""
    if public_key is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", public_key):
        raise InputError(f"a public key is 64 hexadecimal digits, found {len(public_key)} characters")


def agree(recorded: Any, recomputed: Any) -> bool:
    """Equal, or figures that agree to within the tolerance; a text is no figure, true is not 1."""
    if isinstance(recorded, bool) or isinstance(recomputed, bool):
        return recorded is recomputed
    if isinstance(recorded, int | float) and isinstance(recomputed, int | float):
        if recorded == recomputed or not (math.isfinite(recorded) and math.isfinite(recomputed)):
            return recorded == recomputed  # an infinite one is within no tolerance of any other
        return abs(recorded - recomputed) <= TOLERANCE * max(abs(recorded), abs(recomputed))
    return bool(type(recorded) is type(recomputed) and recorded == recomputed)


def _figure(text: str | None) -> float | None:
    """A Psi as the table `charges` writes it: a number, or the word for an infinite one in quotation marks."""
    return None if text is None else float(text.strip("'"))


ABSENT = object()
"""What a field that is not there holds; a field that holds nothing is something else."""


def differing(found: Any, expected: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The fields in which two JSON values differ: name, what was found, what was expected."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted(found.keys() | expected.keys()):
            inner = f"{name}.{key}" if name else str(key)
            yield from differing(found.get(key, ABSENT), expected.get(key, ABSENT), inner)
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            yield from differing(one, other, f"{name}[{index}]")
    elif isinstance(found, dict | list) or isinstance(expected, dict | list) or not agree(found, expected):
        yield name, found, expected


def _said(value: Any) -> str:
    """What a field says, short enough for a line."""
    return "nothing" if value is ABSENT else repr(value)[:200]


def _check_history(reader: RunReader) -> Iterator[str]:
    """One path, positions in order, and no forgotten client ever in a later round."""
    rows = {row.node.node: row.node for row in reader.node_rows()}
    for one in rows.values():
        parent = rows.get(one.parent) if one.parent is not None else None
        if one.kind == "round" and (
            parent is None
            or one.parent is None
            or one.parent >= one.node
            or (one.branch, one.position) != (parent.branch, parent.position + 1)
        ):
            yield f"history: round node {one.node} does not follow its parent {one.parent}"
        if one.kind == "noise" and (parent is None or one.position != 0 or one.branch != one.order):
            yield f"history: noise node {one.node} is misplaced"
        if one.kind == "heuristic" and (
            parent is None or parent.kind != "initial" or one.branch != one.order or one.noise_std != 0.0
        ):
            yield f"history: heuristic node {one.node} is misplaced"
    view = RunView(reader)
    for request in reader.requests():
        if request.noise_node is None:
            continue
        for name in request.clients:
            client = view.index_of.get(name)
            later = reader.query(
                "SELECT MIN(node) FROM participation WHERE client = ? AND node > ?", (client, request.noise_node)
            )[0][0]
            if later is not None:
                yield f"history: client {name} was forgotten at node {request.noise_node} but took part in node {later}"


def _check_models(reader: RunReader) -> Iterator[str]:
    rows, busy = reader.models(), is_locked(reader.folder / LOCK_FILE)
    for node, row in rows.items():
        problem = _model_problem(reader.folder, row)
        if problem and not (busy and _model_problem(reader.folder, _model_now(reader.folder, node)) is None):
            yield problem
    if reader.tip not in rows:
        yield f"models: the current model (node {reader.tip}) is not there"
    if busy:
        return
    recorded = {row.node.node for row in reader.node_rows()}
    for path in sorted((reader.folder / "models").rglob("*")):
        number = int(path.stem) if path.stem.isdecimal() and path.name == f"{int(path.stem)}.safetensors" else None
        if number is not None and path.parent.name == "models" and (number in rows or number not in recorded):
            continue  # a file that belongs here, or one of a write that was cut short and never recorded
        if path.is_dir() or path.name.startswith(files.TEMPORARY_PREFIX):
            continue
        yield f"models: {path.relative_to(reader.folder)} {files.STRAY}"


def _check_moved(reader: RunReader) -> Iterator[str]:
    """Where a model and the one it was made from are both at hand: it moved as far as its record says.

    Noise N(0, sigma^2 I) in d dimensions has a norm of sigma (sqrt(d) + t) with |t| > 8 less than once in 10^13 draws;
    a round moves the model by g ||mean - theta||, of which `mean_shift` is an upper bound.
    """
    if is_locked(reader.folder / LOCK_FILE):
        return  # its writer may erase a model that is about to be read
    at_hand, view = reader.models(), RunView(reader)
    # A method that promises nothing may go on from whatever it makes of the model.
    free = {one.noise_node for one in view.requests if method_named(one.method).protection == "nothing"}
    for row in reader.node_rows():
        one = row.node
        if one.kind not in ("round", "noise") or one.node in free or one.parent is None:
            continue
        if not {one.node, one.parent} <= at_hand.keys():
            continue
        model, start = (reader.load_model(node).astype(np.float64) for node in (one.node, one.parent))
        moved = float(np.linalg.norm(model - start))
        slack = 64.0 * float(np.finfo(reader.layout.dtype).eps) * float(np.linalg.norm(model) + np.linalg.norm(start))
        low, high = 0.0, view.facts.server_rate * one.mean_shift * (1.0 + TOLERANCE)
        if one.kind == "noise":
            low, high = (one.noise_std * (math.sqrt(model.size) + far) for far in (-8.0, 8.0))
        if not low - slack <= moved <= high + slack:
            yield (
                f"models: node {one.node} lies {moved:.6g} from the one it was made from; by its record it would be "
                f"{max(low, 0.0):.6g} to {high:.6g}"
            )


def _model_problem(folder: Path, row: ModelRow | None) -> str | None:
    """What is wrong with the file of a row; a row that is gone needs none."""
    if row is None:
        return None
    try:
        content = files.model_path(folder, row.node).read_bytes()
    except OSError:
        return f"models: the file of node {row.node} is missing"
    if hashlib.sha256(content).hexdigest() != row.digest or len(content) != row.bytes:
        return f"models: the file of node {row.node} was changed"
    return None


def _model_now(folder: Path, node: int) -> ModelRow | None:
    """The row as it is now, beside a writer at work."""
    reader = RunReader(folder)
    try:
        return reader.models().get(node)
    finally:
        reader.close()


def _check_certificates(reader: RunReader) -> Iterator[str]:
    stored = reader.certificates()
    recorded: dict[tuple[str, str], str] = {}
    signed_with: dict[tuple[str, str], str] = {}
    public_key = ""
    for event in reader.events():
        content = payload_of(event)
        public_key = content.get("run", {}).get("public_key", public_key)
        for form, digest in content.get("certificates", {}).items():
            recorded[(content["request"], form)] = digest
            signed_with[(content["request"], form)] = public_key
    for key in sorted(set(stored) | set(recorded)):
        name = f"certificate {key[0]} ({key[1]})"
        if key not in stored or key not in recorded:
            yield f"certificates: {name} is {'missing' if key in recorded else 'not in the ledger'}"
            continue
        if hashlib.sha256(stored[key].encode()).hexdigest() != recorded[key]:
            yield f"certificates: {name} is not the one the ledger commits to"
        if not signature_holds(json.loads(stored[key]), signed_with[key]):
            yield f"certificates: the signature of {name} does not hold"
        path = certificate_path(reader.folder, *key)
        if not path.is_file() and is_locked(reader.folder / LOCK_FILE):
            continue  # it is being written
        if not path.is_file():
            yield f"certificates: the file {path.name} is missing"
        elif path.read_text(encoding="utf-8", errors="replace") != stored[key]:
            yield from _differences(path, json.loads(stored[key]))


def _check_outside_files(reader: RunReader) -> Iterator[str]:
    """What lies beside the database must not speak of events it does not have."""
    if is_locked(reader.folder / LOCK_FILE):
        return  # its writer may have gone on since
    for sign in reader.signs_of_an_older_database():
        yield f"folder: {sign}"
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
    for name, found, issued in different[:8]:
        yield f"certificates: {path.name}: {name} is {_said(found)}, the issued certificate says {_said(issued)}"


@dataclass(frozen=True)
class _Ledger:
    """What the checks of every request look up in the ledger, read once."""

    hashes: dict[int, str]
    written: dict[int, str]
    tips: dict[int, int]

    @staticmethod
    def of(reader: RunReader) -> _Ledger:
        """Of each event its hash and the current model; of each node's model, whose bytes never change, its digest."""
        hashes, written, tips, tip = {}, {}, {}, 0
        for event in reader.events():
            content = payload_of(event)
            tip = int(content.get("run", {}).get("tip", tip))
            hashes[event.seq], tips[event.seq] = event.hash.hex(), tip
            written.update({one["node"]: one["digest"] for one in content.get("models", [])})
        return _Ledger(hashes, written, tips)


def _check_requests(reader: RunReader) -> Iterator[str]:
    """Node, noise, charges, level and certificate of every request, recomputed from the scalars of the rounds.

    One walk over the ledger: at the event that carried a request out, `tables` are what they were just before it.
    """
    carried_out = {one.request: one for one in reader.requests() if one.noise_node is not None}
    stored: dict[int, dict[tuple[int, int], ChargeRow]] = {}
    for one in reader.charges():
        stored.setdefault(one.noise_node, {})[(one.noise_node, one.subject)] = one
    ledger, tables = _Ledger.of(reader), empty_tables()
    for event in reader.events():
        content = payload_of(event)
        if event.kind == "rolled back":
            request = carried_out.pop(content["request"], None)
            if request is not None:
                charges = stored.get(request.noise_node or 0, {})
                yield from _check_request(reader, request, charges, tables, content, ledger)
        for change in changes(event.kind, event.time, content):
            apply_change(tables, change)
    for left in carried_out:
        yield f"request {left}: the ledger has no event that carried it out"


def _check_request(
    reader: RunReader,
    request: RequestRow,
    stored_charges: dict[tuple[int, int], ChargeRow],
    tables: Tables,
    content: dict[str, Any],
    ledger: _Ledger,
) -> Iterator[str]:
    recorded = RecordedRequest(reader, request)
    name, noise_node = f"request {request.request}", recorded.view.path.nodes[-1].node
    if not agree(request.multiplier, recorded.multiplier):
        yield (
            f"{name}: s is recorded as {request.multiplier!r}, ({request.epsilon}, {request.delta}) give "
            f"{recorded.multiplier!r}"
        )
    new, earlier = recorded.new_exposures(), recorded.earlier_exposures()
    yield from _check_subjects(request, recorded)
    charged = {}
    # Only noise of the request itself is charged, to its own subjects and to those forgotten earlier.
    for one in [*new, *earlier] if recorded.method.protection == "noise" else []:
        psi = recorded.psi(one)
        cost = charge(psi, recorded.noise_std)
        if cost > one.subject.left(recorded.order) * (1.0 + TOLERANCE):
            yield (
                f"{name}: the noise {recorded.noise_std!r} at node {request.source_node} costs subject "
                f"{one.subject.subject} {cost!r}, more than the {one.subject.left(recorded.order)!r} it has left"
            )
        if one in new or psi > 0.0:
            charged[(noise_node, one.subject.subject)] = (repr(finite_or_text(psi)), cost)
    found = {key: (row.psi, row.charge) for key, row in stored_charges.items()}
    for key in sorted(set(charged) | set(found)):
        pair, expected = found.get(key, (None, None)), charged.get(key, (None, None))
        if not (agree(_figure(pair[0]), _figure(expected[0])) and agree(pair[1], expected[1])):
            yield (
                f"{name}: the charge of subject {key[1]} is recorded as {found.get(key)}, recomputed {charged.get(key)}"
            )
    before = RunView(reader, tip=int(tables["run"][("tip",)]["value"]))
    at_hand = {int(key[0]) for key in tables["models"]}
    yield from _check_erasure(before, request, recorded, at_hand, content)
    yield from check_updates_erased(before, recorded, tables, content)
    if recorded.method.starts_from == "rule":
        yield from _check_choice(before, request, recorded, at_hand)
    yield from _check_start(before, request, recorded)
    if request.status == "done":
        yield from _check_statements(reader, request, recorded, content, ledger)


def _check_subjects(request: RequestRow, recorded: RecordedRequest) -> Iterator[str]:
    """Who is hidden must be who asked, jointly if that was asked for; the node made must be that of the request."""
    asked = tuple(recorded.view.index_of[name] for name in request.clients)
    wanted = [asked] if request.unit == "joint" else [(one,) for one in asked]
    found = [one.subject.clients for one in recorded.new_exposures()]
    if found != wanted:
        yield f"request {request.request}: it hides the clients {found}, but was asked to forget {wanted}"
    made = recorded.view.path.nodes[-1]
    place = (made.parent, made.branch, made.order, made.noise_std)
    if place != (request.source_node, recorded.order, recorded.order, recorded.noise_std):
        yield f"request {request.request}: node {made.node} is not the one that its choice describes"


def _check_erasure(
    view: RunView, request: RequestRow, recorded: RecordedRequest, at_hand: set[int], content: dict[str, Any]
) -> Iterator[str]:
    """What had to be erased must be what was erased."""
    exposures = view.exposures([one.subject for one in recorded.new_exposures()])
    cut_after = -1 if request.source_node is None else view.path.depth_of.get(request.source_node, -1)
    wanted = nodes_to_erase(view, at_hand, exposures, cut_after, request.retention)
    erased, remaining = set(content.get("dropped_models", [])), set(content["remaining_models"])
    if erased != wanted:
        yield (
            f"request {request.request}: models of nodes {sorted(erased ^ wanted)} were erased or left against "
            f"retention {request.retention}"
        )
    if remaining != at_hand - wanted:
        yield f"request {request.request}: the models that remain are recorded as {sorted(remaining)}"
    back = {one["node"] for one in content["models"]} & wanted
    if back:
        yield f"request {request.request}: erased models {sorted(back)} were written again"


def _check_start(view: RunView, request: RequestRow, recorded: RecordedRequest) -> Iterator[str]:
    """A request must have started from the model its method starts from; noise must be promised."""
    start = recorded.method.starts_from
    expected = {"fresh": None, "current": view.path.nodes[-1].node, "initial": view.path.nodes[0].node}
    if recorded.replayed != (start == "initial"):
        kind = recorded.view.path.nodes[-1].kind
        yield f"request {request.request}: a node of kind {kind} is recorded, method {request.method} makes none"
    if start in expected and (request.source_node, request.wanted_node) != (expected[start],) * 2:
        yield f"request {request.request}: it started from node {request.source_node}, not from the {start} model"
    if recorded.method.protection != "noise" and recorded.noise_std != 0.0:
        yield f"request {request.request}: noise {recorded.noise_std!r} is recorded, method {request.method} adds none"
    asked = request.sigma
    if asked != "auto" and recorded.noise_std not in (0.0, float(asked)):
        yield f"request {request.request}: sigma {asked} was asked for, {recorded.noise_std!r} is recorded"


def _check_choice(view: RunView, request: RequestRow, recorded: RecordedRequest, at_hand: set[int]) -> Iterator[str]:
    """The node must be the latest kept one that every budget allows."""
    subjects = [one.subject for one in recorded.new_exposures()]
    exposures = view.exposures([*subjects, *view.earlier_subjects(before_order=recorded.order)])
    kept = [depth for node, depth in view.path.depth_of.items() if node in at_hand]
    if recorded.noise_std > 0.0:
        around = [
            choose_node(exposures, kept, recorded.noise_std * scale, recorded.order)
            for scale in (1.0 - TOLERANCE, 1.0, 1.0 + TOLERANCE)
        ]
        nodes = {view.path.nodes[one.depth].node for one in around}
        if request.source_node not in nodes:
            yield f"request {request.request}: it went back to node {request.source_node}, the rule says {nodes}"
        wanted = {view.path.nodes[one.wanted_depth].node for one in around}
        if request.wanted_node not in wanted:
            yield (
                f"request {request.request}: the wanted node is recorded as {request.wanted_node}, recomputed {wanted}"
            )
    elif request.source_node not in view.path.depth_of:
        yield f"request {request.request}: its source node {request.source_node} was not on the active history"


def _check_statements(
    reader: RunReader, request: RequestRow, recorded: RecordedRequest, rolled: dict[str, Any], ledger: _Ledger
) -> Iterator[str]:
    """Both forms of the certificate, field by field."""
    stored = reader.certificates(request.request)
    done = payload_of_request(reader, request.request, "request done")
    noised = request.noise_node
    certified = {which: one["node"] for which, one in done["certified_models"].items()}
    source = noised if request.source_node is None else request.source_node
    if certified != {"source": source, "noised": noised, "final": done["final_node"]}:
        yield f"certificate {request.request}: it names the models of nodes {certified}, which are not the request's"
    if ledger.tips[done_at := reader.steps()["request done", request.request]] != done["final_node"]:
        yield f"certificate {request.request}: node {done['final_node']} was not the current model when it was issued"
    for one in done["certified_models"].values():
        if ledger.written.get(one["node"]) != one["digest"]:
            yield f"certificate {request.request}: model {one['node']} is not the one that was recorded"
    for form, build in (("auditor", auditor_form), ("public", public_form)):
        text = stored.get((request.request, form))
        if text is None:
            continue  # reported above
        body = json.loads(text)["body"]
        seq = done_at - 1
        facts = recorded.facts(
            final_node=int(done["final_node"]),
            models=done["certified_models"],
            erased=tuple(rolled.get("dropped_models", [])),
            remaining=tuple(rolled["remaining_models"]),
            ledger=(seq, ledger.hashes[seq]),
            issued=str(body["issued"]),
        )
        for name, found, expected in differing(body, json.loads(json.dumps(build(facts)))):
            yield (f"certificate {request.request} ({form}): {name} says {_said(found)}, recomputed {_said(expected)}")
        if form == "auditor" and request.level != facts.level:
            yield f"request {request.request}: its level is recorded as {request.level!r}, recomputed {facts.level!r}"
