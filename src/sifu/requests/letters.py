"""Requests, decisions and changes of the client list that come while another process writes to the run."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sifu.core.ledger import canonical_json
from sifu.core.request_terms import TERMS, RequestTerms, check_request_id
from sifu.errors import DiskError, InputError, NoSpaceError, RunDamagedError, SifuError
from sifu.requests.client_list import change_clients, recorded_clients
from sifu.requests.deadlines import DEADLINE_DAYS
from sifu.requests.receiving import check_retention, make_terms, receive
from sifu.requests.request_record import check_decision, check_digest, check_words, decide
from sifu.run.run_view import RunView
from sifu.run.training import uninterrupted
from sifu.store.clock import LONGEST_ACTOR
from sifu.store.inbox import Letter, any_letters, discard, letters, post
from sifu.store.keys import sign_statement, signer_of
from sifu.store.reader import RunReader
from sifu.store.remainders import plain_names
from sifu.store.writer import RunWriter

FORGET_ME = "forget me"


def sign_request(key_file: Path, name: str, run_id: str, request: str) -> dict[str, Any]:
    """What a client sends to the operator; the terms are those of the run's spec."""
    body = {"do": FORGET_ME, "run": run_id, "client": name, "request": check_request_id(request)}
    return sign_statement(key_file, body)


def id_of_signed(statement: dict[str, Any]) -> str:
    """The request's id, before anything is believed."""
    try:
        return check_request_id(statement["body"]["request"])
    except (KeyError, TypeError) as error:
        raise InputError(f"that is not a signed request: it has no {error}") from error


def terms_of_signed(reader: RunReader, statement: dict[str, Any]) -> RequestTerms:
    """The terms of a signed request, or a sentence about why it does not count."""
    id_of_signed(statement)
    body = statement["body"]
    signer = signer_of(statement)
    if body.get("do") != FORGET_ME or signer is None:
        raise InputError("the signature does not hold over the request")
    if body.get("run") != reader.value("run"):
        raise InputError(f"the request was signed for another run ({body.get('run')!r})")
    owner = next((entry.name for entry in recorded_clients(reader) if entry.key == signer), None)
    if owner is None:
        raise InputError("the request is signed with a key that is not on the list of clients")
    if owner != body.get("client"):
        raise InputError(f"{owner} signed a request for {body.get('client')}: a client can ask for itself only")
    return make_terms(RunView(reader), [owner], {})


KIND = "decision"
FIELDS = ("request", "decision", "reason", "actor", "terms")
"""`terms` is the digest of the terms that an approval is about, and empty for other decisions."""


def post_decision(
    reader: RunReader, request: str, decision: str, reason: str, actor: str, terms: str | None = None
) -> bool:
    """Leave a decision in the inbox; False if it is in the ledger already. What cannot be recorded is refused now."""
    row = next((row for row in reader.requests() if row.request == request), None)
    posted = [letter for letter in letters(reader.folder) if _is_request(letter) and letter.id == request]
    if row is not None or not posted:
        if not check_decision(reader, request, decision, reason, actor, terms):
            return False
        digest = row.terms.digest(request) if row is not None else ""
    else:
        check_words(decision, reason)  # the rest is looked at when both are opened, the request first
        digest = _terms_posted(reader, posted[0]).digest(request) if decision == "approved" else ""
        check_digest(request, digest, terms)
    about = digest if decision == "approved" else ""
    content = dict(zip(FIELDS, (request, decision, reason, actor, about), strict=True))
    # The same decision of the same person is the same letter, so it counts once.
    post(reader.folder, KIND, f"d-{hashlib.sha256(canonical_json(content)).hexdigest()[:32]}", content)
    return True


def open_decision(writer: RunWriter, content: dict[str, Any]) -> None:
    """Record a decision that was posted."""
    if set(content) != set(FIELDS) or not all(isinstance(content[name], str) for name in FIELDS):
        raise InputError(f"a decision must give {', '.join(FIELDS)} as texts; found {', '.join(sorted(content))[:200]}")
    check_request_id(content["request"])
    terms = content["terms"] if content["decision"] == "approved" else None
    decide(writer, content["request"], content["decision"], content["reason"], content["actor"], terms)


