"""Intake of requests, decisions and client list changes.

They are recorded in the ledger, or posted to the inbox while another process writes to the run.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sifu.choices import LEVELS, Level, TermsGiven
from sifu.core.ledger import canonical_json
from sifu.core.operator_words import LAST_CLIENT
from sifu.core.record_commitments import commitments_to, is_commitment
from sifu.core.request_terms import AUTO, LATER_TERMS, TERMS, RequestTerms, check_request_id
from sifu.core.spec import Spec
from sifu.errors import DiskError, InputError, NoSpaceError, NotCertifiableError, RunDamagedError, SifuError
from sifu.methods.registry import method_for
from sifu.planning.plan import Plan, least_level
from sifu.requests.approvals import DEADLINE_DAYS, check_deadline
from sifu.requests.client_list import change_clients, recorded_clients
from sifu.requests.request_record import check_decision, check_digest, check_words, decide
from sifu.run.run_view import RunView
from sifu.store.actors import LONGEST_ACTOR, actor_name
from sifu.store.inbox import SUBMITTED, Message, any_messages, discard, messages, post
from sifu.store.keys import sign_statement, signer_of
from sifu.store.projection import NewEvent
from sifu.store.reader import RunReader, plain_names
from sifu.store.writer import RunWriter
from sifu.theory.facts import IN_PROCESS


def make_terms(view: RunView, clients: Sequence[str], given: TermsGiven) -> RequestTerms:
    """Return the terms of a request: the given ones, and the spec's defaults for the rest.

    Args:
        view: View of the run.
        clients: Names of the clients; earlier names are replaced by current ones.
        given: Terms that differ from the spec's defaults.
    """
    spec = view.spec
    chosen = {name: value for name, value in given.items() if value is not None}
    if "records" in chosen:
        chosen["records"] = _rows(chosen["records"])
    names = clients if isinstance(clients, str) else view.names_now(clients)
    terms = RequestTerms.from_mapping(_usual(spec) | chosen | {"clients": names})
    check_retention(spec, terms)
    return terms


def usual_terms(spec: Spec, clients: Sequence[str]) -> RequestTerms:
    """Return the terms of a request for these clients with the spec's defaults."""
    return RequestTerms.from_mapping(_usual(spec) | {"clients": list(clients)})


def _usual(spec: Spec) -> dict[str, Any]:
    return {name: value for name, value in asdict(spec.privacy).items() if name in TERMS}


def _rows(records: Any) -> Any:
    """Return row numbers as a list; refuse an empty one, which would mean forgetting the whole client."""
    rows = records.tolist() if hasattr(records, "tolist") else records
    if isinstance(rows, Sequence) and not isinstance(rows, str) and not rows:
        raise InputError("no records are named: give the records to forget, or leave records out to forget the client")
    return list(rows) if isinstance(rows, Sequence) and not isinstance(rows, str) else rows


def check_level(plan: Plan, level: Level | None) -> None:
    """Check that a plan reaches the required level, and meets its demand against observers of all releases.

    Raises:
        NotCertifiableError: If the plan misses the level or the demand.
    """
    least = least_level(plan.terms, level)
    if LEVELS.index(plan.level) < LEVELS.index(least):
        wanted = {"failed"} if least == "conditional" else {"failed", "assumed"}
        reasons = " ".join(premise.statement for premise in plan.premises if premise.status in wanted)
        raise NotCertifiableError(
            f"the request can only be executed at level {plan.level!r}, below the required level {least!r} "
            f"(see --level): nothing was changed. {reasons}"
        )
    check_before_after(plan)


def check_before_after(plan: Plan) -> None:
    """Check that a plan meets the demand of its terms against observers of all releases."""
    demanded, reached = plan.terms.before_after_budget, plan.before_after
    if demanded is None or (reached is not None and reached.epsilon <= demanded[0]):
        return
    found = "no guarantee is proven" if reached is None else f"only {reached.words} is proven"
    raise NotCertifiableError(
        f"against an observer who kept earlier releases {found}, but ({demanded[0]:g}, {demanded[1]:g}) was demanded "
        "(see --before-after): nothing was changed"
    )


