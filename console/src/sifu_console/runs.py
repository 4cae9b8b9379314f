"""The runs of the console and the operations on them; each operation checks the visitor's rights."""

from __future__ import annotations

import hashlib
import json
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from sifu.api import Certificate, Plan, Run, RunStatus, find_runs, pending_requests
from sifu.api.progress import Progress
from sifu.api.requests import POSTED, SETTLED, Request
from sifu.api.submitted import check_share, examine, is_filer, submit, submitted, withdraw
from sifu.choices import TermsGiven
from sifu.core.operator_words import approvals_words
from sifu.core.record_commitments import new_nonces
from sifu.core.request_terms import check_request_id
from sifu.errors import IdInUseError, InputError, RunBusyError, SifuError
from sifu.store.actors import same_address
from sifu.store.files import private_folder
from sifu.store.times import utc_now
from sifu_console.jobs import Job, Jobs
from sifu_console.tokens import TERMS_OF_REQUESTERS, NotAllowedError, Right, Token

T = TypeVar("T")
REPORT = Path("report", "index.html")
RESCAN_SECONDS = 3.0
"""Interval between two searches for new run folders, in seconds."""
FRESH_FOR, KEPT_LONGER = 0.9, 20.0
"""While a run is written to, results stay valid for some seconds, or for a multiple of their computing time."""
MOST_REMEMBERED = 64
"""Maximum number of cached results."""
RECEIVED = "received; it will be examined"
"""Answer to every request from a person who may not see the run; it must not depend on the run's content."""


class UnknownError(SifuError):
    """Error for an object that does not exist or that the visitor may not see."""


class Line(NamedTuple):
    """A request in a list, with its run; `state` is its status, or `failed`, or `running` as a job of this console."""

    run: ServedRun
    request: Request
    state: str

    @property
    def settled(self) -> bool:
        """True if the request is in a final state."""
        return self.state in SETTLED

    @property
    def finished(self) -> str:
        """Time at which the request was settled, by execution or refusal, or an empty string if it is open."""
        steps = self.request.steps
        return (steps[-1].time if steps else self.request.received) if self.settled else ""

    def to_mapping(self) -> dict[str, Any]:
        """Return the request as plain values, ready for JSON; the key of its run replaces its folder."""
        ours = {"run": self.run.key, "name": self.run.name, "state": self.state, "finished": self.finished}
        return self.request.to_mapping() | ours

    def urgency(self) -> tuple[Any, ...]:
        """Return the sort key of the lists: open requests by deadline, then settled requests, latest first."""
        latest_first = tuple(-ord(letter) for letter in self.finished)
        return self.settled, latest_first, self.request.deadline, self.run.name, self.request.request


