"""The commands `sifu requests|decide|certificate`: filed requests, decisions on them, and their certificates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from rich.markup import escape

import sifu
from sifu.choices import Decision
from sifu.cli.options import (
    ActorOption,
    AllOption,
    PublicOption,
    RequestArgument,
    RunArgument,
    argument,
    collect_run,
    option,
)
from sifu.cli.output import Answer, out, table, whom_text
from sifu.core.operator_words import approvals_words
from sifu.errors import InputError, SifuError

DECISIONS: dict[str, Decision] = {
    "verify": "verified",
    "approve": "approved",
    "refuse": "refused",
    "withdraw": "withdrawn",
}
"""Recorded decision of each word of `sifu decide`, besides `settle`."""


def requests(
    folder: Annotated[Path, argument("DIR", "A run folder, or a folder that contains runs.")],
    request: Annotated[str | None, argument("[ID]", "Request of the run to show as an approver must see it.")] = None,
    public: PublicOption = False,
    pending: Annotated[bool, option("List only pending requests, by deadline.", "--pending")] = False,
    overdue: Annotated[bool, option("List only overdue requests.", "--overdue")] = False,
) -> Answer:
    """List requests, or show one.

    --public leaves out names, ids and actors. --pending and --overdue include the inbox of a run; a deadline of today
    is not overdue. Of several runs, one that cannot be read is named. With ID, requests that were submitted through the
    console are examined first: each is recorded, or refused with the reason.
    """
    if public + (pending or overdue) + (request is not None) > 1:
        raise InputError("ID, --public and --pending (or --overdue) cannot be combined: give one of them")
    if request is not None:
        collect_run(folder)
        opened = sifu.Run(folder)
        _examine(opened, request)
        besides = opened.also_left_out(request)
        return _show({opened: [opened.request_record(request)]}, opened.record_identities(request), besides)
    if pending or overdue:
        return _show_pending(folder, overdue)
    runs = [sifu.Run(found) for found in (sifu.find_runs(folder) or [folder])]
    if not public:
        return _show({run: run.request_records() for run in runs})
    if len(runs) > 1:
        raise InputError(f"--public lists the requests of one run, found {len(runs)} runs: name one of them")
    return _show_public(runs[0].public_record())


def _show_pending(folder: Path, overdue: bool) -> Answer:
    from sifu.cli.runs import warn

    runs, unread, code = sifu.find_runs(folder) or [folder], list[str](), 0
    waiting: list[sifu.PendingRequest] = []
    for run in runs:
        try:
            waiting += [row for row in sifu.pending_requests(run) if row.overdue or not overdue]
        except SifuError as error:
            if len(runs) == 1:
                raise
            warn(f"{run} cannot be listed: {error}")
            unread.append(str(run))
            code = error.exit_code
    waiting.sort(key=lambda request: (request.deadline, request.run, request.request))
    shown = table("until", "-days", "request", "status", "clients", "run")
    for request in waiting:
        shown.add_row(
            f"[bold red]{request.deadline[:10]} overdue[/]" if request.overdue else request.deadline[:10],
            str(request.days_left),
            escape(request.request),
            request.status,
            whom_text(request.clients, request.records, 2),
            escape(request.run),
        )
    listed = {"requests": [request.to_mapping() for request in waiting], "unread": unread}
    none = f"No request {'is overdue' if overdue else 'waits'}{' in the other runs' if unread else ''}."
    return Answer(listed, shown if waiting else none, code=code)


def _show_public(record: list[sifu.PublicRequest]) -> Answer:
    shown = table("-number", "status", "-clients", "-records", "received", "until", "finished", "level")
    for request in record:
        shown.add_row(
            str(request.number),
            request.status,
            str(request.clients),
            str(request.records or "all"),
            request.received,
            request.deadline + (" overdue" if request.overdue else ""),
            request.finished or "-",
            request.level or "-",
        )
    return Answer({"requests": [asdict(request) for request in record]}, shown)


def _examine(run: sifu.Run, request: str) -> None:
    """Examine the requests that were submitted through the console; raise if this one is refused."""
    from sifu.api.submitted import examine
    from sifu.store.actors import actor_name

    if reason := examine(run, actor_name()).get(request):
        raise InputError(f"request {request} was submitted through the console and is refused: {reason}")


def decide(
    run: RunArgument,
    request: RequestArgument,
    decision: Annotated[
        Literal["verify", "approve", "refuse", "withdraw", "settle"],
        argument("DECISION", "verify, approve, refuse, withdraw or settle."),
    ],
    reason: Annotated[str, option("Reason; refuse and settle need one.")] = "",
    actor: ActorOption = None,
    terms: Annotated[str | None, option("Digest of the terms decided on, see sifu requests.", metavar="HEX")] = None,
) -> Answer:
    """Verify, approve, refuse, withdraw or settle a request.

    If the run's spec requires approval (requests.approval), a request is executed only after one or two people other
    than the one who filed it have approved it. An approval covers only the request's current terms. While a command
    trains, the decision waits in the run's inbox.

    Settle a request if clients on other machines refuse every round: its certificate covers the current model, which
    may be less accurate, and the run can then be used again.
    """
    opened = sifu.Run(run)
    if decision == "settle":
        level = opened.settle(request, reason)
        return Answer(
            {"request": request, "level": level}, f"Request {request} is done: {level}. Its rounds ended early."
        )
    _examine(opened, request)
    status = DECISIONS[decision]
    decided = opened.decide(request, status, reason, actor, terms)
    values: dict[str, object] = {"request": request, "status": status, "changed": decided == "recorded"}
    if decided == "posted":
        sentence = (
            f"The decision that request {request} is {status} waits in the inbox of the running server, which will "
            "ingest it soon."
        )
        return Answer(values | {"posted": True}, sentence)
    missing = opened.request_record(request).status.approvals_missing
    more = f" It needs {approvals_words(missing)}." if status == "approved" and missing else ""
    sentence = f"Request {request} {'is' if decided == 'recorded' else 'was already'} {status}.{more}"
    return Answer(values | {"approvals_missing": missing}, sentence)


def _show(
    records: dict[sifu.Run, list[sifu.RequestRecord]], identities: Sequence[str] = (), besides: str = ""
) -> Answer:
    from sifu.api.submitted import submitted
    from sifu.core.request_terms import terms_words

    def show() -> None:
        for run, of_run in records.items():
            if len(records) > 1:
                out.print(f"[bold]{escape(str(run.folder))}[/]")
            for record in of_run:
                status = record.status
                late = " [bold red]overdue[/]" if status.overdue else ""
                whom = whom_text(status.clients, status.records)
                out.print(f"[bold]{status.request}[/]: {whom}; until {status.deadline[:10]}{late}")
                if status.failure:
                    out.print(f"  [bold red]failed:[/] {escape(status.failure)}")
                if status.approvals_missing:
                    out.print(f"  needs {approvals_words(status.approvals_missing)}")
                out.print(f"  terms {status.terms_digest[:12]}: {escape(terms_words(status.terms.to_mapping()))}")
                if identities:
                    out.print(f"  identities: {', '.join(identities)}", markup=False)
                if besides:
                    out.print(f"  {besides}", markup=False)
                for step in record.steps:
                    why = f": {escape(step.reason)}" if step.reason else ""
                    out.print(f"  {step.time} {step.status} by {escape(step.actor)}{why}")
            if not of_run:
                out.print("There are no requests.")
            for message in submitted(run.folder):
                out.print(f"{message.request} was submitted through the console and is not examined yet: ", end="")
                out.print(f"sifu requests {run.folder} {message.request}", markup=False)

    listed = [{"run": str(run.folder)} | record.to_mapping() for run in records for record in records[run]]
    listed = [row | {"identities": list(identities)} for row in listed] if identities else listed
    listed = [row | {"also_left_out": besides} for row in listed] if besides else listed
    return Answer({"requests": listed}, show)


def certificate(
    run: RunArgument,
    request: RequestArgument,
    public: PublicOption = False,
    everything: AllOption = False,
    bundle: Annotated[
        Path | None, option("Write the public certificate with the signed chain of events.", metavar="FILE")
    ] = None,
) -> Answer:
    """Show a certificate, or write a bundle to hand out.

    A summary by default; --all shows all of it, and --public the answer to the client, in plain words.

    --format json prints the signed file. --bundle verifies the run and writes one file to hand out: it names nobody
    else and holds no private key; sifu verify checks it.
    """
    from sifu.requests.request_record import auditor_lines, in_short, plain_answer

    opened = sifu.Run(run)
    if bundle is not None:
        path = opened.write_bundle(request, bundle)
        return Answer(
            {"bundle": str(path), "request": request}, f"Wrote {path}, which anybody checks with sifu verify."
        )

    def show() -> None:
        body = opened.certificate(request).body
        lines = plain_answer(body) if public or everything else in_short(body)
        if everything and not public:
            lines += ["", *auditor_lines(opened.certificate(request, "auditor").body)]
        for line in lines:
            out.print(line, markup=False)

    return Answer(lambda: opened.certificate(request, "public" if public else "auditor").to_mapping(), show)
