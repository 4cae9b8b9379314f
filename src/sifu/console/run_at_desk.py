"""One run at the desk: what was read of it and is shared, and its requests as pages and lists show them.

Also what requesters may file: for whom, under which terms, and what an error tells them of others.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sifu.api import PendingRequest, RequestRecord, RequestStatus, Run
from sifu.choices import TermsGiven
from sifu.console.live import Live, LiveView
from sifu.console.tokens import TERMS_OF_REQUESTERS, NotAllowedError, Token
from sifu.core.spec import Spec
from sifu.errors import InputError
from sifu.requests.approvals import POSTED, approvals_needed, pending_requests, unapproved
from sifu.store.clock import current_time, same_person

KEPT_LONGER = 20.0
SETTLED = ("done", "refused", "withdrawn")


class RunAtDesk:
    """One run: its folder, what was read of it, and locks, because what is worked out is shared.

    Status queries never block on slow plans.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
        self.name = folder.resolve().name
        self.lock = threading.RLock()
        self._live_lock = threading.Lock()
        self.live_view = LiveView(folder)
        self.run = Run(folder)
        self._remembered: dict[Any, _Remembered] = {}

    def live(self) -> Live:
        """The run now."""
        with self._live_lock:
            return self.live_view.read()

    def remembered(self, what: Any, work: Any) -> Any:
        """A result that holds as long as nothing is written to the run.

        While rounds are all that is written, it is also kept for `KEPT_LONGER` times as long as it took to work out:
        however many ask, a run at work is not slowed by more than that.
        """
        live, kept = self.live(), self._remembered.get(what)
        if kept is not None and kept.holds(live):
            return kept.result
        with self.lock:
            live, kept = self.live(), self._remembered.get(what)
            if kept is None or not kept.holds(live):
                if len(self._remembered) > 64:
                    self._remembered.clear()
                started = time.monotonic()
                result = work()
                now = time.monotonic()
                kept = _Remembered(live.events, _beside_rounds(live), now + KEPT_LONGER * (now - started), result)
                self._remembered[what] = kept
            return kept.result

    def written(self) -> None:
        """We wrote to the run: nothing that was read before holds."""
        with self.lock, self._live_lock:
            self.live_view.look_again()
            self._remembered.clear()


@dataclass(frozen=True)
class _Remembered:
    """A result, the state of the run that it was worked out from, and until when it does while rounds are added."""

    events: int
    beside_rounds: tuple[Any, ...]
    until: float
    result: Any

    def holds(self, live: Live) -> bool:
        """Whether it is as good as a new one."""
        if live.events == self.events:
            return True
        return live.at_work and _beside_rounds(live) == self.beside_rounds and time.monotonic() < self.until


def _beside_rounds(live: Live) -> tuple[Any, ...]:
    """What changes when something else than a round happens to a run."""
    return live.phase, live.request, live.last_step, live.waiting, live.overdue, live.clients


@dataclass(frozen=True)
class NumberedRequest:
    """A request with its place in the run's record: ids may be telling, so addresses have numbers."""

    number: int
    record: RequestRecord
    state: str
    """Where it stands, in one of the words of `RequestStatus.state`, or `failed`."""

    @property
    def finished(self) -> str:
        """When it was settled, also by a refusal."""
        return self.record.steps[-1].time if self.state in SETTLED else ""


@dataclass(frozen=True)
class RequestLine:
    """A request as lists show it, of whichever run; its number is None while it waits in an inbox."""

    run: str
    name: str
    number: int | None
    request: str
    state: str
    level: str | None
    deadline: str
    overdue: bool
    """Not settled by its deadline, or settled after it."""
    received: str
    finished: str
    clients: tuple[str, ...]
    method: str
    filed_by: str

    @staticmethod
    def of(run: RunAtDesk, row: RequestStatus | PendingRequest, **ours: Any) -> RequestLine:
        """The line of a request in the ledger, or of one in the inbox, of which less is known."""
        nothing = {"number": None, "level": None, "finished": "", "method": "", "filed_by": ""}
        theirs = {field.name: getattr(row, field.name) for field in fields(RequestLine) if hasattr(row, field.name)}
        return RequestLine(**nothing | theirs | {"run": run.key, "name": run.name} | ours)

    @property
    def settled(self) -> bool:
        """Whether nothing more happens to it."""
        return self.state in SETTLED

    def urgency(self) -> tuple[Any, ...]:
        """What a list is ordered by."""
        latest_first = tuple(-ord(letter) for letter in self.finished or self.received)
        return (self.settled, () if not self.settled else latest_first, self.deadline, self.name, self.request)


def check_terms(who: Token, spec: Spec, terms: TermsGiven) -> None:
    """Requesters ask for clients or records, and for more protection than is usual here, never for less."""
    others = sorted(set(terms) - set(TERMS_OF_REQUESTERS))
    if others:
        raise NotAllowedError(
            f"your roles ({', '.join(who.roles)}) allow {', '.join(TERMS_OF_REQUESTERS)}; an operator sets "
            f"{', '.join(others)}"
        )
    for name, usual in (("epsilon", spec.privacy.epsilon), ("delta", spec.privacy.delta)):
        value = terms.get(name)
        if isinstance(value, float) and value > usual:
            raise NotAllowedError(f"{name} {value:g} protects less than the {usual:g} of this run: ask an operator")
    if terms.get("level") == "none":
        raise NotAllowedError("level none guarantees nothing: ask an operator")


def check_share(run: RunAtDesk, clients: Sequence[str]) -> None:
    """Clients that wait take no part in rounds: before an approval, requesters keep at most half of them out."""
    with run.run.view() as view:
        lacking = unapproved(view.reader) if approvals_needed(view.reader) else None
        held = {
            name
            for row in view.requests
            if row.waits and (lacking is None or row.request in lacking)
            for name in row.clients
        }
        there = {view.clients[index].name for index in view.active} | held
        pending = pending_requests(view.reader, current_time())
        posted = {name for row in pending if row.status == POSTED for name in row.clients}
        held = (held | posted | set(view.names_now(list(clients)))) & there
    if 2 * len(held) > len(there):
        raise InputError(
            "this request would leave less than half of the clients in training before anyone has agreed to it: "
            "have earlier requests approved first, or ask an operator to file it"
        )


def check_id_is_own(who: Token, run: RunAtDesk, request: str) -> None:
    """A requester must not learn that an id is taken by another requester, nor change that request."""
    for record in run.run.request_records():
        if record.status.request == request and not is_own(who, record.status.filed_by):
            raise InputError(f"request {request} cannot be filed: use another id")


def tells_of_others(who: Token, run: RunAtDesk, sentence: str, given: Collection[str]) -> bool:
    """Whether a sentence names a client or a request that this person did not name and did not file."""
    with run.run.reader() as reader:
        names = {profile.name for profile in reader.clients()}
    statuses = [record.status for record in run.run.request_records()]
    names |= {status.request for status in statuses if not is_own(who, status.filed_by)}
    return any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", sentence) for name in names - set(given))


def is_own(who: Token, filed_by: str) -> bool:
    """Whether this person filed it."""
    return same_person(who.name) == same_person(filed_by)
