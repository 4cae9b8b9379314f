"""The commands `sifu requests|decide|certificate`: filed requests, decisions on them, and their certificates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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
from sifu.cli.output import Answer, table
from sifu.core.operator_words import approvals_words
from sifu.errors import InputError, SifuError

if TYPE_CHECKING:
    from sifu.api import Request

DECISIONS: dict[str, Decision] = {
    "verify": "verified",
    "approve": "approved",
    "refuse": "refused",
    "withdraw": "withdrawn",
}
"""Recorded decision of each word of `sifu decide`, besides `settle`."""
PUBLIC = ("number", "status", "clients", "records", "received", "deadline", "finished", "level")
"""Columns of the list without personal data."""


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
    from sifu.api import find_runs

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
    runs = [sifu.Run(found) for found in (find_runs(folder) or [folder])]
    if not public:
        return _show({run: run.request_records() for run in runs})
    if len(runs) > 1:
        raise InputError(f"--public lists the requests of one run, found {len(runs)} runs: name one of them")
    return _show_public(runs[0].request_records())


def _show_pending(folder: Path, overdue: bool) -> Answer:
    from sifu.api import find_runs, pending_requests
    from sifu.cli.runs import warn

    runs, unread, code = find_runs(folder) or [folder], list[str](), 0
    waiting: list[Request] = []
    for run in runs:
        try:
            waiting += [row for row in pending_requests(run) if row.overdue or not overdue]
        except SifuError as error:
            if len(runs) == 1:
                raise
            warn(f"{run} cannot be listed: {error}")
            unread.append(str(run))
            code = error.exit_code
    waiting.sort(key=lambda request: (request.deadline, request.run, request.request))
    named = len(runs) > 1
    lines = [f"{request.run} " * named + line for request in waiting for line in request.brief()]
    listed = {"requests": [request.to_mapping() for request in waiting], "unread": unread}
    none = f"No request {'is overdue' if overdue else 'waits'}{' in the other runs' if unread else ''}."
    return Answer(listed, *(lines or [none]), code=code)


def _show_public(listed: list[Request]) -> Answer:
    values = [request.to_public_mapping() for request in listed]
    shown = table(*(f"-{name}" if name in ("number", "clients", "records") else name for name in PUBLIC))
    for row in values:
        shown.add_row(*(str(row[name] or "-") for name in PUBLIC))
    return Answer({"requests": values}, shown)


def _examine(run: sifu.Run, request: str) -> None:
    """Examine the requests that were submitted through the console; raise if this one is refused."""
    from sifu.api.submitted import examine

    if reason := examine(run).get(request):
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
    digest: Annotated[
        str | None, option("Digest of the terms decided on, see sifu requests.", "--terms", metavar="HEX")
    ] = None,
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
    decided = opened.decide(request, status, reason, actor, digest)
    values: dict[str, object] = {"request": request, "status": status, "changed": decided == "recorded"}
    if decided == "posted":
        sentence = (
            f"The decision that request {request} is {status} waits in the inbox of the running server, which will "
            "ingest it soon."
        )
        return Answer(values | {"posted": True}, sentence)
    found = opened.request_record(request)
    missing, further = found.approvals_missing, f" Next: {found.next}" if found.next else ""
    more = f" It needs {approvals_words(missing)}." if missing else ""
    sentence = f"Request {request} {'is' if decided == 'recorded' else 'was already'} {status}.{more}{further}"
    return Answer(values | {"approvals_missing": missing, "next": found.next}, sentence)


def _show(records: dict[sifu.Run, list[Request]], identities: Sequence[str] = (), besides: str = "") -> Answer:
    from sifu.api.submitted import submitted

    lines = []
    for run, of_run in records.items():
        lines += [f"{run.folder}:"] if len(records) > 1 else []
        lines += [line for request in of_run for line in request.lines(identities, besides)]
        lines += [] if of_run else ["There are no requests."]
        lines += [
            f"{message.request} was submitted through the console and is not examined yet: sifu requests "
            f"{run.folder} {message.request}"
            for message in submitted(run.folder)
        ]
    listed = [request.to_mapping() for of_run in records.values() for request in of_run]
    listed = [row | {"identities": list(identities)} for row in listed] if identities else listed
    listed = [row | {"also_left_out": besides} for row in listed] if besides else listed
    return Answer({"requests": listed}, *lines)


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
    opened = sifu.Run(run)
    if bundle is not None:
        path = opened.write_bundle(request, bundle)
        return Answer(
            {"bundle": str(path), "request": request}, f"Wrote {path}, which anybody checks with sifu verify."
        )

    shown = opened.certificate(request, "public" if public else "auditor")
    return Answer(shown.to_mapping, *shown.lines(everything or public))
