"""The commands `sifu serve` and `sifu token`: the console in the browser, and the rights of its users."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from rich.markup import escape

from sifu.cli.options import Commands, argument, option
from sifu.cli.output import Answer, out, table
from sifu.errors import InputError


def serve(
    folders: Annotated[list[Path], argument("FOLDER...", "Folders with runs, or run folders.")],
    port: Annotated[int, option("Where to listen.")] = 8765,
    host: Annotated[str, option("The address to listen at.")] = "127.0.0.1",
    names: Annotated[
        list[str] | None, option("A host name people use for it; may be given again.", "--name", metavar="HOST")
    ] = None,
    certificate: Annotated[Path | None, option("Its certificate (PEM).", "--tls-cert")] = None,
    key: Annotated[Path | None, option("The key of the certificate (PEM).", "--tls-key")] = None,
    without_tls: Annotated[
        bool, option("Listen beyond this machine though nothing here encrypts.", "--without-tls")
    ] = False,
    proxies: Annotated[
        list[str] | None,
        option("Believe X-Forwarded-For of this address; may be given again.", "--proxy", metavar="ADDRESS"),
    ] = None,
    issuer: Annotated[
        str | None, option("Let people sign in with this OpenID Connect issuer.", "--sign-in", metavar="URL")
    ] = None,
    client: Annotated[
        str, option("Our id there; its secret is SIFU_SIGN_IN_SECRET.", "--sign-in-client", metavar="ID")
    ] = "sifu",
    webhooks: Annotated[list[str] | None, option("Tell this URL of requests; may be given again.", "--webhook")] = None,
    data: Annotated[Path | None, option("Folder with data files (or set SIFU_DATA).")] = None,
) -> None:
    """Serve the console: runs in the browser, requests with approval, a JSON API, metrics. Needs the extra console.

    It listens on this machine alone, and refuses anything else without TLS. People log in with tokens, see sifu token.
    Ctrl-C ends it and nothing else: requests that are being executed go on.
    """
    from sifu.console.serving import Binding, check_binding, check_tokens_exist, listen
    from sifu.console.serving import serve as answer
    from sifu.console.tokens import TokenFile, state_folder

    binding = Binding(host, port, certificate, key, without_tls, names or [], proxies or [])
    check_binding(binding)
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder: name folders that hold runs")
    state = state_folder(folders[0])
    check_tokens_exist(TokenFile(state), folders[0])
    from sifu.console.app import Settings, make_app

    provider = None
    if issuer is not None:
        from sifu.console.sign_in import SignIn

        provider = SignIn(issuer, client, os.environ.get("SIFU_SIGN_IN_SECRET", ""))
    listening = listen(binding)
    app = make_app(
        Settings(
            folders=folders,
            state=state,
            data_folder=data,
            hosts=[host, *(names or [])],
            secure_cookie=binding.encrypted,
            webhooks=webhooks or [],
            provider=provider,
        )
    )
    out.print(f"The console listens at {'https' if binding.tls else 'http'}://{host}:{port}", markup=False)
    answer(app, binding, listening)


token = Commands("token", "Tokens of the console: make one for each person or system, list them, revoke one.")
FolderArgument = Annotated[Path, argument("FOLDER", "The first folder that sifu serve is given.")]


@token.command("create")
def create_token(
    folder: FolderArgument,
    name: Annotated[str, option("Whose it is; decisions are recorded under this name.")],
    roles: Annotated[
        list[str], option("requester, approver, auditor or operator; may be given again.", "--role", metavar="ROLE")
    ],
    days: Annotated[int | None, option("How long it works.", show_default="for ever")] = None,
    sign_in: Annotated[
        bool, option("They sign in elsewhere (sifu serve --sign-in) as this e-mail address.", "--sign-in")
    ] = False,
) -> Answer:
    """Make a token and show it once; only a hash of it is stored.

    A requester files requests and sees their own. An approver sees runs and approves or refuses. An auditor sees
    everything and changes nothing. An operator files, refuses, withdraws and executes, and approves nothing.
    """
    from sifu.console.tokens import TokenFile, state_folder

    created, secret = TokenFile(state_folder(folder)).create(name, roles, days, sign_in=sign_in)
    return Answer(
        {name: getattr(created, name) for name in ("id", "name", "roles", "expires")} | {"token": secret},
        f"Token {created.id} of {created.name} ({', '.join(created.roles)})"
        f"{f', until {created.expires}' if created.expires else ''}:",
        f"  {secret or 'none: they sign in with their provider'}",
        *(["It is shown this once. Hand it over on a safe way."] if secret else []),
    )


@token.command("list")
def list_tokens(folder: FolderArgument) -> Answer:
    """Every token that was made, without its secret."""
    from sifu.console.tokens import TokenFile, state_folder

    tokens = TokenFile(state_folder(folder)).all()
    fields = ("id", "name", "created", "expires", "revoked")
    listed = [{field: getattr(row, field) for field in fields} | {"roles": list(row.roles)} for row in tokens]
    shown = table("id", "name", "roles", "made", "until", "revoked")
    for row in tokens:
        until = row.expires or "-"
        shown.add_row(row.id, escape(row.name), ", ".join(row.roles), row.created[:10], until, row.revoked[:10] or "-")
    return Answer({"tokens": listed}, shown)


@token.command("revoke")
def revoke_token(
    folder: FolderArgument,
    who: Annotated[str, argument("NAME|ID", "Whose token, or which.")],
) -> Answer:
    """Let a token open nothing from now on; a running console notices at once."""
    from sifu.console.tokens import TokenFile, state_folder

    revoked = TokenFile(state_folder(folder)).revoke(who)
    names = ", ".join(f"{row.id} of {row.name}" for row in revoked)
    return Answer({"revoked": [row.id for row in revoked]}, f"Revoked {names}.")