class ServedRun:
    """One run and the operations on it: its requests, plans, decisions and long jobs.

    All rights are checked in this class. Derived values are cached and shared; changes hold `lock`.
    """

    def __init__(self, folder: Path, jobs: Jobs) -> None:
        self.folder, self.jobs = folder, jobs
        self.key = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
        self.name = folder.resolve().name
        self.lock = threading.RLock()
        self._locks: dict[str, threading.Lock] = {}
        self._run: Run | None = None
        self._memory: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], float]] = {}
        """Results, each with the state of the run it was computed from, and until when it stays valid at least."""
        self._filed: dict[tuple[str, str], tuple[dict[str, Any], dict[str, str]]] = {}
        """Content and nonces of open requests, by the person who filed them and the id. The run stores no nonces."""

    @property
    def run(self) -> Run:
        """The run; a `SifuError` says why it cannot be read."""
        self._run = self._run or Run(self.folder)
        return self._run

    def progress(self) -> Progress:
        """Return the progress of the run."""
        return self.remembered(("progress",), self.run.progress)

    def remembered(self, what: tuple[Any, ...], work: Callable[[], T]) -> T:
        """Return a result from the cache, or compute and cache it.

        A result is valid as long as nothing is written to the run on that day. While a process writes to it, a result
        also stays valid for a while, which limits the load of many visitors. Threads that wait for a result share it,
        and results of one kind, the first part of the key `what`, never wait for those of another.
        """
        kept = self._kept(what)
        if kept is None:
            with self._locks.setdefault(what[0], threading.Lock()):
                kept = self._kept(what)
                if kept is None:
                    memory, state, started = self._memory, self._state(), time.monotonic()
                    result = work()
                    now = time.monotonic()
                    if len(memory) >= MOST_REMEMBERED:
                        memory.clear()
                    kept = memory[what] = (result, state, now + max(FRESH_FOR, KEPT_LONGER * (now - started)))
        remembered: T = kept[0]
        return remembered

    def _kept(self, what: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], float] | None:
        """Return the cached result, or None if it is missing or no longer valid."""
        kept, now = self._memory.get(what), self._state()
        if kept is not None and (kept[1] == now or (kept[1][:2] == now[:2] and now[1] and time.monotonic() < kept[2])):
            return kept
        return None

    def _state(self) -> tuple[Any, ...]:
        return utc_now()[:10], *self.run.state()

    def written(self) -> None:
        """Invalidate everything read from the run so far, because this console wrote to it."""
        self._memory = {}

    def status(self, who: Token) -> RunStatus:
        """Return the full status of the run."""
        who.demand("see")
        return self.remembered(("status",), self.run.status)

    def requests(self, who: Token) -> list[Line]:
        """Return the requests in the ledger that a visitor may see, in the order of their receipt."""
        self.examine(who)
        records = self.remembered(("requests",), self.run.request_records)
        if not who.may("see"):  # an error that interrupted a request may name folders and other clients
            own = [record for record in records if is_own(who, record.filed_by)]
            return [Line(self, replace(record, failure=""), self._state_of(record)) for record in own]
        return [Line(self, record, self._state_of(record)) for record in records]

    def _state_of(self, record: Request) -> str:
        """Return the state of a request; a running or failed job of this console takes precedence over the ledger."""
        if record.settled:
            return record.status
        jobs = [job for job in self.jobs.of_run(self.key) if job.kind == "carry out" and job.request == record.request]
        states: dict[str, str] = {"running": "running", "failed": "failed"}
        state = "failed" if record.failure else record.status
        return states.get(jobs[0].state, state) if jobs else state

    def request(self, who: Token, number: int | str) -> Line:
        """Return one request, by its number or its id."""
        for line in self.requests(who):
            if number in (line.request.number, line.request.request):
                return line
        raise UnknownError("there is no such request here")

    def posted(self, who: Token) -> list[Line]:
        """Return the requests that wait in the run's inbox and are not in its ledger yet."""
        pending = self.remembered(("pending",), lambda: pending_requests(self.folder))
        posted = (row for row in pending if row.status == POSTED)
        return [Line(self, row, "received") for row in posted if who.may("see") or is_own(who, row.filed_by)]

    def refused(self, who: Token) -> list[Line]:
        """Return the requests that were refused or withdrawn before they were in the ledger."""
        events, _ = self.remembered(("refused",), lambda: self.run.trail("letter refused", 10**6))
        refused = []
        for event in reversed(events):
            content = event.content["content"] or {}
            name, clients, actor = content.get("request"), content.get("clients"), str(content.get("actor"))
            if event.content["kind"] not in ("submitted", "request") or not isinstance(clients, list):
                continue
            if who.may("see") or is_own(who, actor):
                name, when = str(name or event.content["letter"]), event.time
                clients = tuple(map(str, clients))
                record = Request(str(self.folder), name, "refused", clients, None, when, when, None, False, actor)
                refused.append(Line(self, record, "refused"))
        return refused

    def lines(self, who: Token) -> list[Line]:
        """Return all requests of the run that a person may see, the most urgent first.

        The nonces of settled requests are dropped.
        """
        lines = sorted([*self.requests(who), *self.posted(who), *self.refused(who)], key=Line.urgency)
        for line in lines:
            if line.settled:
                self._filed.pop((line.request.filed_by, line.request.request), None)
        return lines

    def plan(self, who: Token, clients: Sequence[str], terms: TermsGiven) -> Plan:
        """Return the plan of a request; with the method `auto`, it compares all methods."""
        who.demand("see")
        what = ("plan", tuple(clients), json.dumps(terms, sort_keys=True))
        return self.remembered(what, lambda: self.run.plan(clients, **terms))

    def plan_of(self, who: Token, request: str) -> Plan:
        """Return the plan of a waiting request, made from the terms it was filed with."""
        who.demand("see")
        return self.remembered(("plan of", request), lambda: self.run.plan_of(request))

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
            check_terms(who, self.run, terms)
        wish = {"clients": list(clients), "deadline_days": deadline_days, "terms": dict(terms)}
        with self.lock:  # two concurrent requests must not both pass `check_share`
            known = name in {line.request.request for line in self.lines(who)}
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
                submit(self.run, who.name, name, clients, deadline_days, terms, nonces)
            self._filed[who.name, name] = wish, nonces
            self.written()
        return name, nonces

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
        return self.remembered(("identities", request), lambda: self.run.record_identities(request))

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
            who.demand("withdraw own")
        elif decision in rights:
            who.demand(rights[decision])
        else:
            raise InputError(f"a decision must be approved, verified, refused or withdrawn, found {decision[:40]!r}")
        if decision == "approved" and not terms:
            raise InputError(
                "an approval must name the approved terms: send terms, with the terms_digest of the request"
            )
        with self.lock:
            if decision == "withdrawn" and not who.may("withdraw"):
                if withdraw(self.run, who.name, request, reason):
                    self.written()
                    return "recorded"
                if not is_filer(self.run, who.name, request):
                    raise UnknownError("there is no such request here")
            outcome = self.run.decide(request, decision, reason, who.name, terms or None)
            self.written()
        return outcome

    def execute(self, who: Token, request: str) -> Job:
        """Execute a request in a new process."""
        who.demand("carry out")
        line = self.request(who, request)
        if line.state == "running":
            raise RunBusyError(f"request {request} is already in execution")
        if line.settled:
            raise InputError(f"request {request} is {line.state}: it cannot be executed")
        if line.request.approvals_missing:
            raise InputError(f"request {request} needs {approvals_words(line.request.approvals_missing)}")
        if self.run.executed_elsewhere:
            raise InputError(self.run.executed_elsewhere)
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
        who.demand("examine")
        request = self.request(who, number).request.request
        with tempfile.TemporaryDirectory() as folder:
            path = self.run.write_bundle(request, Path(folder, f"{request}.bundle.json"))
            return path.name, path.read_bytes()

    def certificate(self, who: Token, number: int) -> Certificate:
        """Return the public certificate of a request."""
        return self.run.certificate(self.request(who, number).request.request)

    def trail(self, who: Token, kind: str, most: int) -> tuple[list[dict[str, Any]], int]:
        """Return the latest events of the ledger and the total number of events.

        Args:
            who: Token of the visitor.
            kind: Prefix of the event kinds to include, or all if empty.
            most: Maximum number of events to return.
        """
        who.demand("examine")
        latest, count = self.run.trail(kind, most)
        numbers = {line.request.request: line.request.number for line in self.requests(who)}
        events = []
        for event in latest:
            request = event.content.get("request", "")
            name = request.get("request", "") if isinstance(request, dict) else str(request)
            words = {key: str(event.content.get(key, "")) for key in ("actor", "reason")}
            signed = {"hash": event.hash.hex(), "signed": event.signature is not None}
            events.append(vars(event) | signed | words | {"run": self, "number": numbers.get(name), "request": name})
        return events, count

    def verification(self, who: Token) -> dict[str, Any] | None:
        """Return the result of the last verification by this console, or None."""
        who.demand("see")
        return self.jobs.verifications().get(self.key)


