"""`sifu requests|certificate`: list the requests of a run, decide on one, answer a client."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

import sifu
from sifu.choices import Decision
from sifu.cli.options import ActorOption, AllOption, Commands, RequestArgument, RunArgument, argument, option
from sifu.cli.output import Answer, names_text, out, print_json, table
from sifu.errors import InputError

requests = Commands("requests", "The record of requests: list them, show one, decide on one.")


@requests.command("list")
def list_requests(
    folders: Annotated[list[Path], argument("DIR...", "Run folders, or folders that hold some.")],
    public: Annotated[bool, option("Without personal data: no names, ids or actors.", "--public")] = False,
    pending: Annotated[bool, option("Only what is still to be done, by deadline.", "--pending")] = False,
    overdue: Annotated[bool, option("Only what should be done by now.", "--overdue")] = False,
) -> Answer:
    """Every request with its steps, times, actors and deadline; --public for publication.

    --pending and --overdue also list what waits in the inbox of a run. A deadline of today is not overdue today.
    """
    if pending or overdue:
        if public:
            raise InputError("--public lists whole runs: leave --pending and --overdue out")
        return _show_pending([row for row in sifu.pending_requests(*folders) if row.overdue or not overdue])
    runs = [sifu.Run(folder) for folder in (sifu.find_runs(*folders) or folders)]
    if not public:
        return _show({run: run.request_records() for run in runs})
    if len(runs) > 1:
        raise InputError(f"--public lists the requests of one run, found {len(runs)} runs: name one of them")
    return _show_public(runs[0].public_record())


def _show_pending(waiting: list[sifu.PendingRequest]) -> Answer:
    shown = table("until", "-days", "request", "status", "clients", "run")
    for request in waiting:
        shown.add_row(
            f"[bold red]{request.deadline[:10]} overdue[/]" if request.overdue else request.deadline[:10],
            str(request.days_left),
            escape(request.request),
            request.status,
            names_text(request.clients, 2),
            escape(request.run),
        )
    listed = {"requests": [request.to_mapping() for request in waiting]}
    return Answer(listed, shown if waiting else "No request waits.")


def _show_public(record: list[sifu.PublicRequest]) -> Answer:
    shown = table("-number", "status", "-clients", "received", "until", "finished", "level")
    for request in record:
        shown.add_row(
            str(request.number),
            request.status,
            str(request.clients),
            request.received,
            request.deadline + (" overdue" if request.overdue else ""),
            request.finished or "-",
            request.level or "-",
        )
    return Answer({"requests": [asdict(request) for request in record]}, shown)


@requests.command("show")
def show_request(run: RunArgument, request: RequestArgument) -> Answer:
    """One request with its steps, times, actors and deadline."""
    opened = sifu.Run(run)
    return _show({opened: [opened.request_record(request)]})


@requests.command("decide")
def decide(
    run: RunArgument,
    request: RequestArgument,
    decision: Annotated[Decision, typer.Argument(help="What was decided.")],
    reason: Annotated[str, option("Why; a refusal needs one.")] = "",
    actor: ActorOption = None,
    terms: Annotated[str | None, option("Digest of the terms decided on (requests show).", metavar="HEX")] = None,
) -> Answer:
    """Record that a waiting request was verified, approved, refused or withdrawn.

    Where the run's spec demands approval (requests.approval), a request is carried out only when one or two people
    approved it, who did not file it. An approval covers only the request's current terms. While a
    command trains, the decision waits in the run's inbox.
    """
    opened = sifu.Run(run)
    decided = opened.decide(request, decision, reason, actor, terms)
    values: dict[str, object] = {"request": request, "status": decision, "changed": decided == "recorded"}
    if decided == "posted":
        sentence = f"That request {request} is {decision} was handed to the running server, which takes it in soon."
        return Answer(values | {"posted": True}, sentence)
    missing = opened.request_record(request).status.approvals_missing
    more = f" It needs {missing} more." if decision == "approved" and missing else ""
    sentence = f"Request {request} {'is' if decided == 'recorded' else 'was already'} {decision}.{more}"
    return Answer(values | {"approvals_missing": missing}, sentence)


def _show(records: dict[sifu.Run, list[sifu.RequestRecord]]) -> Answer:
    from sifu.core.request_terms import terms_words
    from sifu.core.wording import forgotten_words

    def show() -> None:
        for run, of_run in records.items():
            if len(records) > 1:
                out.print(f"[bold]{escape(str(run.folder))}[/]")
            for record in of_run:
                status = record.status
                late = " [bold red]overdue[/]" if status.overdue else ""
                whom = names_text(status.clients)
                if status.records is not None:
                    whom = escape(forgotten_words(status.clients, status.records))
                out.print(f"[bold]{status.request}[/]: {whom}; until {status.deadline[:10]}{late}")
                if status.approvals_missing:
                    out.print(f"  waits for {status.approvals_missing} more to approve it")
                out.print(f"  terms {status.terms_digest[:12]}: {escape(terms_words(status.terms.to_mapping()))}")
                for step in record.steps:
                    why = f": {escape(step.reason)}" if step.reason else ""
                    out.print(f"  {step.time} {step.status} by {escape(step.actor)}{why}")
            if not of_run:
                out.print("There are no requests.")

    listed = [{"run": str(run.folder)} | record.to_mapping() for run in records for record in records[run]]
    return Answer({"requests": listed}, show)


certificate = Commands("certificate", "Show a certificate, or put it into plain words for the client.")


@certificate.command("show")
def show_certificate(
    run: RunArgument,
    request: RequestArgument,
    public: Annotated[bool, option("The answer to the client, in plain words.", "--public")] = False,
    everything: AllOption = False,
) -> Answer:
    """A certificate in short, with --all in full; with --public what the client is told, in full.

    With --format json it is the signed file.
    """
    from sifu.requests.request_record import auditor_lines, in_short, plain_answer

    opened = sifu.Run(run)

    def show() -> None:
        body = opened.certificate(request).body
        lines = plain_answer(body) if public or everything else in_short(body)
        if everything and not public:
            lines += ["", *auditor_lines(opened.certificate(request, "auditor").body)]
        for line in lines:
            out.print(line, markup=False)

    return Answer(lambda: opened.certificate(request, "public" if public else "auditor").to_mapping(), show)


@certificate.command("attest")
def attest_certificate(run: RunArgument, request: RequestArgument) -> None:
    """The public certificate as an in-toto statement in a DSSE envelope, for other people's tools; needs the key."""
    print_json(sifu.Run(run).attestation(request))
