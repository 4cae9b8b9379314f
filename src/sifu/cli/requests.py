"""Commands for the record of requests: decide on one, list them, answer a client."""

from __future__ import annotations

from typing import Annotated

import typer

from sifu.cli.options import Format, FormatOption, RunArgument

RequestArgument = Annotated[str, typer.Argument(metavar="ID", help="The request.")]


def decide(
    run: RunArgument,
    request: RequestArgument,
    decision: Annotated[str, typer.Argument(metavar="verified|refused|withdrawn", help="What was decided.")],
    reason: Annotated[str, typer.Option("--reason", help="Why; a refusal needs one.")] = "",
    actor: Annotated[str | None, typer.Option("--actor", help="Who decided; or set SIFU_ACTOR.")] = None,
    format: FormatOption = Format.text,
) -> None:
    """Record that a waiting request was verified, refused or withdrawn."""
    from sifu.api import Run
    from sifu.cli.output import out, print_json

    new = Run(run).decide(request, decision, reason, actor)
    if format is Format.json:
        print_json({"request": request, "status": decision, "changed": new})
    else:
        out.print(f"Request {request} {'is' if new else 'was already'} {decision}.", markup=False)


def requests(
    run: RunArgument,
    public: Annotated[bool, typer.Option("--public", help="Without personal data: no names, ids or actors.")] = False,
    format: FormatOption = Format.text,
) -> None:
    """Every request with its steps, times, actors and deadline; --public for publication."""
    from rich.markup import escape

    from sifu.api import Run
    from sifu.cli.commands import table
    from sifu.cli.output import names_text, out, print_json

    opened = Run(run)
    if public:
        record = opened.public_record()
        if format is Format.json:
            print_json({"requests": record})
            return
        shown = table("-number", "status", "-clients", "received", "until", "finished", "level")
        for one in record:
            until = one["deadline"] + (" overdue" if one["overdue"] else "")
            level = one["level"] or "-"
            finished = one["finished"] or "-"
            shown.add_row(
                str(one["number"]), one["status"], str(one["clients"]), one["received"], until, finished, level
            )
        out.print(shown)
        return
    listed = [one | {"steps": opened.request_history(one["request"])} for one in opened.status()["requests"]]
    if format is Format.json:
        print_json({"requests": listed})
        return
    for one in listed:
        late = " [bold red]overdue[/]" if one["overdue"] else ""
        out.print(f"[bold]{one['request']}[/]: {names_text(one['clients'])}; until {one['deadline'][:10]}{late}")
        for step in one["steps"]:
            why = f": {escape(step['reason'])}" if step["reason"] else ""
            out.print(f"  {step['time']} {step['status']} by {escape(step['actor'])}{why}")
    if not listed:
        out.print("There are no requests.")


certificate = typer.Typer(
    name="certificate", help="Show a certificate, or put it into plain words for the client.", no_args_is_help=True
)


@certificate.callback()
def _group() -> None:
    """Certificates."""


@certificate.command("show")
def show(
    run: RunArgument,
    request: RequestArgument,
    public: Annotated[bool, typer.Option("--public", help="The answer to the client, in plain words.")] = False,
    format: FormatOption = Format.text,
) -> None:
    """A certificate; with --public the answer to the client in plain words."""
    from sifu.api import Run
    from sifu.cli.output import out, print_json
    from sifu.requests.request_record import plain_answer

    content = Run(run).certificate(request, "public" if public else "auditor")
    if format is Format.json or not public:
        print_json(content)
        return
    for line in plain_answer(content["body"]):
        out.print(line, markup=False)
