"""Taking letters in: requests and changes to the list of clients that came while another process was writing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sifu.core.request_terms import TERMS, RequestTerms
from sifu.errors import DiskError, InputError, NoSpaceError, RunDamagedError, SifuError
from sifu.record.run_view import RunView
from sifu.record.training import uninterrupted
from sifu.requests.client_list import change_clients
from sifu.requests.deadlines import DEADLINE_DAYS
from sifu.requests.given_terms import check_retention
from sifu.requests.posted_decisions import open_decision
from sifu.requests.receiving import receive
from sifu.requests.signed_requests import id_of_signed, terms_of_signed
from sifu.store.actor import LONGEST_ACTOR
from sifu.store.inbox import Letter, any_letters, discard, letters
from sifu.store.remainders import plain_names
from sifu.store.writer import RunWriter

log = logging.getLogger(__name__)

LOOK_EVERY = 0.2
"""Seconds between two looks into the inbox where all clients are in this process; rounds may be far shorter."""


def take_in(writer: RunWriter) -> list[str]:
    """Every waiting letter becomes an event, then its file is deleted; returns a sentence for each that was refused."""
    refused = []
    for letter in letters(writer.folder):
        if letter.trouble:
            continue  # it may be somebody's request: it stays until its file can be opened
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
