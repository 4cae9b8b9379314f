"""The commands `sifu advise|plan|request|forget|requests|certificate`.

They cover a request from the decision to train to the answer to the client.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from rich.markup import escape

import sifu
from sifu.choices import Decision, TermsGiven
from sifu.cli.options import (
    ActorOption,
    AllOption,
    Commands,
    DataOption,
    DeviceOption,
    PrecisionOption,
    PublicKeyOption,
    RecordsOption,
    RequestArgument,
    RunArgument,
    SetOption,
    argument,
    client_names,
    flags,
    option,
    read_records,
    takes_terms,
)
from sifu.cli.output import Answer, RoundsProgress, names_text, out, print_json, table
from sifu.cli.runs import MetricsOption, warn
from sifu.core.record_commitments import names_record, new_nonces
from sifu.errors import InputError, VerificationError

ClientsOption = Annotated[str | None, option("Names of the clients to forget.", "--clients", "--client", metavar="A,B")]


def advise(
    spec: Annotated[Path, argument("SPEC.toml", "What would be trained, see sifu init.")],
    settings: SetOption = None,
    data: DataOption = None,
    everything: AllOption = False,
) -> Answer:
    """Before training: would certified unlearning pay here, and what to change. Trains a short pilot, keeps nothing.

    For another budget: --set privacy.epsilon=5.
    """
    from sifu.cli.plans import show_advice

    if spec.is_dir():
        raise InputError(f"{spec} is a folder: sifu advise takes a spec, from before training (sifu init writes one)")
    with RoundsProgress() as progress:
        advice = sifu.advise(sifu.load_spec(spec, settings or []), data_folder=data, progress=progress)
    return show_advice(spec, advice, everything)


@takes_terms
def plan(
    run: RunArgument,
    clients: ClientsOption = None,
    records: RecordsOption = None,
    most_expensive: Annotated[
        bool, option("Plan for the active client that is most expensive to forget.", "--most-expensive")
    ] = False,
    picture: Annotated[Path | None, option("Also draw sigma against predicted rounds.", metavar="FILE.png")] = None,
    *,
    terms: TermsGiven,
    everything: AllOption = False,
) -> Answer:
    """Show what a request would do: node, noise, rounds saved, level. Changes nothing.

    With --all also why other ways are not possible, what each noise would do, what is kept, and every assumption.
    """
    if (clients is None) == (not most_expensive):
        raise InputError("name the clients with --clients A,B, or ask for --most-expensive: one of the two")
    from sifu.cli.plans import draw_picture, show_plan

    opened = sifu.Run(run)
    _add_records(terms, clients, records, run)
    names = client_names(clients) if clients is not None else [opened.most_expensive()]
    planned = opened.plan(names, **terms)
    if picture is not None:
        draw_picture(planned, picture)
    return show_plan(planned, picture, everything)


@takes_terms
def request(
    run: RunArgument,
    clients: ClientsOption = None,
    records: RecordsOption = None,
    signed: Annotated[Path | None, option("A request signed by the client, see sifu clients sign.")] = None,
    id: Annotated[
        str | None, option("Your own id; the same id again changes nothing.", show_default="r1, r2, ...")
    ] = None,
    *,
    terms: TermsGiven,
    deadline: Annotated[int, option("Days until it must be done.", metavar="DAYS")] = 30,
    actor: ActorOption = None,
) -> Answer:
    """Put a request into the ledger (idempotent by id); sifu forget carries it out.

    Nothing is trained: from its approval on, or from now on where none is demanded, its clients take part in no round.
    What is not given comes from the run's spec; sifu plan shows what a request would do. While a command trains, it
    waits in the run's inbox.
    """
    from sifu.cli.federation_commands import read_statement
    from sifu.core.wording import forgotten_words
    from sifu.run.clients_and_engine import FLOWER, LOOP, way_to_go_on

    opened, nonces = sifu.Run(run), dict[str, str]()
    _add_records(terms, clients, records, run)
    if signed is not None:
        if clients is not None or id is not None or terms:
            raise InputError("a signed request already contains its terms: leave the other options out")
        statement = read_statement(signed)
        names, received = [str(statement["body"].get("client"))], opened.request_signed(statement)
    elif clients is None:
        raise InputError("no client is named: give --clients A,B, or --signed FILE")
    else:
        names = client_names(clients)
        nonces = new_nonces(terms.get("records") or ())
        received = opened.request(names, id, deadline_days=deadline, actor=actor, nonces=nonces, **terms)
        nonces = opened.committed(received, nonces)
    status = opened.request_status(received)
    if status == "posted":
        standing = "was handed to the running server, which takes it in soon."
    elif status == "done":
        standing = "was carried out already."
    else:
        elsewhere = opened.spec.data.name in (FLOWER, LOOP)
        way = f"{way_to_go_on(opened.spec, 'ready')} carries it out" if elsewhere else f"sifu forget {run}"
        standing = f"is in the ledger. Next: {way}"
    count = len(terms["records"] or ()) if "records" in terms else None
    values = {"request": received, "clients": names, "records": count, "status": status, "nonces": nonces}
    whom = names_text(names, escaped=False) if count is None else forgotten_words(names, count)
    return Answer(values, f"Request {received} for {whom} {standing}", *_nonce_lines(nonces))


@takes_terms
def forget(
    run: RunArgument,
    clients: Annotated[
        str | None, option("A new request for these clients.", "--clients", "--client", metavar="A,B")
    ] = None,
    records: RecordsOption = None,
    request: Annotated[str | None, option("Only this queued request.", metavar="ID")] = None,
    *,
    terms: TermsGiven,
    compare: Annotated[bool, option("Also train Scratch, for its rounds.", "--compare-scratch")] = False,
    data: DataOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "float32",
    metrics: MetricsOption = None,
) -> Answer:
    """Carry out the queued requests, one of them, or a new one.

    Rolls back to the last model within the budget, adds calibrated noise, retrains without the clients, and
    writes a signed certificate. An interrupted request is finished first. With --records the client joins again with
    what it has left, in the same command.
    """
    from sifu.api import open_run
    from sifu.cli.commands import show_outcomes
    from sifu.report.metrics_log import MetricsLog
    from sifu.run.run_engines import solved_from_files

    _add_records(terms, clients, records, run)
    of_new_requests = [name for name in terms if name != "level"]
    if clients is None and of_new_requests:
        several = len(of_new_requests) > 1
        raise InputError(
            f"{flags(of_new_requests)} belong{'' if several else 's'} to a new request: add --clients, or leave "
            f"{'them' if several else 'it'} out; queued requests keep the terms they were filed with"
        )
    nonces = new_nonces(terms.get("records") or ())
    with RoundsProgress(MetricsLog(run, metrics, warn) if metrics else None) as progress:
        opened = open_run(run, data_folder=data, device=device, precision=precision)
        if not solved_from_files(opened.spec) and importlib.util.find_spec("torch") is None:
            raise ModuleNotFoundError(name="torch")  # before a request is recorded
        outcomes = opened.forget(
            None if clients is None else client_names(clients),
            request,
            compare_scratch=compare,
            progress=progress,
            nonces=nonces,
            **terms,
        )
    answer = show_outcomes(run, outcomes)
    nonces = opened.committed(outcomes[-1].request, nonces) if nonces and outcomes else {}
    return Answer(answer.values | {"nonces": nonces}, *answer.shown, *_nonce_lines(nonces))


def _nonce_lines(nonces: dict[str, str]) -> list[str]:
    """Return the lines that tell the operator which nonce to give to which person."""
    told = "Hand each person the nonce of its record, which is kept nowhere (sifu certificate check-record):"
    return [told, *(f"  {escape(identity)}: {nonce}" for identity, nonce in nonces.items())] if nonces else []


def _add_records(terms: TermsGiven, clients: str | None, records: str | None, run: Path) -> None:
    """Add the records of `--records` to the other terms."""
    if records is None:
        return
    if clients is None:
        raise InputError("--records are rows of one client's data: name it with --client NAME")

    terms["records"] = read_records(records, by_identity=sifu.Run(run).spec.data.name == "table")


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
    runs = [sifu.Run(folder, remember=False) for folder in (sifu.find_runs(*folders) or folders)]
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
    return _show({opened: [opened.request_record(request)]}, opened.record_identities(request))


@requests.command("decide")
def decide(
    run: RunArgument,
    request: RequestArgument,
    decision: Annotated[Decision, argument(None, "What was decided.")],
    reason: Annotated[str, option("Why; a refusal needs one.")] = "",
    actor: ActorOption = None,
    terms: Annotated[str | None, option("Digest of the terms decided on (requests show).", metavar="HEX")] = None,
) -> Answer:
    """Record that a waiting request was verified, approved, refused or withdrawn.

    Where the run's spec demands approval (requests.approval), a request is executed only when one or two people
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


