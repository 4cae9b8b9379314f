"""Messages to a run that another process may be writing: signed requests, decisions, and ingestion of the inbox."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sifu.core.ledger import canonical_json
from sifu.core.record_commitments import is_commitment
from sifu.core.request_terms import TERMS, Terms, check_request_id
from sifu.errors import DiskError, InputError, NoSpaceError, RunDamagedError, SifuError
from sifu.requests.client_list import change_clients, recorded_clients
from sifu.requests.deadlines import DEADLINE_DAYS
from sifu.requests.filing import make_terms, receive
from sifu.requests.request_record import check_decision, check_digest, check_words, decide
from sifu.run.run_view import RunView
from sifu.store.actors import LONGEST_ACTOR
from sifu.store.inbox import SUBMITTED, Message, any_messages, discard, messages, post
from sifu.store.keys import sign_statement, signer_of
from sifu.store.projection import NewEvent
from sifu.store.reader import RunReader, plain_names
from sifu.store.writer import RunWriter

FORGET_ME = "forget me"
KIND = "decision"
FIELDS = ("request", "decision", "reason", "actor", "terms")
"""Fields of a decision; `terms` is the digest of the approved terms, and empty for other decisions."""
LOOK_EVERY = 0.2
"""Seconds between two polls of the inbox, if all clients are in this process."""
log = logging.getLogger(__name__)


def sign_request(key_file: Path, name: str, run_id: str, request: str) -> dict[str, Any]:
    """Return a client's signed request to be forgotten, which uses the default terms of the run's spec."""
    body = {"do": FORGET_ME, "run": run_id, "client": name, "request": check_request_id(request)}
    return sign_statement(key_file, body)


def id_of_signed(statement: dict[str, Any]) -> str:
    """Return the id of a signed request, before its signature is checked."""
    try:
        return check_request_id(statement["body"]["request"])
    except (KeyError, TypeError) as error:
        raise InputError(f"this is not a signed request: it has no {error}") from error


def terms_of_signed(reader: RunReader, statement: dict[str, Any]) -> Terms:
    """Return the terms of a signed request.

    Raises:
        InputError: If the signature is invalid, or the run, key or client does not match.
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