def check_retention(spec: Spec, terms: RequestTerms) -> None:
    """Check that the run can honour the retention.

    Strict retention would have to erase Gram matrices, which earlier joint certificates are recomputed from.
    """
    if terms.retention == "strict" and spec.keep.gram_clients > 0:
        raise InputError(
            f"retention strict is not possible in a run that keeps Gram matrices (keep.gram_clients = "
            f"{spec.keep.gram_clients}): they depend on the client's updates. Use --retention paper, or "
            "keep.gram_clients = 0"
        )


def receive(
    writer: RunWriter,
    view: RunView,
    terms: RequestTerms,
    request: str | None,
    deadline_days: int = DEADLINE_DAYS,
    actor: str | None = None,
    nonces: Mapping[str, str] | None = None,
    commitments: Sequence[str] = (),
) -> str:
    """Record a request in the ledger; repeating an id with the same terms changes nothing.

    Args:
        writer: Writer of the run.
        view: View of the run at this instant.
        terms: Terms of the request.
        request: Id of the request; by default the next free `r1`, `r2`, ...
        deadline_days: Days until the deadline.
        actor: Name of the person who files it; by default the current user.
        nonces: Nonce by identity, from which the commitments are computed unless these are given.
        commitments: Commitments to the records of the request.

    Returns:
        The id of the request.
    """
    received = {row.request: row for row in view.requests}
    check_new(view, terms, request)
    if request is not None and request in received:
        return request
    check_deadline(deadline_days)
    numbered = (f"r{number}" for number in itertools.count(len(received) + 1))
    request = request or next(name for name in numbered if name not in received)
    content = terms.to_mapping() | {"request": request, "deadline_days": deadline_days}
    payload: dict[str, Any] = {"request": content, "actor": actor_name(actor)}
    if commitments := commitments or commitments_of(view.reader, terms, request, nonces):
        payload["commitments"] = list(commitments)
    writer.record(NewEvent("request received", payload))
    return request


def commitments_of(reader: RunReader, terms: RequestTerms, request: str, nonces: Mapping[str, str] | None) -> list[str]:
    """Return the commitments to the records of a request; none without nonces."""
    if not nonces:
        return []
    if not 1 <= len(nonces) <= len(terms.records):
        raise InputError(
            f"{len(nonces)} nonces were given for {len(terms.records)} records: give one for each identity"
        )
    return commitments_to(reader.value("run"), request, plain_names(reader, terms.clients)[0], nonces)


def check_new(view: RunView, terms: RequestTerms, request: str | None) -> None:
    """Check that a request can be received; a received request may be repeated with the same terms."""
    received = {row.request: row for row in view.requests}
    if request is not None:
        check_request_id(request)
        if request in received:
            if received[request].terms != terms:
                raise InputError(f"request {request} is already in the ledger with other terms: use another id")
            return
    if terms.method != AUTO:
        method_for(view, terms.method)
    if terms.records and (view.facts.identity != IN_PROCESS or view.spec.data.name == "flower"):
        raise InputError(
            f"{terms.clients[0]} keeps its data on its own node, so the operator cannot name its rows: forget the "
            "client, and let it join again with its remaining records under another name and key (sifu clients add)"
        )
    view.new_subjects(terms, view.next_order)
    for row in view.requests:
        both = set(row.clients) & set(terms.clients)
        if row.waits and both:
            names = plain_names(view.reader, sorted(both))
            raise InputError(
                f"client {', '.join(names)} already waits in request {row.request}: execute that one first (sifu "
                "forget), or withdraw it (sifu requests decide) and file one request for everything"
            )
    # A client stays if only some of its records are forgotten.
    leaving = [row.clients for row in view.requests if row.waits and not row.records]
    leaving += [] if terms.records else [terms.clients]
    if len(view.forgotten) + sum(map(len, leaving)) >= len(view.clients):
        raise InputError(f"the requests together would forget every client. {LAST_CLIENT}")


FORGET_ME = "forget me"


def sign_request(key_file: Path, name: str, run_id: str, request: str) -> dict[str, Any]:
    """Return the signed statement by which a client asks the operator to be forgotten, under the spec's terms."""
    body = {"do": FORGET_ME, "run": run_id, "client": name, "request": check_request_id(request)}
    return sign_statement(key_file, body)


