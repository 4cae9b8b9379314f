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
    port: Annotated[int, option("Port to listen on.")] = 8765,
    host: Annotated[str, option("Address to listen on.")] = "127.0.0.1",
    names: Annotated[
        list[str] | None, option("Host name that people use for the console; repeatable.", "--name", metavar="HOST")
    ] = None,
    certificate: Annotated[Path | None, option("TLS certificate (PEM).", "--tls-cert")] = None,
    key: Annotated[Path | None, option("Private key of the TLS certificate (PEM).", "--tls-key")] = None,
    without_tls: Annotated[
        bool, option("Accept connections from other machines without encryption.", "--without-tls")
    ] = False,
    proxies: Annotated[
        list[str] | None,
        option("Proxy whose X-Forwarded-For is trusted; repeatable.", "--proxy", metavar="ADDRESS"),
    ] = None,
    issuer: Annotated[
        str | None, option("OpenID Connect issuer that people sign in with.", "--sign-in", metavar="URL")
    ] = None,
    client: Annotated[
        str, option("Client id at the issuer; its secret is SIFU_SIGN_IN_SECRET.", "--sign-in-client", metavar="ID")
    ] = "sifu",
) -> None:
    """Serve the console in the browser, and its JSON API.

    By default it accepts connections from this machine only; other machines need TLS. People log in with tokens, see
    sifu token. Ctrl-C stops only the console: requests in execution continue.
    """
    from sifu_console.serving import Binding, check_binding, check_tokens_exist, listen
    from sifu_console.serving import serve as answer
    from sifu_console.tokens import TokenFile, state_folder

    binding = Binding(host, port, certificate, key, without_tls, names or [], proxies or [])
    check_binding(binding)
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder: give folders that contain runs")
    state = state_folder(folders[0])
    check_tokens_exist(TokenFile(state), folders[0])
    from sifu_console.app import Settings, make_app

    provider = None
    if issuer is not None:
        from sifu_console.sign_in import SignIn

        provider = SignIn(issuer, client, os.environ.get("SIFU_SIGN_IN_SECRET", ""))
    listening = listen(binding)
    app = make_app(
        Settings(
            folders=folders,
            state=state,
            hosts=[host, *(names or [])],
            secure_cookie=binding.encrypted,
            provider=provider,
        )
    )
    out.print(f"The console listens at {'https' if binding.tls else 'http'}://{host}:{port}", markup=False)
    answer(app, binding, listening)


token = Commands("token", "Create, list and revoke tokens of the console.")
FolderArgument = Annotated[Path, argument("FOLDER", "First folder given to sifu serve.")]


@token.command("create")
def create_token(
    folder: FolderArgument,
    name: Annotated[str, option("Name of the owner; decisions are recorded under it.")],
    roles: Annotated[
        list[str], option("Role: requester, approver, auditor or operator; repeatable.", "--role", metavar="ROLE")
    ],
    days: Annotated[int | None, option("Days until the token expires.", show_default="never")] = None,
    sign_in: Annotated[
        bool,
        option(
            "Create no secret: the owner signs in with --name as e-mail address (sifu serve --sign-in).", "--sign-in"
        ),
    ] = False,
) -> Answer:
    """Create a token and show it once; only its hash is stored.

    A requester files requests and sees only those. An approver sees runs, and approves or refuses requests. An auditor
    sees everything and changes nothing. An operator files, refuses, withdraws and executes requests, but does not
    approve them.
    """
    from sifu_console.tokens import TokenFile, state_folder

    created, secret = TokenFile(state_folder(folder)).create(name, roles, days, sign_in=sign_in)
    return Answer(
        {name: getattr(created, name) for name in ("id", "name", "roles", "expires")} | {"token": secret},
        f"Token {created.id} of {created.name} ({', '.join(created.roles)})"
        f"{f', until {created.expires}' if created.expires else ''}:",
        f"  {secret or 'none: they sign in with their provider'}",
        *(["This is the only time it is shown. Pass it on through a secure channel."] if secret else []),
    )


@token.command("list")
def list_tokens(folder: FolderArgument) -> Answer:
    """List all tokens, without their secrets."""
    from sifu_console.tokens import TokenFile, state_folder

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
    who: Annotated[str, argument("NAME|ID", "Owner whose tokens to revoke, or the id of one token.")],
) -> Answer:
    """Revoke a token immediately, even in a running console."""
    from sifu_console.tokens import TokenFile, state_folder

    revoked = TokenFile(state_folder(folder)).revoke(who)
    names = ", ".join(f"{row.id} of {row.name}" for row in revoked)
    return Answer({"revoked": [row.id for row in revoked]}, f"Revoked {names}.")
