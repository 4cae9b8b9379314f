"""What can be done at the desk: the runs, their requests, plans, decisions and long work.

Pages and JSON API are thin: they find out who asks and call this. Every right is checked here, once.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from sifu.api import PendingRequest, Plan, RequestRecord, RequestStatus, RunStatus, find_runs
from sifu.choices import TermsGiven
from sifu.console.jobs import Job, Jobs
from sifu.console.live import Live
from sifu.console.run_at_desk import (
    SETTLED,
    NumberedRequest,
    RequestLine,
    RunAtDesk,
    check_id_is_own,
    check_share,
    check_terms,
    is_own,
    tells_of_others,
)
from sifu.console.tokens import NotAllowedError, Right, Token
from sifu.errors import InputError, RunBusyError, SifuError
from sifu.requests.approvals import POSTED, pending_requests
from sifu.run.clients_and_engine import carried_out_elsewhere
from sifu.store.clock import current_time, utc_now
from sifu.store.files import private_folder, write_atomically
from sifu.store.inbox import letters

FOUND_AGAIN_EVERY = 3.0
"""Seconds between two looks for new run folders."""
VERIFICATIONS = "verifications.json"
log = logging.getLogger(__name__)


class UnknownError(SifuError):
    """Something was asked for that is not there, or not for them."""

    exit_code = 2


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
        records: list[RequestRecord] = run.remembered(("requests", utc_now()[:10]), run.run.request_records)
        return [
            NumberedRequest(number, record, self._state(key, record.status))
            for number, record in enumerate(records, start=1)
            if who.may("see") or is_own(who, record.status.filed_by)
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
            waiting = [row for row in pending_requests(reader, current_time()) if row.status == POSTED]
        if who.may("see"):
            return waiting
        own = {letter.id for letter in letters(run.folder) if is_own(who, str((letter.content or {}).get("actor")))}
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
            check_terms(who, run.run.spec, terms)
        with run.lock:  # two requesters at once do not pass the check with the same clients to spare
            if not who.may("set terms"):
                check_share(run, clients)
            if not who.may("see"):
                check_id_is_own(who, run, name)
            try:
                filed = run.run.request(list(clients), name, deadline_days=deadline_days, actor=who.name, **terms)
            except InputError as error:
                if who.may("see") or not tells_of_others(who, run, str(error), {*clients, name}):
                    raise
                raise InputError(
                    "this request cannot be filed: check the names of the clients, which may be unknown, forgotten "
                    "already or in a request that waits, or ask the operator"
                ) from error
            run.written()
        return filed

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
                "time": utc_now(),
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
