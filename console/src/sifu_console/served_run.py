"""One run of the console and the operations on it; each operation checks the visitor's rights."""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from sifu.api import Certificate, Plan, Run, RunStatus
from sifu.api.requests import POSTED, Request, pending_requests
from sifu.api.submitted import check_share, content_of, examine, refuse, submitted
from sifu.choices import TermsGiven
from sifu.core.operator_words import approvals_words
from sifu.core.record_commitments import new_nonces
from sifu.core.request_terms import RequestTerms, check_request_id
from sifu.core.spec import Spec
from sifu.errors import IdInUseError, InputError, RunBusyError, SifuError
from sifu.requests.deadlines import check_deadline
from sifu.requests.filing import usual_terms
from sifu.run.clients_and_engine import executed_elsewhere
from sifu.store.actors import same_address
from sifu.store.inbox import SUBMITTED, discard, messages, post
from sifu.store.last_failure import failure_stamp
from sifu.store.times import current_time, utc_now
from sifu_console.jobs import Job, Jobs
from sifu_console.live import Live, LiveView
from sifu_console.request_lines import NumberedRequest, RequestLine
from sifu_console.tokens import TERMS_OF_REQUESTERS, NotAllowedError, Right, Token

T = TypeVar("T")
REPORT = Path("report", "index.html")
KEPT_LONGER = 20.0
"""Time for which a cached result stays valid while rounds are written, in multiples of its computing time."""
MOST_REMEMBERED = 64
"""Maximum number of cached results."""
RECEIVED = "received; it will be examined"
"""Answer to every request from a person who may not see the run; it must not depend on the run's content."""


class UnknownError(SifuError):
    """Error for an object that does not exist or that the visitor may not see."""