def _is_request(letter: Letter) -> bool:
    return letter.kind in ("request", "signed")


def _terms_posted(reader: RunReader, letter: Letter) -> RequestTerms:
    content = letter.content or {}
    if letter.kind == "signed":
        return terms_of_signed(reader, content)
    return RequestTerms.from_mapping({name: value for name, value in content.items() if name in TERMS})


log = logging.getLogger(__name__)

LOOK_EVERY = 0.2
"""Seconds between two looks into the inbox where all clients are in this process; rounds may be far shorter."""


def take_in(writer: RunWriter) -> list[str]:
    """Every waiting letter becomes an event, then its file is deleted; returns a sentence for each that was refused."""
    refused = []
    for letter in letters(writer.folder):
        if letter.trouble:
            continue  # it may be a request: keep it until its file can be opened
        try:
            _open(writer, letter)
        except (NoSpaceError, DiskError, RunDamagedError):
            raise  # the letter is not to blame: it stays, to be taken in when the disk is well
        except SifuError as error:
            refused.append(f"{letter.kind} {letter.id}: {error}")
            payload = {"letter": letter.id, "kind": letter.kind, "content": letter.content, "reason": str(error)}
            with uninterrupted():
                writer.record("letter refused", payload)
        discard(letter)
    return refused


def _open(writer: RunWriter, letter: Letter) -> None:
    if letter.content is None:
        raise InputError("the letter cannot be read")
    if letter.kind == "request":
        content = dict(letter.content)
        deadline, actor = content.pop("deadline_days", DEADLINE_DAYS), content.pop("actor", None)
        if not isinstance(deadline, int) or not isinstance(actor, str | None):
            raise InputError(f"a deadline is a number of days and an actor a name, found {deadline!r} and {actor!r}")
        view = RunView(writer)
        terms = terms_of_letter(content)
        terms = replace(terms, clients=tuple(view.names_now(terms.clients)))  # who joined again since it was posted
        check_retention(view.spec, terms)
        receive(writer, view, terms, letter.id, _days_left(letter, deadline), actor)
    elif letter.kind == "signed":
        if id_of_signed(letter.content) != letter.id:
            raise InputError("the letter's name is not the id that was signed")
        terms = terms_of_signed(writer, letter.content)
        actor = f"client {plain_names(writer, terms.clients)[0]}"[:LONGEST_ACTOR]
        receive(writer, RunView(writer), terms, letter.id, _days_left(letter, DEADLINE_DAYS), actor)
    elif letter.kind == "decision":
        open_decision(writer, letter.content)
    elif letter.kind == "clients":
        change_clients(writer, letter.content)
    else:
        raise InputError(
            "a letter is a request, a signed request, a decision or a change to the list of clients, found "
            f"{letter.kind!r}"
        )


def _days_left(letter: Letter, deadline_days: int) -> int:
    """A deadline runs from when the letter was posted: the whole days that it waited are gone."""
    waited = int(max(0.0, time.time() - letter.posted) // 86400)
    return max(0, deadline_days - waited) if deadline_days >= 0 else deadline_days


def terms_of_letter(content: dict[str, Any]) -> RequestTerms:
    """The terms of a letter, which leaves none of them out: the spec's defaults may change before it is opened."""
    if set(content) != set(TERMS):
        raise InputError(f"a request must give {', '.join(sorted(TERMS))}; found {', '.join(sorted(content))}")
    return RequestTerms.from_mapping(content)


class WatchedInbox:
    """The inbox of a run that this process writes to; `after` is called with the writer when letters were taken in.

    `look_every` seconds pass between two looks; 0 looks between any two rounds. `also` says that something else waits.
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
        """Whether a letter waits."""
        now = time.monotonic()
        if now - self._looked < self._look_every:
            return False
        self._looked = now
        return any_letters(self._writer.folder) or self._also()

    def take_in(self) -> None:
        """Letters become events."""
        for refusal in take_in(self._writer):
            log.warning("refused: %s", refusal)
        if self._after:
            self._after(self._writer)