def post_decision(reader: RunReader, request: str, decision: str, reason: str, actor: str, terms: str | None) -> bool:
    """Post a decision to the inbox; return False if the ledger has it already (see `request_record.decide`).

    Args:
        reader: Reader of the run.
        request: Id of the request.
        decision: One of `Decision`.
        reason: Reason for the decision, required for a refusal.
        actor: Name of the person who decides.
        terms: Digest of the terms that the decision is about, or None to skip the comparison.
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
        check_words(decision, reason)  # all other checks follow when both messages are ingested
        digest = _terms_posted(reader, posted[0]).digest(request) if decision == "approved" else ""
        check_digest(request, digest, terms)
    about = digest if decision == "approved" else ""
    content = dict(zip(FIELDS, (request, decision, reason, actor, about), strict=True))
    # The same decision of the same person has the same message id, so it counts once.
    post(reader.folder, KIND, f"d-{hashlib.sha256(canonical_json(content)).hexdigest()[:32]}", content)
    return True


def _terms_posted(reader: RunReader, message: Message) -> Terms:
    content = message.content or {}
    if message.kind == "signed":
        return terms_of_signed(reader, content)
    return Terms.from_mapping({name: value for name, value in content.items() if name in TERMS})


def ingest(writer: RunWriter) -> list[str]:
    """Record inbox messages as events and delete their files, except submissions and files that cannot be opened.

    Returns:
        A warning for each message that was refused.
    """
    refused = []
    for message in messages(writer.folder):
        if message.trouble or message.kind == SUBMITTED:
            continue  # the file may hold a request, so keep it until it can be opened or a person has examined it
        try:
            _open(writer, message)
        except (NoSpaceError, DiskError, RunDamagedError):
            raise  # the message may be valid, so it stays until the disk works again
        except SifuError as error:
            refused.append(f"{message.kind} {message.id}: {error}")
            record_refusal(writer, message, str(error))
        discard(message)
    return refused


def record_refusal(writer: RunWriter, message: Message, reason: str) -> None:
    """Record that an inbox message was refused.

    Its content is recorded without nonces and, for a submission, without the identities of records, because neither
    can be erased from the ledger.
    """
    content = message.content and {key: value for key, value in message.content.items() if key != "nonces"}
    if content and message.kind == SUBMITTED:
        content["terms"] = {key: value for key, value in content["terms"].items() if key != "records"}
    payload = {"letter": message.id, "kind": message.kind, "content": content, "reason": reason}
    writer.record(NewEvent("letter refused", payload))


def _open(writer: RunWriter, message: Message) -> None:
    """Record the event that a message asks for."""
    if message.content is None:
        raise InputError("the inbox message cannot be read")
    if message.kind == "request":
        _receive_posted(writer, message, dict(message.content))
    elif message.kind == "signed":
        _receive_signed(writer, message, message.content)
    elif message.kind == KIND:
        _decide_posted(writer, message.content)
    elif message.kind == "clients":
        change_clients(writer, message.content)
    else:
        raise InputError(
            "an inbox message must be a request, a signed request, a decision or a change to the list of clients, "
            f"found {message.kind!r}"
        )


def _receive_posted(writer: RunWriter, message: Message, content: dict[str, Any]) -> None:
    deadline, actor = content.pop("deadline_days", DEADLINE_DAYS), content.pop("actor", None)
    commitments = content.pop("commitments", [])
    if not isinstance(commitments, list) or not all(is_commitment(value) for value in commitments):
        raise InputError("commitments must be texts of 64 hexadecimal digits")
    if not isinstance(deadline, int) or not isinstance(actor, str | None):
        raise InputError(f"a deadline must be a number of days and an actor a name, found {deadline!r} and {actor!r}")
    view = RunView(writer)
    if set(content) != set(TERMS):  # a missing term would get the spec's default, which may change before ingestion
        raise InputError(f"a request must give {', '.join(sorted(TERMS))}; found {', '.join(sorted(content))}")
    terms = Terms.from_mapping(content)
    terms = replace(terms, clients=tuple(view.names_now(terms.clients)))  # a client may have a new name
    if len(commitments) > len(terms.records):
        raise InputError(f"there are {len(commitments)} commitments to {len(terms.records)} records")
    days_left = days_left_of(message, deadline)
    receive(writer, view, terms, message.id, days_left, actor, commitments=sorted(commitments))


def _receive_signed(writer: RunWriter, message: Message, statement: dict[str, Any]) -> None:
    if id_of_signed(statement) != message.id:
        raise InputError("the file name of the inbox message is not the signed id")
    terms = terms_of_signed(writer, statement)
    actor = f"client {plain_names(writer, terms.clients)[0]}"[:LONGEST_ACTOR]
    receive(writer, RunView(writer), terms, message.id, days_left_of(message, DEADLINE_DAYS), actor)


def _decide_posted(writer: RunWriter, decision: dict[str, Any]) -> None:
    if set(decision) != set(FIELDS) or not all(isinstance(decision[name], str) for name in FIELDS):
        given = ", ".join(sorted(decision))[:200]
        raise InputError(f"a decision must give {', '.join(FIELDS)} as texts; found {given}")
    check_request_id(decision["request"])
    decide(writer, **decision | ({} if decision["decision"] == "approved" else {"terms": None}))


def days_left_of(message: Message, deadline_days: int) -> int:
    """Return the days left until a deadline `deadline_days` after the message was posted, or 0 if it has passed."""
    waited = int(max(0.0, time.time() - message.posted) // 86400)
    return max(0, deadline_days - waited) if deadline_days >= 0 else deadline_days


class WatchedInbox:
    """Inbox of a run that this process writes to.

    Args:
        writer: Writer of the run.
        after: Callback that receives the writer after each ingestion.
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
