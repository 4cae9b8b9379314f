"""What can be done at the desk: the runs, their requests, plans, decisions and long work.

Pages and JSON API are thin: they find out who asks and call this. Every right is checked here, once.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import re
import secrets
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sifu.api import PendingRequest, Plan, RequestRecord, RequestStatus, Run, RunStatus, find_runs
from sifu.choices import TermsGiven
from sifu.console.jobs import Job, Jobs
from sifu.console.live import Live, LiveView
from sifu.console.tokens import TERMS_OF_REQUESTERS, Right, Token
from sifu.core.spec import Spec
from sifu.errors import InputError, RunBusyError, SifuError
from sifu.requests.approvals import POSTED, approvals_needed, pending_requests, unapproved
from sifu.run.clients_and_engine import carried_out_elsewhere
from sifu.store.clock import same_person
from sifu.store.files import private_folder, write_atomically
from sifu.store.inbox import letters

FOUND_AGAIN_EVERY = 3.0
"""Seconds between two looks for new run folders."""
KEPT_LONGER = 20.0
SETTLED = ("done", "refused", "withdrawn")
VERIFICATIONS = "verifications.json"
log = logging.getLogger(__name__)


class NotAllowedError(SifuError):
    """The visitor's roles do not allow this."""

    exit_code = 2


class UnknownError(SifuError):
    """Something was asked for that is not there, or not for them."""

    exit_code = 2


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