def id_of_signed(statement: dict[str, Any]) -> str:
    """Return the id of a signed request, before its signature is checked."""
    try:
        return check_request_id(statement["body"]["request"])
    except (KeyError, TypeError) as error:
        raise InputError(f"this is not a signed request: it has no {error}") from error


def terms_of_signed(reader: RunReader, statement: dict[str, Any]) -> RequestTerms:
    """Return the terms of a signed request.

    Raises:
        InputError: If the signature, run, key or client does not match.
    """
    id_of_signed(statement)
    body = statement["body"]
    signer = signer_of(statement)
    if body.get("do") != FORGET_ME or signer is None:
        raise InputError("the signature does not match the request")
    if body.get("run") != reader.value("run"):
        raise InputError(f"the request was signed for another run ({body.get('run')!r})")
    owner = next((entry.name for entry in recorded_clients(reader) if entry.key == signer), None)
    if owner is None:
        raise InputError("the request is signed with a key that is not on the list of clients")
    if owner != body.get("client"):
        raise InputError(
            f"{owner} signed a request for {body.get('client')}: a client can only request to be forgotten itself"
        )
    return make_terms(RunView(reader), [owner], {})


KIND = "decision"
FIELDS = ("request", "decision", "reason", "actor", "terms")
"""Fields of a decision; `terms` is the digest of the approved terms, and empty for other decisions."""


def post_decision(
    reader: RunReader, request: str, decision: str, reason: str, actor: str, terms: str | None = None
) -> bool:
    """Post a decision to the inbox.

    Args:
        reader: Reader of the run.
        request: Id of the request.
        decision: One of `Decision`.
        reason: Reason for the decision; required for a refusal.
        actor: Name of the person who decides.
        terms: Digest of the terms that the decision is about; None skips the comparison.

    Returns:
        False if the ledger has the decision already.

    Raises:
        InputError: If the decision cannot be recorded.
    """
    row = next((row for row in reader.requests() if row.request == request), None)
    posted = [
        message
        for message in messages(reader.folder)
        if message.kind in ("request", "signed") and message.id == request
    ]
    if row is not None or not posted:
        if not check_decision(reader, request, decision, reason, actor, terms):
            return False
        digest = row.terms.digest(request) if row is not None else ""
    else:
        check_words(decision, reason)  # the rest is checked when both messages are ingested, the request first
        digest = _terms_posted(reader, posted[0]).digest(request) if decision == "approved" else ""
        check_digest(request, digest, terms)
    about = digest if decision == "approved" else ""
    content = dict(zip(FIELDS, (request, decision, reason, actor, about), strict=True))
    # The same decision of the same person has the same message id, so it counts once.
    post(reader.folder, KIND, f"d-{hashlib.sha256(canonical_json(content)).hexdigest()[:32]}", content)
    return True


def _terms_posted(reader: RunReader, message: Message) -> RequestTerms:
    content = message.content or {}
    if message.kind == "signed":
        return terms_of_signed(reader, content)
    return RequestTerms.from_mapping({name: value for name, value in content.items() if name in TERMS})


log = logging.getLogger(__name__)

LOOK_EVERY = 0.2
"""Seconds between two polls of the inbox if all clients are in this process; rounds may be much shorter."""


def ingest(writer: RunWriter) -> list[str]:
    """Record every inbox message as an event and delete its file.

    Returns:
        A sentence for each message that was refused.
    """
    refused = []
    for message in messages(writer.folder):
        if message.trouble or message.kind == SUBMITTED:
            continue  # it may be a request: keep it until its file can be opened, or a person has examined it
        try:
            _open(writer, message)
        except (NoSpaceError, DiskError, RunDamagedError):
            raise  # the message is not at fault: it stays until the disk works again
        except SifuError as error:
            refused.append(f"{message.kind} {message.id}: {error}")
            record_refusal(writer, message, str(error))
        discard(message)
    return refused