class ServedRun:
    """One run and the operations on it: its requests, plans, decisions and long jobs.

    All rights are checked in this class. Derived values are cached and shared. The run's progress, its requests and the
    names of its clients have a separate lock, so that they never wait for a slow plan.
    """

    def __init__(self, folder: Path, jobs: Jobs) -> None:
        self.folder, self.jobs = folder, jobs
        self.key = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
        self.name = folder.resolve().name
        self.lock = threading.RLock()
        self.lists_lock = threading.Lock()
        self._live_lock = threading.Lock()
        self._live_view = LiveView(folder)
        self.run = Run(folder)
        self._memory: dict[tuple[Any, ...], _Remembered] = {}
        self._filed: dict[tuple[str, str], tuple[dict[str, Any], dict[str, str]]] = {}
        """Content and nonces of open requests, by the person who filed them and the id. The run stores no nonces."""

    def live(self) -> Live:
        """Return the current state of the run."""
        with self._live_lock:
            return self._live_view.read()

    def remembered(self, what: tuple[Any, ...], work: Callable[[], T], lock: AbstractContextManager[Any]) -> T:
        """Return a result from the cache, or compute and cache it.

        A result is valid as long as nothing is written to the run. While only rounds are written, it also stays valid
        for `KEPT_LONGER` times its computing time, which limits the load of many visitors on a run in progress. All
        threads that wait for `lock` share one result.

        Args:
            what: Key of the result in the cache.
            work: Function that computes the result.
            lock: Lock held while the result is computed.
        """
        kept = self._kept(what)
        if kept is None:
            with lock:
                kept = self._kept(what)
                if kept is None:
                    memory, live, started = self._memory, self.live(), time.monotonic()
                    result = work()
                    now = time.monotonic()
                    if len(memory) >= MOST_REMEMBERED:
                        memory.clear()
                    kept = memory[what] = _Remembered(result, live, now + KEPT_LONGER * (now - started))
        remembered: T = kept.result
        return remembered

    def _kept(self, what: tuple[Any, ...]) -> _Remembered | None:
        """Return the cached result, or None if it is missing or no longer valid."""
        kept = self._memory.get(what)
        return kept if kept is not None and kept.is_valid(self.live()) else None

    def written(self) -> None:
        """Invalidate everything read from the run so far, because this console wrote to it."""
        with self._live_lock:
            self._live_view.look_again()
        self._memory = {}

    def status(self, who: Token) -> RunStatus:
        """Return the full status of the run."""
        who.demand("see")
        return self.remembered(("status",), self.run.status, self.lock)

    def requests(self, who: Token) -> list[NumberedRequest]:
        """Return the requests that a visitor may see, in the order of their receipt."""
        self.examine(who)
        what = ("requests", utc_now()[:10], failure_stamp(self.folder))
        records = self.remembered(what, self.run.request_records, self.lists_lock)
        return [
            NumberedRequest(number, record if who.may("see") else _for_requester(record), self._state(record))
            for number, record in enumerate(records, start=1)
            if who.may("see") or is_own(who, record.filed_by)
        ]

    def _state(self, record: Request) -> str:
        """Return the state of a request; a running or failed job of this console takes precedence over the ledger."""
        if record.settled:
            return record.status
        jobs = [job for job in self.jobs.of_run(self.key) if job.kind == "carry out" and job.request == record.request]
        states: dict[str, str] = {"running": "running", "failed": "failed"}
        state = "failed" if record.failure else record.status
        return states.get(jobs[0].state, state) if jobs else state

    def request(self, who: Token, number: int | str) -> NumberedRequest:
        """Return one request, by its number or its id."""
        for numbered in self.requests(who):
            if number in (numbered.number, numbered.record.request):
                return numbered
        raise UnknownError("there is no such request here")

    def posted(self, who: Token) -> list[Request]:
        """Return the requests that wait in the run's inbox and are not in its ledger yet."""
        if not messages(self.folder):
            return []
        with self.run.reader() as reader:
            waiting = [row for row in pending_requests(reader, current_time()) if row.status == POSTED]
        return [row for row in waiting if who.may("see") or is_own(who, row.filed_by)]

    def lines(self, who: Token) -> list[RequestLine]:
        """Return all requests, in the ledger and in the inbox, as rows of the lists, the most urgent first.

        The nonces of settled requests are dropped.
        """
        named = {"run": self.key, "name": self.name}
        recorded = [
            RequestLine.of(row.record, **named, state=row.state, number=row.number, finished=row.finished)
            for row in self.requests(who)
        ]
        posted = [RequestLine.of(row, **named, state="received") for row in self.posted(who)]
        lines = sorted(recorded + posted + self.refused(who), key=RequestLine.urgency)
        for line in lines:
            if line.settled:
                self._filed.pop((line.filed_by, line.request), None)
        return lines

    def refused(self, who: Token) -> list[RequestLine]:
        """Return the requests that were refused or withdrawn before they were in the ledger."""
        with self.run.reader() as reader:
            rows = reader.query("SELECT time, payload FROM events WHERE kind = 'letter refused'")
        refused = []
        for when, payload in rows:
            message = json.loads(payload)
            content = message["content"] or {}
            clients, filed_by = content.get("clients"), str(content.get("actor"))
            if message["kind"] not in (SUBMITTED, "request") or not isinstance(clients, list):
                continue
            if not (who.may("see") or is_own(who, filed_by)):
                continue
            nothing: dict[str, Any] = {"number": None, "level": None, "overdue": False, "method": ""}
            said: dict[str, Any] = {"request": str(content.get("request", message["letter"])), "state": "refused"}
            said |= {"clients": tuple(map(str, clients)), "filed_by": filed_by}
            times = {"received": when, "finished": when, "deadline": when}
            refused.append(RequestLine(self.key, self.name, **nothing | said | times))
        return refused

    def plan(self, who: Token, clients: Sequence[str], terms: TermsGiven) -> Plan:
        """Return the plan of a request; with the method `auto`, it compares all methods."""
        who.demand("see")
        what = ("plan", tuple(clients), json.dumps(terms, sort_keys=True))
        return self.remembered(what, lambda: self.run.plan(clients, **terms), self.lock)

    def plan_of(self, who: Token, request: str) -> Plan:
        """Return the plan of a waiting request, made from the terms it was filed with."""
        who.demand("see")
        return self.remembered(("plan of", request), lambda: self.run.plan_of(request), self.lock)

    def file(
        self,
        who: Token,
        clients: Sequence[str],
        request: str | None,
        deadline_days: int,
        terms: TermsGiven,
    ) -> tuple[str, dict[str, str]]:
        """Put a request into the ledger or the inbox of its run; the same id with the same terms changes nothing.

        Args:
            who: Token of the person who files the request.
            clients: Names of the clients to forget, or of the client whose records are to be forgotten.
            request: Id of the request, or None for a random id.
            deadline_days: Days until the request is due.
            terms: Terms that differ from the run's spec.

        Returns:
            The id of the request, and the nonces of the commitments in its public certificate by the identity of each
            record. The person who filed the request gets them again as long as it is open and this process runs.
        """
        who.demand("file")
        name = check_request_id(request or f"r-{secrets.token_hex(4)}")
        if not who.may("set terms"):
            check_terms(who, self.run.spec, terms)
        wish = {"clients": list(clients), "deadline_days": deadline_days, "terms": dict(terms)}
        with self.lock:  # two concurrent requests must not both pass `check_share`
            known = name in {line.request for line in self.lines(who)}
            filed, nonces = self._filed.get((who.name, name), (None, {}))
            if not (known and filed == wish):
                nonces = new_nonces(terms.get("records") or ())
                if known and not who.may("see"):
                    raise IdInUseError(f"you filed {name} already, with other terms or long ago: use another id")
            if who.may("see"):
                if not who.may("set terms"):
                    check_share(self.run, clients)
                self.run.request(
                    list(clients), name, deadline_days=deadline_days, actor=who.name, nonces=nonces, **terms
                )
                nonces = self.run.committed(name, nonces)
            elif not known:
                self._submit(who, name, wish, nonces)
            self._filed[who.name, name] = wish, nonces
            self.written()
        return name, nonces

    def _submit(self, who: Token, name: str, wish: dict[str, Any], nonces: dict[str, str]) -> None:
        """Post a request to the inbox for a person who may not see the run."""
        # Only the wording of a request is checked here. Its clients and records are checked when it is examined.
        check_deadline(wish["deadline_days"])
        given = {key: value for key, value in wish["terms"].items() if key != "records"}
        RequestTerms.from_mapping(usual_terms(self.run.spec, wish["clients"]).to_mapping() | given)
        content = wish | {"request": name, "actor": who.name, "nonces": nonces}
        post(self.folder, SUBMITTED, f"s-{secrets.token_hex(8)}", content)

    def examine(self, who: Token) -> None:
        """File the requests submitted by people who may not see the run, or record why they are refused.

        Requests are examined when a person with the right to refuse or execute requests reads them.
        """
        if (who.may("refuse") or who.may("carry out")) and submitted(self.folder):
            with self.lock:
                examine(self.run, who.name)
                self.written()

    def identities(self, who: Token, request: str) -> tuple[str, ...]:
        """Return the identities of the records that a waiting request names."""
        who.demand("see")
        return self.remembered(("identities", request), lambda: self.run.record_identities(request), self.lock)

    def decide(self, who: Token, request: str, decision: str, reason: str, terms: str = "") -> str:
        """Approve, refuse, verify or withdraw a request.

        Args:
            who: Token of the person who decides.
            request: Id of the request.
            decision: `approved`, `refused`, `verified` or `withdrawn`.
            reason: Reason for the decision, recorded in the ledger.
            terms: Digest of the terms that the approver saw, required for an approval.

        Returns:
            `recorded`, `unchanged`, or `posted` if the decision waits in the inbox.
        """
        rights: dict[str, Right] = {"approved": "approve", "refused": "refuse", "verified": "refuse"}
        if decision == "withdrawn":
            if not who.may("withdraw"):
                who.demand("withdraw own")
                if request not in {line.request for line in self.lines(who)}:
                    raise UnknownError("there is no such request here")
                for message in submitted(self.folder):
                    if message.request == request and is_own(who, content_of(message)["actor"]):
                        if not refuse(self.run, message, f"withdrawn by {who.name}: {reason}"):
                            raise RunBusyError("the run is in use: withdraw the request again in a moment")
                        discard(message)
                        self.written()
                        return "recorded"
        elif decision in rights:
            who.demand(rights[decision])
        else:
            raise InputError(f"a decision must be approved, verified, refused or withdrawn, found {decision[:40]!r}")
        if decision == "approved" and not terms:
            raise InputError(
                "an approval must name the approved terms: send terms, with the terms_digest of the request"
            )
        with self.lock:
            outcome = self.run.decide(request, decision, reason, who.name, terms or None)
            self.written()
        return outcome

    def execute(self, who: Token, request: str) -> Job:
        """Execute a request in a new process."""
        who.demand("carry out")
        numbered = self.request(who, request)
        status = numbered.record
        if numbered.state == "running":
            raise RunBusyError(f"request {request} is already in execution")
        if status.settled:
            raise InputError(f"request {request} is {status.status}: it cannot be executed")
        if status.approvals_missing:
            raise InputError(f"request {request} needs {approvals_words(status.approvals_missing)}")
        elsewhere = executed_elsewhere(self.run.spec)
        if elsewhere:
            raise InputError(elsewhere)
        arguments = ["forget", str(self.folder), "--request", request]
        return self.jobs.start("carry out", self.key, arguments, who.name, request)

    def start(self, who: Token, kind: Literal["verify", "report"]) -> Job:
        """Verify the run, or write its report, in a new process."""
        who.demand("examine")
        return self.jobs.start(kind, self.key, [kind, str(self.folder)], who.name)

    def report(self, who: Token) -> bytes:
        """Return the HTML page of the latest report."""
        who.demand("examine")
        try:
            return (self.folder / REPORT).read_bytes()
        except OSError as error:
            raise UnknownError("no report was written yet") from error

    def bundle(self, who: Token, number: int) -> tuple[str, bytes]:
        """Return the file name and the bytes of a request's bundle, after verifying the run."""
        from sifu.verify.bundle import bundle_bytes

        who.demand("examine")
        request = self.request(who, number).record.request
        return f"{request}.bundle.json", bundle_bytes(self.folder, request)

    def certificate(self, who: Token, number: int) -> Certificate:
        """Return the public certificate of a request."""
        return self.run.certificate(self.request(who, number).record.request)

    def trail(self, who: Token, kind: str, most: int) -> tuple[list[dict[str, Any]], int]:
        """Return the latest events of the ledger and the total number of events.

        Args:
            who: Token of the visitor.
            kind: Prefix of the event kinds to include, or all if empty.
            most: Maximum number of events to return.
        """
        who.demand("examine")
        of_kind = (len(kind), kind)
        with self.run.reader() as reader:
            ((count,),) = reader.query("SELECT COUNT(*) FROM events WHERE substr(kind, 1, ?) = ?", of_kind)
            rows = reader.query(
                "SELECT seq, time, kind, payload, hash, signature IS NOT NULL FROM events "
                "WHERE substr(kind, 1, ?) = ? ORDER BY seq DESC LIMIT ?",
                (*of_kind, most),
            )
        numbers = {row.record.request: row.number for row in self.requests(who)}
        events = []
        for seq, when, event, payload, digest, signed in rows:
            content = json.loads(payload)
            request = content.get("request", "")
            name = request.get("request", "") if isinstance(request, dict) else str(request)
            row = {"run": self, "number": numbers.get(name), "seq": seq, "time": when, "kind": event, "request": name}
            row |= {key: str(content.get(key, "")) for key in ("actor", "reason")}
            events.append(row | {"hash": bytes(digest).hex(), "signed": bool(signed)})
        return events, count

    def verification(self, who: Token) -> dict[str, Any] | None:
        """Return the result of the last verification by this console, or None."""
        who.demand("see")
        return self.jobs.verifications().get(self.key)


def _for_requester(record: Request) -> Request:
    """Return a request without the error that interrupted it, which may name folders and other clients."""
    return replace(record, failure="")


def check_terms(who: Token, spec: Spec, terms: TermsGiven) -> None:
    """Refuse terms that only operators may set, and budgets weaker than the run's own."""
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


@dataclass(frozen=True)
class _Remembered:
    """A cached result with the state it was computed from; `until` limits its validity while rounds are written."""

    result: Any
    state: Live
    until: float

    def is_valid(self, live: Live) -> bool:
        """Return whether nothing was written to the run since, or only rounds before the time `until`."""
        if live.events == self.state.events:
            return True
        only_rounds = _state_except_rounds(live) == _state_except_rounds(self.state)
        return live.at_work and only_rounds and time.monotonic() < self.until


def _state_except_rounds(live: Live) -> tuple[Any, ...]:
    """Return the parts of a run's state that change only at other events than rounds."""
    return live.phase, live.request, live.last_step, live.waiting, live.overdue, live.clients


def is_own(who: Token, filed_by: str) -> bool:
    """Return whether this person filed the request."""
    return same_address(who.name, filed_by)