def _show(records: dict[sifu.Run, list[sifu.RequestRecord]], identities: Sequence[str] = ()) -> Answer:
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
                if identities:
                    out.print(f"  identities: {', '.join(identities)}", markup=False)
                for step in record.steps:
                    why = f": {escape(step.reason)}" if step.reason else ""
                    out.print(f"  {step.time} {step.status} by {escape(step.actor)}{why}")
            if not of_run:
                out.print("There are no requests.")

    listed = [{"run": str(run.folder)} | record.to_mapping() for run in records for record in records[run]]
    listed = [row | {"identities": list(identities)} for row in listed] if identities else listed
    return Answer({"requests": listed}, show)


certificate = Commands("certificate", "Show a certificate, or put it into plain words for the client.")


@certificate.command("show")
def show_certificate(
    run: RunArgument,
    request: RequestArgument,
    public: Annotated[bool, option("The answer to the client, in plain words.", "--public")] = False,
    everything: AllOption = False,
) -> Answer:
    """Show a certificate in short, with --all in full; with --public the client's version, in full.

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


@certificate.command("check-record")
def check_record(
    file: Annotated[Path, argument("CERTIFICATE", "A public certificate.")],
    identity: Annotated[str, option("The record's identity, or its row number.", "--id", metavar="X")],
    nonce: Annotated[str, option("The nonce handed out when the request was filed.", metavar="HEX")],
    public_key: PublicKeyOption = None,
) -> Answer:
    """Check that a certificate is about a record, by its identity and nonce. Exit code 3 if it is not, or is not valid.

    For the person whose record it is: nothing else is needed, and nothing is sent anywhere.
    """
    verified = sifu.verify_certificate(file, public_key)
    named = verified.holds and names_record(verified.content["body"], identity, nonce)
    values = {"certificate": str(file), "identity": identity, "named": named, "problems": verified.problems}

    def show() -> None:
        if not named:
            why = verified.problems[0] if verified.problems else "no commitment opens with this identity and nonce"
            raise VerificationError(f"{file} does not say that record {identity} was forgotten: {why}")
        out.print(f"{file} is about record {identity}: it is one of those that were forgotten.", markup=False)

    return Answer(values, show, code=0 if named else 3)


@certificate.command("attest")
def attest_certificate(run: RunArgument, request: RequestArgument) -> None:
    """Print the public certificate as an in-toto statement in a DSSE envelope, for other tools; needs the key."""
    print_json(sifu.Run(run).attestation(request))