def record_refusal(writer: RunWriter, message: Message, reason: str) -> None:
    """Record that an inbox message was refused, with its content except nonces, which the run never keeps."""
    content = message.content and {key: value for key, value in message.content.items() if key != "nonces"}
    payload = {"letter": message.id, "kind": message.kind, "content": content, "reason": reason}
    writer.record(NewEvent("letter refused", payload))


def _open(writer: RunWriter, message: Message) -> None:
    if message.content is None:
        raise InputError("the inbox message cannot be read")
    if message.kind == "request":
        content = dict(message.content)
        deadline, actor = content.pop("deadline_days", DEADLINE_DAYS), content.pop("actor", None)
        commitments = content.pop("commitments", [])
        if not isinstance(commitments, list) or not all(is_commitment(value) for value in commitments):
            raise InputError("commitments must be texts of 64 hexadecimal digits")
        if not isinstance(deadline, int) or not isinstance(actor, str | None):
            raise InputError(
                f"a deadline must be a number of days and an actor a name, found {deadline!r} and {actor!r}"
            )
        view = RunView(writer)
        # Only `LATER_TERMS` may be missing: others would get the spec's defaults, which may change before ingestion.
        needed = set(TERMS) - LATER_TERMS
        if not needed <= set(content) <= set(TERMS):
            raise InputError(f"a request must give {', '.join(sorted(needed))}; found {', '.join(sorted(content))}")
        terms = RequestTerms.from_mapping(content)
        terms = replace(terms, clients=tuple(view.names_now(terms.clients)))  # a client may have a new name
        check_retention(view.spec, terms)
        if len(commitments) > len(terms.records):
            raise InputError(f"there are {len(commitments)} commitments to {len(terms.records)} records")
        days_left = days_left_of(message, deadline)
        receive(writer, view, terms, message.id, days_left, actor, commitments=sorted(commitments))
    elif message.kind == "signed":
        if id_of_signed(message.content) != message.id:
            raise InputError("the file name of the inbox message is not the signed id")
        terms = terms_of_signed(writer, message.content)
        actor = f"client {plain_names(writer, terms.clients)[0]}"[:LONGEST_ACTOR]
        receive(writer, RunView(writer), terms, message.id, days_left_of(message, DEADLINE_DAYS), actor)
    elif message.kind == "decision":
        decision = message.content
        if set(decision) != set(FIELDS) or not all(isinstance(decision[name], str) for name in FIELDS):
            given = ", ".join(sorted(decision))[:200]
            raise InputError(f"a decision must give {', '.join(FIELDS)} as texts; found {given}")
        check_request_id(decision["request"])
        decide(writer, **decision | ({} if decision["decision"] == "approved" else {"terms": None}))
    elif message.kind == "clients":
        change_clients(writer, message.content)
    else:
        raise InputError(
            "an inbox message must be a request, a signed request, a decision or a change to the list of clients, "
            f"found {message.kind!r}"
        )


def days_left_of(message: Message, deadline_days: int) -> int:
    """Return the days left of a deadline, which runs from the time the message was posted."""
    waited = int(max(0.0, time.time() - message.posted) // 86400)
    return max(0, deadline_days - waited) if deadline_days >= 0 else deadline_days


class WatchedInbox:
    """Inbox of a run that this process writes to.

    Args:
        writer: Writer of the run.
        after: Callback that receives the writer after messages were ingested.
        look_every: Seconds between two polls; 0 polls between any two rounds.
        also: Callback that returns whether other work is waiting.
    """

    def __init__(
        self,
        writer: RunWriter,
        after: Callable[[RunWriter], None] | None = None,
        look_every: float = LOOK_EVERY,
        also: Callable[[], bool] = lambda: False,
    ) -> None:
        self._writer, self._after, self._look_every, self._also = writer, after, look_every, also
        self._looked = -1.0

    def waiting(self) -> bool:
        """Return whether a message is waiting; False until `look_every` seconds have passed since the last poll."""
        now = time.monotonic()
        if now - self._looked < self._look_every:
            return False
        self._looked = now
        return any_messages(self._writer.folder) or self._also()

    def ingest(self) -> None:
        """Ingest all messages, and log each refused message."""
        for refusal in ingest(self._writer):
            log.warning("refused: %s", refusal)
        if self._after:
            self._after(self._writer)
