"""`sifu advise|plan|request|forget`: would it pay, whom to forget, on which terms, and doing it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import sifu
from sifu.choices import TermsGiven
from sifu.cli.options import (
    ActorOption,
    AllOption,
    DataOption,
    DeviceOption,
    PrecisionOption,
    RecordsOption,
    RunArgument,
    SetOption,
    argument,
    client_names,
    flags,
    option,
    read_records,
    takes_terms,
)
from sifu.cli.output import Answer, RoundsProgress, names_text
from sifu.cli.runs import MetricsOption, warn
from sifu.errors import InputError

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
    """What a request would do: node, noise, rounds saved, level. Changes nothing.

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

    Nothing is trained: from now on its clients take part in no round. What is not given comes from the run's spec; sifu
    plan shows what a request would do. While a command trains, it waits in the run's inbox.
    """
    from sifu.cli.federation_commands import read_statement
    from sifu.core.wording import forgotten_words
    from sifu.run.clients_and_engine import FLOWER, LOOP, way_to_go_on

    opened = sifu.Run(run)
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
        received = opened.request(names, id, deadline_days=deadline, actor=actor, **terms)
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
    values = {"request": received, "clients": names, "records": count, "status": status}
    whom = names_text(names, escaped=False) if count is None else forgotten_words(names, count)
    return Answer(values, f"Request {received} for {whom} {standing}")


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
    from sifu.cli.commands import show_outcomes
    from sifu.report.metrics_log import MetricsLog

    _add_records(terms, clients, records, run)
    of_new_requests = [name for name in terms if name != "level"]
    if clients is None and of_new_requests:
        several = len(of_new_requests) > 1
        raise InputError(
            f"{flags(of_new_requests)} belong{'' if several else 's'} to a new request: add --clients, or leave "
            f"{'them' if several else 'it'} out; queued requests keep the terms they were filed with"
        )
    with RoundsProgress(MetricsLog(run, metrics, warn)) as progress:
        opened = sifu.open_run(run, data_folder=data, device=device, precision=precision)
        outcomes = opened.forget(
            None if clients is None else client_names(clients),
            request,
            compare_scratch=compare,
            progress=progress,
            **terms,
        )
    return show_outcomes(run, outcomes)


def _add_records(terms: TermsGiven, clients: str | None, records: str | None, run: Path) -> None:
    """Add what `--records` names to the other terms."""
    if records is None:
        return
    if clients is None:
        raise InputError("--records are rows of one client's data: name it with --client NAME")

    terms["records"] = read_records(records, by_identity=sifu.Run(run).spec.data.name == "table")
