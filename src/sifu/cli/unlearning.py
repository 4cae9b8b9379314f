"""The commands `sifu advise|plan|request|forget|requests|certificate`.

They cover a request from the advice before training to the answer to the client.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

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
from sifu.cli.output import Answer, Format, RoundsProgress, err, names_text, out, print_json, table
from sifu.cli.runs import MetricsOption, warn
from sifu.core.operator_words import approvals_words
from sifu.core.record_commitments import names_record, new_nonces
from sifu.errors import InputError, VerificationError

ClientsOption = Annotated[str | None, option("Names of the clients to forget.", "--clients", "--client", metavar="A,B")]


def advise(
    spec: Annotated[Path, argument("SPEC.toml", "Spec of the training, see sifu init.")],
    settings: SetOption = None,
    data: DataOption = None,
    everything: AllOption = False,
) -> Answer:
    """Advise, before training, whether certified unlearning pays off and what to change. Trains a short pilot only.

    For another budget: --set privacy.epsilon=5.
    """
    from sifu.cli.plans import show_advice

    if spec.is_dir():
        raise InputError(f"{spec} is a folder: give sifu advise a spec file (sifu init writes one)")
    with RoundsProgress() as progress:
        advice = sifu.advise(sifu.load_spec(spec, settings or []), data_folder=data, progress=progress)
    return show_advice(spec, advice, everything)


@takes_terms
def plan(
    run: RunArgument,
    clients: ClientsOption = None,
    records: RecordsOption = None,
    most_expensive: Annotated[
        bool, option("Plan for the active client most expensive to forget.", "--most-expensive")
    ] = False,
    picture: Annotated[
        Path | None, option("Figure to write: sigma against predicted rounds.", metavar="FILE.png")
    ] = None,
    *,
    terms: TermsGiven,
    everything: AllOption = False,
) -> Answer:
    """Show what a request would do: node, noise, rounds saved, level. Changes nothing.

    With --all, also shows why other methods are not possible, the effect of each noise, kept models and assumptions.
    """
    if (clients is None) == (not most_expensive):
        raise InputError("give either --clients A,B or --most-expensive")
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
    signed: Annotated[Path | None, option("Request signed by the client, see sifu clients sign.")] = None,
    id: Annotated[
        str | None, option("Id of the request; filing the same id again changes nothing.", show_default="r1, r2, ...")
    ] = None,
    *,
    terms: TermsGiven,
    deadline: Annotated[int, option("Days until the request must be done.", metavar="DAYS")] = 30,
    actor: ActorOption = None,
) -> Answer:
    """Record a request in the ledger (idempotent by id); sifu forget executes it.

    Nothing is trained. From its approval on, or at once if none is required, its clients take part in no round. Missing
    terms come from the run's spec; sifu plan shows what a request would do. While a command trains, the request waits
    in the run's inbox.
    """
    from sifu.cli.federation_commands import read_statement
    from sifu.core.operator_words import FLOWER, LOOP, forgotten_words, way_to_go_on
    from sifu.run.few_clients import consequences, staying_without
    from sifu.run.run_view import RunView
    from sifu.store.reader import names_now

    opened, nonces = sifu.Run(run), dict[str, str]()
    _add_records(terms, clients, records, run)
    if signed is not None:
        if clients is not None or id is not None or terms:
            raise InputError("a signed request already contains its terms: give --signed without other options")
        statement = read_statement(signed)
        names, received = [str(statement["body"].get("client"))], opened.request_signed(statement)
    elif clients is None:
        raise InputError("no clients named: give --clients A,B, or --signed FILE")
    else:
        names = client_names(clients)
        nonces = _told_first(new_nonces(terms.get("records") or ()))
        received = opened.request(names, id, deadline_days=deadline, actor=actor, nonces=nonces, **terms)
    held = opened.committed(received, nonces) if nonces else {}
    status = opened.request_status(received)
    if status == "posted":
        standing = "waits in the inbox of the running server, which will ingest it soon."
    elif status == "done":
        standing = "is already done."
    elif missing := opened.request_record(received).status.approvals_missing:
        decide = f"sifu requests decide {run} {received} approved --actor NAME"
        standing = f"is in the ledger and needs {approvals_words(missing)}. Next: {decide}"
    else:
        elsewhere = opened.spec.data.name in (FLOWER, LOOP)
        way = f"{way_to_go_on(opened.spec, 'ready')} executes it" if elsewhere else f"sifu forget {run}"
        standing = f"is in the ledger. Next: {way}"
    count = len(terms["records"] or ()) if "records" in terms else None
    values: dict[str, Any] = {
        "request": received,
        "clients": names,
        "records": count,
        "status": status,
        "nonces": held,
    }
    whom = names_text(names, escaped=False) if count is None else forgotten_words(names, count)
    with opened.reader() as reader:
        view, now = RunView(reader), names_now(reader)
        leaving = [] if status == "done" else [now.get(name, name) for name in names]
        staying = staying_without(view, leaving, records=count is not None)
        values["warnings"] = list(consequences(view, staying))
    warnings = [f"[yellow]{escape(warning)}[/]" for warning in values["warnings"]]
    return Answer(values, f"Request {received} for {whom} {standing}", *warnings, *_nonce_lines(nonces, held))


@takes_terms
def forget(
    run: RunArgument,
    clients: Annotated[str | None, option("Clients of a new request.", "--clients", "--client", metavar="A,B")] = None,
    records: RecordsOption = None,
    request: Annotated[str | None, option("Queued request to execute, instead of all.", metavar="ID")] = None,
    *,
    terms: TermsGiven,
    compare: Annotated[bool, option("Also train Scratch, to compare rounds.", "--compare-scratch")] = False,
    data: DataOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "float32",
    metrics: MetricsOption = None,
) -> Answer:
    """Execute the queued requests, one of them, or a new one.

    Each request is executed by its method: for example, a rollback with calibrated noise, then retraining without the
    clients. It gets a signed certificate. An interrupted request is finished first. With --records, the client rejoins
    with its remaining records in the same command.
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
    nonces = _told_first(new_nonces(terms.get("records") or ()))
    with RoundsProgress(MetricsLog(run, metrics, warn) if metrics else None) as progress:
        opened = open_run(run, data_folder=data, device=device, precision=precision)
        if not solved_from_files(opened.spec) and importlib.util.find_spec("torch") is None:
            raise ModuleNotFoundError(name="torch")  # fail before a request is recorded
        outcomes = opened.forget(
            None if clients is None else client_names(clients),
            request,
            compare_scratch=compare,
            progress=progress,
            nonces=nonces,
            **terms,
        )
    answer = show_outcomes(opened, outcomes)
    held = opened.committed(outcomes[-1].request, nonces) if nonces and outcomes else {}
    return Answer(answer.values | {"nonces": held}, *answer.shown, *_nonce_lines(nonces, held))