class Desk:
    """Everything that the console shows and does."""

    def __init__(self, folders: Sequence[Path], state: Path, data_folder: Path | None = None) -> None:
        self.folders, self.state, self._data = tuple(folders), state, data_folder
        private_folder(state, parents=True)
        self.jobs = Jobs(state, self._job_ended)
        self.failures: list[Job] = []
        """Requests whose carrying out failed, for the webhooks."""
        self._runs: dict[str, RunAtDesk] = {}
        self._looked = -FOUND_AGAIN_EVERY
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def every_run(self) -> dict[str, RunAtDesk]:
        """All runs, by key; folders are looked through again from time to time."""
        with self._lock:
            if time.monotonic() - self._looked >= FOUND_AGAIN_EVERY:
                self._looked = time.monotonic()
                here = {run.folder: run for run in self._runs.values()}
                runs: list[RunAtDesk] = []
                for folder in find_runs(*self.folders):
                    try:
                        runs.append(here.get(folder) or RunAtDesk(folder))
                    except SifuError as error:  # a run of another version, one being made, or one with another key
                        if str(error) not in self._told:
                            log.warning("%s is not shown: %s", folder, error)
                        self._told.add(str(error))
                self._runs = {run.key: run for run in runs}
            return dict(self._runs)

    def runs(self, who: Token) -> list[RunAtDesk]:
        """The runs that a visitor may see."""
        self.demand(who, "see own")
        return sorted(self.every_run().values(), key=lambda run: run.name)

    def find(self, who: Token, key: str) -> RunAtDesk:
        """A run by its key."""
        self.demand(who, "see own")
        run = self.every_run().get(key)
        if run is None:
            raise UnknownError("there is no such run here")
        return run

    def live(self, who: Token, key: str) -> Live:
        """What a run does now."""
        self.demand(who, "see")
        return self.find(who, key).live()

    def status(self, who: Token, key: str) -> RunStatus:
        """Everything that is known of a run."""
        self.demand(who, "see")
        run = self.find(who, key)
        status: RunStatus = run.remembered("status", run.run.status)
        return status

    def requests(self, who: Token, key: str) -> list[NumberedRequest]:
        """The requests of a run that a visitor may see, in the order they were received."""
        run = self.find(who, key)
        records: list[RequestRecord] = run.remembered(("requests", _today()), run.run.request_records)
        return [
            NumberedRequest(number, record, self._state(key, record.status))
            for number, record in enumerate(records, start=1)
            if who.may("see") or _is_own(who, record.status.filed_by)
        ]

    def _state(self, key: str, status: RequestStatus) -> str:
        """A request's state; what this console started counts before it is in the ledger."""
        if status.state in SETTLED:
            return status.state
        jobs = [job for job in self.jobs.of_run(key) if job.kind == "carry out" and job.request == status.request]
        states: dict[str, str] = {"running": "running", "failed": "failed"}
        return states.get(jobs[0].state, status.state) if jobs else status.state

    def request(self, who: Token, key: str, number: int) -> NumberedRequest:
        """One request."""
        for numbered in self.requests(who, key):
            if numbered.number == number:
                return numbered
        raise UnknownError("there is no such request here")

    def posted(self, who: Token, key: str) -> list[PendingRequest]:
        """Requests that wait in the inbox of a run and are not in its ledger yet."""
        run = self.find(who, key)
        if not letters(run.folder):
            return []
        with run.lock, run.run.reader() as reader:
            waiting = [row for row in pending_requests(reader, _now()) if row.status == POSTED]
        if who.may("see"):
            return waiting
        own = {letter.id for letter in letters(run.folder) if _is_own(who, str((letter.content or {}).get("actor")))}
        return [row for row in waiting if row.request in own]

    def lines(self, who: Token, key: str | None = None) -> list[RequestLine]:
        """The requests of all runs that a person sees, or of one run: what is overdue first, then by deadline; what is
        settled comes last, the latest first."""
        lines: list[RequestLine] = []
        for run in self.runs(who) if key is None else [self.find(who, key)]:
            with suppress(SifuError) if key is None else nullcontext():  # the list of runs names what cannot be read
                of_run = [
                    RequestLine.of(run, row.record.status, state=row.state, number=row.number, finished=row.finished)
                    for row in self.requests(who, run.key)
                ]
                lines += of_run + [RequestLine.of(run, row, state="received") for row in self.posted(who, run.key)]
        return sorted(lines, key=RequestLine.urgency)

    def plan(self, who: Token, key: str, clients: Sequence[str], terms: TermsGiven) -> Plan:
        """What a request would do; where its method is left to `auto`, with every way side by side."""
        self.demand(who, "see")
        run = self.find(who, key)
        plan: Plan = run.remembered(
            ("plan", tuple(clients), json.dumps(terms, sort_keys=True)), lambda: run.run.plan(clients, **terms)
        )
        return plan

    def plan_of(self, who: Token, key: str, number: int) -> Plan:
        """What a waiting request would do, planned from exactly the terms that it was filed with."""
        self.demand(who, "see")
        run, request = self.find(who, key), self.request(who, key, number).record.status.request
        plan: Plan = run.remembered(("plan of", request), lambda: run.run.plan_of(request))
        return plan

    def file(
        self, who: Token, key: str, clients: Sequence[str], request: str | None, deadline_days: int, terms: TermsGiven
    ) -> str:
        """Put a request into the ledger or the inbox of its run; the same id with the same terms changes nothing."""
        self.demand(who, "file")
        run = self.find(who, key)
        name = request or f"r-{secrets.token_hex(4)}"
        if not who.may("set terms"):
            _check_terms(who, run.run.spec, terms)
            self._check_share(run, clients)
        if not who.may("see"):
            self._check_id_is_own(who, run, name)
        with run.lock:
            try:
                filed = run.run.request(list(clients), name, deadline_days=deadline_days, actor=who.name, **terms)
            except InputError as error:
                if who.may("see") or not self._tells_of_others(who, run, str(error), {*clients, name}):
                    raise
                raise InputError(
                    "this request cannot be filed: check the names of the clients, which may be unknown, forgotten "
                    "already or in a request that waits, or ask the operator"
                ) from error
            run.written()
        return filed

    def _tells_of_others(self, who: Token, run: RunAtDesk, sentence: str, given: Collection[str]) -> bool:
        """Whether a sentence names a client or a request that this person did not name and did not file."""
        with run.run.reader() as reader:
            names = {profile.name for profile in reader.clients()} | {row.request for row in reader.requests()}
        names -= {row.record.status.request for row in self.requests(who, run.key)}
        return any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", sentence) for name in names - set(given))

    def _check_share(self, run: RunAtDesk, clients: Sequence[str]) -> None:
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
            posted = {
                name for row in pending_requests(view.reader, _now()) if row.status == POSTED for name in row.clients
            }
            held = (held | posted | set(view.names_now(list(clients)))) & there
        if 2 * len(held) > len(there):
            raise InputError(
                "this request would leave less than half of the clients in training before anyone has agreed to it: "
                "have earlier requests approved first, or ask an operator to file it"
            )

    def _check_id_is_own(self, who: Token, run: RunAtDesk, request: str) -> None:
        """A requester must not learn that an id is taken by another requester, nor change that request."""
        for record in run.run.request_records():
            if record.status.request == request and not _is_own(who, record.status.filed_by):
                raise InputError(f"request {request} cannot be filed: use another id")

    def decide(self, who: Token, key: str, request: str, decision: str, reason: str, terms: str = "") -> str:
        """Approve, refuse, verify or withdraw a request; returns what became of the decision.

        An approval names the digest of the terms that the approver saw.
        """
        run = self.find(who, key)
        rights: dict[str, Right] = {"approved": "approve", "refused": "refuse", "verified": "refuse"}
        if decision == "withdrawn":
            if not who.may("withdraw"):
                self.demand(who, "withdraw own")
                own = {numbered.record.status.request for numbered in self.requests(who, key)}
                own |= {row.request for row in self.posted(who, key)}
                if request not in own:
                    raise UnknownError("there is no such request here")
        elif decision in rights:
            self.demand(who, rights[decision])
        else:
            raise InputError(f"a decision is approved, verified, refused or withdrawn, found {decision[:40]!r}")
        if decision == "approved" and not terms:
            raise InputError("an approval names the terms it is about: send terms, the terms_digest of the request")
        with run.lock:
            outcome = run.run.decide(request, decision, reason, who.name, terms or None)
            run.written()
        return outcome

    def carry_out(self, who: Token, key: str, request: str) -> Job:
        """Carry a request out in a new process."""
        self.demand(who, "carry out")
        run = self.find(who, key)
        record = next((row for row in self.requests(who, key) if row.record.status.request == request), None)
        if record is None:
            raise UnknownError("there is no such request here")
        status = record.record.status
        if record.state == "running":
            raise RunBusyError(f"request {request} is being carried out already")
        if status.status not in ("received", "verified", "planned", "running"):
            raise InputError(f"request {request} is {status.status}: there is nothing to carry out")
        if status.approvals_missing:
            raise InputError(f"request {request} needs {status.approvals_missing} more to approve it")
        elsewhere = carried_out_elsewhere(run.run.spec)
        if elsewhere:
            raise InputError(elsewhere)
        arguments = ["forget", str(run.folder), "--request", request]
        arguments += ["--data", str(self._data)] if self._data else []
        return self.jobs.start("carry out", key, arguments, who.name, request)

    def verify(self, who: Token, key: str) -> Job:
        """Verify a run in a new process."""
        self.demand(who, "examine")
        run = self.find(who, key)
        return self.jobs.start("verify", key, ["verify", str(run.folder)], who.name)

    def write_report(self, who: Token, key: str) -> Job:
        """Write the report of a run in a new process."""
        self.demand(who, "examine")
        run = self.find(who, key)
        return self.jobs.start("report", key, ["report", str(run.folder)], who.name)

    def report(self, who: Token, key: str) -> bytes:
        """The page of the report, as it was last written."""
        self.demand(who, "examine")
        path = self.find(who, key).folder / "report" / "index.html"
        try:
            return path.read_bytes()
        except OSError as error:
            raise UnknownError("no report was written yet") from error

    def evidence(self, who: Token, key: str, number: int) -> tuple[str, bytes]:
        """The name and the bytes of the evidence of a request; the run is verified for it."""
        from sifu.report.evidence import evidence_bytes

        self.demand(who, "examine")
        request = self.request(who, key, number).record.status.request
        return f"evidence-{request}.zip", evidence_bytes(self.find(who, key).folder, request)

    def certificate(self, who: Token, key: str, number: int) -> dict[str, Any]:
        """The public certificate of a request."""
        request = self.request(who, key, number).record.status.request
        return self.find(who, key).run.certificate(request).to_mapping()

    def trail(
        self, who: Token, key: str | None, kind: str, page: int, size: int = 100
    ) -> tuple[list[dict[str, Any]], int]:
        """A page of the ledger of a run, or of all, the latest first: what happened when by whom, and the number of
        events; `kind` leaves only events whose kind begins like it."""
        self.demand(who, "examine")
        events: list[dict[str, Any]] = []
        count = 0
        for run in self.runs(who) if key is None else [self.find(who, key)]:
            with suppress(SifuError) if key is None else nullcontext(), run.run.reader() as reader:
                of_kind = (len(kind), kind)
                ((number,),) = reader.query("SELECT COUNT(*) FROM events WHERE substr(kind, 1, ?) = ?", of_kind)
                rows = reader.query(
                    "SELECT seq, time, kind, payload, hash, signature IS NOT NULL FROM events "
                    "WHERE substr(kind, 1, ?) = ? ORDER BY seq DESC LIMIT ?",
                    (*of_kind, size * page),
                )
                numbers = {row.record.status.request: row.number for row in self.requests(who, run.key)}
                count += number
                events += [_event(run, numbers, *row) for row in rows]
        events.sort(key=lambda event: (event["time"], event["seq"]), reverse=True)
        return events[size * (page - 1) : size * page], count

    def last_verification(self, who: Token, key: str) -> dict[str, Any] | None:
        """What the last verification found, if this console ever verified the run."""
        self.demand(who, "see")
        return self.verifications().get(key)

    def verifications(self) -> dict[str, dict[str, Any]]:
        """The last verification of each run, by key."""
        try:
            content = json.loads((self.state / VERIFICATIONS).read_bytes())
            return content if isinstance(content, dict) else {}
        except (OSError, ValueError):
            return {}

    def _job_ended(self, job: Job, answer: dict[str, Any]) -> None:
        if job.kind == "carry out" and job.state == "failed":
            self.failures.append(job)
        if job.kind == "verify" and "holds" in answer:
            verification = {
                "time": _now().strftime("%Y-%m-%dT%H:%M:%SZ"),
                "holds": answer["holds"] is True,
                "checked": answer.get("checked", []),
                "notes": answer.get("notes", []),
                "problems": answer.get("problems", [])[:50],
            }
            with self._lock:
                content = self.verifications() | {job.run: verification}
                write_atomically(self.state / VERIFICATIONS, json.dumps(content, indent=1).encode())

    def demand(self, who: Token, right: Right) -> None:
        """Refuse what a person's roles do not allow."""
        if not who.may(right):
            raise NotAllowedError(f"your roles ({', '.join(who.roles)}) do not allow that")


def _check_terms(who: Token, spec: Spec, terms: TermsGiven) -> None:
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


def _event(
    run: RunAtDesk, numbers: dict[str, int], seq: int, time_: str, kind: str, payload: str, digest: bytes, signed: int
) -> dict[str, Any]:
    content = json.loads(payload)
    request = content.get("request", "")
    name = request.get("request", "") if isinstance(request, dict) else str(request)
    return {
        "run": run,
        "number": numbers.get(name),
        "seq": seq,
        "time": time_,
        "kind": kind,
        "request": name,
        "actor": str(content.get("actor", "")),
        "reason": str(content.get("reason", "")),
        "hash": bytes(digest).hex(),
        "signed": bool(signed),
    }


def _is_own(who: Token, filed_by: str) -> bool:
    return same_person(who.name) == same_person(filed_by)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _today() -> str:
    return _now().date().isoformat()
