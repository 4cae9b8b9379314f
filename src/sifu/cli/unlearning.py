"""The commands `sifu plan|request|forget`."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import sifu
from sifu.choices import TermsGiven
from sifu.cli.options import (
    ID,
    ActorOption,
    AllOption,
    ClientsOption,
    DeviceOption,
    RecordsOption,
    RequestOption,
    RunArgument,
    SetOption,
    argument,
    client_names,
    collect_run,
    flags,
    option,
    read_records,
)
from sifu.cli.output import Answer, Format, RoundsProgress, err, out
from sifu.core.record_commitments import new_nonces
from sifu.errors import InputError

if TYPE_CHECKING:
    from sifu.api import Outcome


def plan(
    run: Annotated[Path, argument("DIR|SPEC", "The run folder; or a spec, before training.", callback=collect_run)],
    clients: ClientsOption = None,
    records: RecordsOption = None,
    *,
    terms: TermsGiven,
    settings: SetOption = None,
    everything: AllOption = False,
) -> Answer:
    """Show what a request would do: noise, rounds, level.

    Changes nothing. With --all, also shows why other methods are refused, and every assumption. Of a spec, shows before
    training which row of the README's table of methods applies, and why.
    """
    if run.is_file():
        from sifu.api import load_spec
        from sifu.api.spec_plan import plan_spec

        if clients is not None or records is not None or terms:
            raise InputError("a spec is planned without clients and terms: set them with --set privacy.KEY=VALUE")
        row = plan_spec(load_spec(run, settings or []))
        return Answer(asdict(row), *row.lines(), f"Next: sifu train {run} --run my-run")
    if clients is None:
        raise InputError("name the clients to forget: --clients A,B")
    opened = sifu.Run(run)
    _add_records(terms, clients, records, run)
    planned = opened.plan(client_names(clients), **terms)
    end = "Nothing was changed." + ("" if everything else " More with --all.")
    return Answer(planned.to_mapping, *planned.lines(everything), end)


def request(
    run: RunArgument,
    clients: ClientsOption = None,
    records: RecordsOption = None,
    signed: Annotated[Path | None, option("Request signed by the client, see sifu clients sign.")] = None,
    id: Annotated[str | None, ID] = None,
    *,
    terms: TermsGiven,
    deadline: Annotated[
        int, option("Days from now until the request must be done; fixed once filed.", metavar="DAYS")
    ] = 30,
    actor: ActorOption = None,
) -> Answer:
    """Record a request in the ledger; sifu forget executes it.

    Nothing is trained; recording an id again changes nothing. From its approval on, or at once if none is required, its
    clients take part in no round. Missing terms come from the run's spec; sifu plan shows what a request would do.
    While a command trains, the request waits in the run's inbox.
    """
    from sifu.cli.federation_commands import read_statement

    opened, nonces = sifu.Run(run), dict[str, str]()
    _add_records(terms, clients, records, run)
    if signed is not None:
        if clients is not None or id is not None or terms:
            raise InputError("a signed request already contains its terms: give --signed without other options")
        received = opened.request_signed(read_statement(signed))
    elif clients is None:
        raise InputError("no clients named: give --clients A,B, or --signed FILE")
    else:
        nonces = new_nonces(terms.get("records") or ())
        received = opened.request(
            client_names(clients), id, deadline_days=deadline, actor=actor, nonces=nonces, **terms
        )
    held = opened.committed(received, nonces) if nonces else {}
    _show_nonces(held)
    found = opened.request_record(received)
    warnings = opened.warnings_of(found)
    told = found.to_mapping() | {"nonces": held, "warnings": warnings}
    return Answer(told, *found.brief(), *(f"Warning: {text}." for text in warnings), *_nonce_lines(nonces, held))


def forget(
    run: RunArgument,
    clients: ClientsOption = None,
    records: RecordsOption = None,
    request: RequestOption = None,
    *,
    terms: TermsGiven,
    device: DeviceOption = "auto",
) -> Answer:
    """Execute the queued requests, one of them, or a new one.

    Each request is executed by its method: for example, a rollback with calibrated noise, then retraining without the
    clients. It gets a signed certificate. An interrupted request is finished first. With --records, the client rejoins
    with its remaining records in the same command.
    """
    from sifu.api import open_run

    _add_records(terms, clients, records, run)
    of_new_requests = [name for name in terms if name != "level"]
    if clients is None and of_new_requests:
        several = len(of_new_requests) > 1
        raise InputError(
            f"{flags(of_new_requests)} belong{'' if several else 's'} to a new request: add --clients, or leave "
            f"{'them' if several else 'it'} out; queued requests keep the terms they were filed with"
        )
    nonces = new_nonces(terms.get("records") or ())
    with RoundsProgress() as progress:
        opened = open_run(run, device=device)
        if not opened.spec.regime.solves and importlib.util.find_spec("torch") is None:
            raise ModuleNotFoundError(name="torch")  # fail before a request is recorded
        outcomes = opened.forget(
            None if clients is None else client_names(clients),
            request,
            progress=progress,
            nonces=nonces,
            filed=lambda _: _show_nonces(nonces),
            **terms,
        )
    answer = _show_outcomes(opened, outcomes)
    held = opened.committed(outcomes[-1].request, nonces) if nonces and outcomes else {}
    return Answer(answer.values | {"nonces": held}, *answer.shown, *_nonce_lines(nonces, held))


def _show_outcomes(run: sifu.Run, outcomes: list[Outcome]) -> Answer:
    """Return the answer of `sifu forget`, with the next command for each request that still waits."""
    values = {"run": str(run.folder), "requests": [outcome.to_mapping() for outcome in outcomes]}
    waiting = [found for found in run.request_records() if found.approvals_missing]
    lacking = [line for found in waiting[:10] for line in found.brief()]
    if not outcomes:
        nothing = f"No request waits. File one with: sifu request {run.folder} --clients A,B"
        return Answer(values, *(["Nothing was executed.", *lacking] if lacking else [nothing]))
    lines = [line for outcome in outcomes for line in outcome.lines()]
    last = outcomes[-1]
    if (last.accuracy, last.mean_squared_error, last.held_out) == (None, None, None):
        lines.append(f"The model is not measured; sifu evaluate {run.folder} measures it.")
    lines.append(f"Certificates are in {run.folder}/certificates. Check them with: sifu verify {run.folder}")
    return Answer(values, *lines, *lacking)


def _show_nonces(nonces: dict[str, str]) -> None:
    """Print nonces as soon as the run has committed to them, because the run does not store them."""
    shown = err if Answer.format is Format.json else out
    if nonces:
        shown.print("Nonces of the records, which are stored nowhere:", soft_wrap=True)
        for identity, nonce in nonces.items():
            shown.print(f"  {identity}: {nonce}", markup=False, soft_wrap=True)


def _nonce_lines(made: dict[str, str], held: dict[str, str]) -> list[str]:
    """Return instructions for the nonces `made` here; the request commits to `held`, to none if filed before."""
    if held:
        return ["Give each person the nonce of their record: sifu verify CERTIFICATE --record X --nonce HEX needs it."]
    return ["The nonces that were shown when the request was first filed count."] if made else []


def _add_records(terms: TermsGiven, clients: str | None, records: str | None, run: Path) -> None:
    """Add the records of `--records` to the other terms."""
    if records is None:
        return
    if clients is None:
        raise InputError("--records needs exactly one client: add --client NAME")
    terms["records"] = read_records(records, by_identity=sifu.Run(run).spec.data.name == "table")