def _told_first(nonces: dict[str, str]) -> dict[str, str]:
    """Print and return nonces before the run, which does not store them, commits to them: a crash loses none."""
    shown = err if Answer.format is Format.json else out
    if nonces:
        shown.print("Nonces of the records, which are stored nowhere (void if the request is refused):", soft_wrap=True)
        for identity, nonce in nonces.items():
            shown.print(f"  {identity}: {nonce}", markup=False, soft_wrap=True)
    return nonces


def _nonce_lines(told: dict[str, str], held: dict[str, str]) -> list[str]:
    """Return instructions for the nonces that were shown: which to hand out, and which are void.

    Args:
        told: Nonces that were shown, by identity.
        held: Nonces among `told` that the request commits to.
    """
    void = [identity for identity in told if identity not in held]
    lines = ["Give each person the nonce of their record: sifu certificate check-record needs it."] if held else []
    if void:
        lines.append(f"Void: the nonce{'s' if len(void) > 1 else ''} of {', '.join(void)}; earlier ones count.")
    return lines


def _add_records(terms: TermsGiven, clients: str | None, records: str | None, run: Path) -> None:
    """Add the records of `--records` to the other terms."""
    if records is None:
        return
    if clients is None:
        raise InputError("--records needs exactly one client: add --client NAME")

    terms["records"] = read_records(records, by_identity=sifu.Run(run).spec.data.name == "table")


requests = Commands("requests", "List requests, show one, or decide on one.")


@requests.command("list")
def list_requests(
    folders: Annotated[list[Path], argument("DIR...", "Run folders, or folders that contain them.")],
    public: Annotated[bool, option("Leave out personal data: names, ids and actors.", "--public")] = False,
    pending: Annotated[bool, option("List only pending requests, by deadline.", "--pending")] = False,
    overdue: Annotated[bool, option("List only overdue requests.", "--overdue")] = False,
) -> Answer:
    """List every request with its steps, times, actors and deadline; use --public for publication.

    --pending and --overdue include requests that wait in the inbox of a run. A deadline of today is not overdue.
    """
    if pending or overdue:
        if public:
            raise InputError("--public cannot be combined with --pending or --overdue: give one of them")
        return _show_pending([row for row in sifu.pending_requests(*folders) if row.overdue or not overdue])
    runs = [sifu.Run(folder, remember=False) for folder in (sifu.find_runs(*folders) or folders)]
    if not public:
        return _show({run: run.request_records() for run in runs})
    if len(runs) > 1:
        raise InputError(f"--public lists the requests of one run, found {len(runs)} runs: name one of them")
    return _show_public(runs[0].public_record())