def check_terms(who: Token, run: Run, terms: TermsGiven) -> None:
    """Refuse terms that only operators may set, and budgets weaker than the run's own."""
    others = sorted(set(terms) - set(TERMS_OF_REQUESTERS))
    if others:
        raise NotAllowedError(
            f"your roles ({', '.join(who.roles)}) allow {', '.join(TERMS_OF_REQUESTERS)}; an operator sets "
            f"{', '.join(others)}"
        )
    privacy = run.spec.privacy
    for name, usual in (("epsilon", privacy.epsilon), ("delta", privacy.delta)):
        value = terms.get(name)
        if isinstance(value, float) and value > usual:
            raise NotAllowedError(f"{name} {value:g} protects less than the {usual:g} of this run: ask an operator")
    if terms.get("level") == "none":
        raise NotAllowedError("level none guarantees nothing: ask an operator")


def is_own(who: Token, filed_by: str) -> bool:
    """Return whether this person filed the request."""
    return same_address(who.name, filed_by)


class ServedRuns:
    """All runs under the console's folders, and the operations that span them."""

    def __init__(self, folders: Sequence[Path], state: Path) -> None:
        self.folders = tuple(folders)
        private_folder(state, parents=True)
        self.jobs = Jobs(state)
        self._runs: dict[str, ServedRun] = {}
        self._looked = -RESCAN_SECONDS
        self._lock = threading.Lock()

    def every_run(self) -> dict[str, ServedRun]:
        """Return all runs by key, unreadable ones too; search the folders at most every `RESCAN_SECONDS` seconds."""
        with self._lock:
            if time.monotonic() - self._looked >= RESCAN_SECONDS:
                self._looked = time.monotonic()
                here = {run.folder: run for run in self._runs.values()}
                runs = [here.get(folder) or ServedRun(folder, self.jobs) for folder in find_runs(*self.folders)]
                self._runs = {run.key: run for run in runs}
            return dict(self._runs)

    def of(self, who: Token) -> list[ServedRun]:
        """Return the runs that a visitor may see, sorted by name."""
        who.demand("see own")
        return sorted(self.every_run().values(), key=lambda run: run.name)

    def find(self, who: Token, key: str) -> ServedRun:
        """Return a run by its key."""
        who.demand("see own")
        run = self.every_run().get(key)
        if run is None:
            raise UnknownError("there is no such run here")
        return run

    def lines(self, who: Token) -> tuple[list[Line], list[ServedRun]]:
        """Return the requests of all runs that a person may see, and the runs that cannot be read.

        Open requests come first, by deadline. Settled requests follow, latest first.
        """
        lines, unread = list[Line](), list[ServedRun]()
        for run in self.of(who):
            try:
                lines += run.lines(who)
            except SifuError:
                unread.append(run)
        return sorted(lines, key=Line.urgency), unread

    def trail(self, who: Token, only: ServedRun | None, kind: str, most: int) -> tuple[list[dict[str, Any]], int]:
        """Return the latest events of one run or of all runs, latest first, and the total number of events.

        Args:
            who: Token of the visitor.
            only: The run, or None for all runs.
            kind: Prefix of the event kinds to include, or all if empty.
            most: Maximum number of events to return.
        """
        who.demand("examine")
        events: list[dict[str, Any]] = []
        count = 0
        for run in self.of(who) if only is None else [only]:
            with suppress(SifuError) if only is None else nullcontext():
                of_run, number = run.trail(who, kind, most)
                events, count = events + of_run, count + number
        events.sort(key=lambda event: (event["time"], event["seq"]), reverse=True)
        return events[:most], count
