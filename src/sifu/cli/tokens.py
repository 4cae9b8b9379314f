"""`sifu token`: who may do what in the console."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sifu.cli.options import Format, FormatOption

token = typer.Typer(
    name="token", help="Tokens of the console: make one for each person or system, list them, revoke one.",
    no_args_is_help=True,
)  # fmt: skip
FolderArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="The first folder that sifu serve is given.")]


@token.command("create")
def create_token(
    folder: FolderArgument,
    name: Annotated[str, typer.Option("--name", help="Whose it is; decisions are recorded under this name.")],
    roles: Annotated[
        list[str],
        typer.Option("--role", help="requester, approver, auditor or operator; may be given again.", metavar="ROLE"),
    ],
    days: Annotated[int | None, typer.Option("--days", help="How long it works.", show_default="for ever")] = None,
    format: FormatOption = Format.text,
) -> None:
    """Make a token and show it once; only a hash of it is stored.

    A requester files requests and sees their own. An approver sees runs and approves or refuses. An auditor sees
    everything and changes nothing. An operator files, refuses, withdraws and carries out, and approves nothing.
    """
    from sifu.cli.output import tell
    from sifu.console.tokens import TokenFile, state_folder

    created, secret = TokenFile(state_folder(folder)).create(name, roles, days)
    tell(
        format,
        {
            "id": created.id,
            "name": created.name,
            "roles": list(created.roles),
            "expires": created.expires,
            "token": secret,
        },
        f"Token {created.id} of {created.name} ({', '.join(created.roles)})"
        f"{f', until {created.expires}' if created.expires else ''}:",
        f"  {secret}",
        "It is shown this once. Hand it over on a safe way.",
    )


@token.command("list")
def list_tokens(folder: FolderArgument, format: FormatOption = Format.text) -> None:
    """Every token that was made, without its secret."""
    from rich.markup import escape

    from sifu.cli.output import out, print_json, table
    from sifu.console.tokens import TokenFile, state_folder

    tokens = TokenFile(state_folder(folder)).all()
    if format is Format.json:
        fields = ("id", "name", "created", "expires", "revoked")
        listed = [{field: getattr(row, field) for field in fields} | {"roles": list(row.roles)} for row in tokens]
        print_json({"tokens": listed})
        return
    shown = table("id", "name", "roles", "made", "until", "revoked")
    for row in tokens:
        until = row.expires or "-"
        shown.add_row(row.id, escape(row.name), ", ".join(row.roles), row.created[:10], until, row.revoked[:10] or "-")
    out.print(shown)


@token.command("revoke")
def revoke_token(
    folder: FolderArgument,
    who: Annotated[str, typer.Argument(metavar="NAME|ID", help="Whose token, or which.")],
    format: FormatOption = Format.text,
) -> None:
    """Let a token open nothing from now on; a running console notices at once."""
    from sifu.cli.output import tell
    from sifu.console.tokens import TokenFile, state_folder

    revoked = TokenFile(state_folder(folder)).revoke(who)
    names = ", ".join(f"{row.id} of {row.name}" for row in revoked)
    tell(format, {"revoked": [row.id for row in revoked]}, f"Revoked {names}.")