@requests.command("settle")
def settle_request(
    run: RunArgument,
    request: RequestArgument,
    reason: Annotated[str, option("Why its rounds cannot be finished; recorded.")],
) -> Answer:
    """End a running request whose rounds can never be finished, with the model that it has reached.

    Use it if clients on other machines refuse every round. The certificate covers the current model, which may be less
    accurate; the run can then be used again.
    """
    level = sifu.Run(run).settle(request, reason)
    return Answer({"request": request, "level": level}, f"Request {request} is done: {level}. Its rounds ended early.")


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
    """Show a request as an approver must see it: records, terms, steps and deadline.

    Requests that were submitted through the console are examined first: each is recorded, or refused with the reason.
    """
    opened = sifu.Run(run)
    _examine(opened, request)
    besides = opened.also_left_out(request)
    return _show({opened: [opened.request_record(request)]}, opened.record_identities(request), besides)


def _examine(run: sifu.Run, request: str) -> None:
    """Examine the requests that were submitted through the console; raise if this one is refused."""
    from sifu.api.submitted import examine
    from sifu.store.actors import actor_name

    if reason := examine(run, actor_name()).get(request):
        raise InputError(f"request {request} was submitted through the console and is refused: {reason}")


@requests.command("decide")
def decide(
    run: RunArgument,
    request: RequestArgument,
    decision: Annotated[Decision, argument(None, "The decision.")],
    reason: Annotated[str, option("Reason; a refusal needs one.")] = "",
    actor: ActorOption = None,
    terms: Annotated[str | None, option("Digest of the terms decided on (requests show).", metavar="HEX")] = None,
) -> Answer:
    """Record that a waiting request was verified, approved, refused or withdrawn.

    If the run's spec requires approval (requests.approval), a request is executed only after one or two people other
    than the one who filed it have approved it. An approval covers only the request's current terms. While a command
    trains, the decision waits in the run's inbox. A closed-form request that failed before its head was solved can
    still be refused or withdrawn; its clients then take part again.
    """
    opened = sifu.Run(run)
    _examine(opened, request)
    decided = opened.decide(request, decision, reason, actor, terms)
    values: dict[str, object] = {"request": request, "status": decision, "changed": decided == "recorded"}
    if decided == "posted":
        sentence = (
            f"The decision that request {request} is {decision} waits in the inbox of the running server, which will "
            "ingest it soon."
        )
        return Answer(values | {"posted": True}, sentence)
    missing = opened.request_record(request).status.approvals_missing
    more = f" It needs {approvals_words(missing)}." if decision == "approved" and missing else ""
    sentence = f"Request {request} {'is' if decided == 'recorded' else 'was already'} {decision}.{more}"
    return Answer(values | {"approvals_missing": missing}, sentence)


def _show(
    records: dict[sifu.Run, list[sifu.RequestRecord]], identities: Sequence[str] = (), besides: str = ""
) -> Answer:
    from sifu.api.submitted import submitted
    from sifu.core.operator_words import forgotten_words
    from sifu.core.request_terms import terms_words

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
                out.print(f"sifu requests show {run.folder} {message.request}", markup=False)

    listed = [{"run": str(run.folder)} | record.to_mapping() for run in records for record in records[run]]
    listed = [row | {"identities": list(identities)} for row in listed] if identities else listed
    listed = [row | {"also_left_out": besides} for row in listed] if besides else listed
    return Answer({"requests": listed}, show)


certificate = Commands("certificate", "Show a certificate, check a record of it, or export it.")


@certificate.command("show")
def show_certificate(
    run: RunArgument,
    request: RequestArgument,
    public: Annotated[bool, option("Show the answer to the client, in plain words.", "--public")] = False,
    everything: AllOption = False,
) -> Answer:
    """Show a summary of a certificate. --all shows all of it, and --public the client's version.

    --format json prints the signed file.
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
    file: Annotated[Path, argument("CERTIFICATE", "Public certificate.")],
    identity: Annotated[str, option("Identity of the record, or its row number.", "--id", metavar="X")],
    nonce: Annotated[str, option("Nonce handed out when the request was filed.", metavar="HEX")],
    public_key: PublicKeyOption = None,
) -> Answer:
    """Check that a certificate is valid and covers a record, by its identity and nonce; if not, exit with code 3.

    For the person the record belongs to: nothing else is needed, and nothing is sent anywhere.
    """
    verified = sifu.verify_certificate(file, public_key)
    named = verified.holds and names_record(verified.content["body"], identity, nonce)
    values = {"certificate": str(file), "identity": identity, "named": named, "problems": verified.problems}

    def show() -> None:
        if not named:
            why = verified.problems[0] if verified.problems else "no commitment opens with this identity and nonce"
            raise VerificationError(f"{file} does not say that record {identity} was forgotten: {why}")
        out.print(f"{file} is about record {identity}: it is one of the forgotten records.", markup=False)

    return Answer(values, show, code=0 if named else 3)


@certificate.command("attest")
def attest_certificate(run: RunArgument, request: RequestArgument) -> None:
    """Print the public certificate as an in-toto statement in a DSSE envelope, for other tools; needs the key."""
    print_json(sifu.Run(run).attestation(request))
