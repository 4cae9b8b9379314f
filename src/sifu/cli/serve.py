"""`sifu serve`: the operator's desk in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sifu.errors import InputError


def serve(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Folders with runs, or run folders.")],
    port: Annotated[int, typer.Option("--port", help="Where to listen.")] = 8765,
    host: Annotated[str, typer.Option("--host", help="The address to listen at.")] = "127.0.0.1",
    names: Annotated[
        list[str] | None,
        typer.Option("--name", help="A host name people use for it; may be given again.", metavar="HOST"),
    ] = None,
    certificate: Annotated[Path | None, typer.Option("--tls-cert", help="Its certificate (PEM).")] = None,
    key: Annotated[Path | None, typer.Option("--tls-key", help="The key of the certificate (PEM).")] = None,
    without_tls: Annotated[
        bool, typer.Option("--without-tls", help="Listen beyond this machine though nothing here encrypts.")
    ] = False,
    proxies: Annotated[
        list[str] | None,
        typer.Option("--proxy", help="Believe X-Forwarded-For of this address; may be given again.", metavar="ADDRESS"),
    ] = None,
    webhooks: Annotated[
        list[str] | None, typer.Option("--webhook", help="Tell this URL of requests; may be given again.")
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", help="Folder with data files (or set SIFU_DATA).")] = None,
) -> None:
    """The console: all runs in the browser, requests with approval, a JSON API, metrics. Needs sifu\\[console].

    It listens on this machine alone, and refuses anything else without TLS. People log in with tokens, see sifu token.
    Ctrl-C ends it and nothing else: requests that are being carried out go on.
    """
    from sifu.cli.output import out
    from sifu.console.serving import Binding, check_binding, check_somebody_may_enter, listen
    from sifu.console.serving import serve as answer
    from sifu.console.tokens import TokenFile, state_folder

    binding = Binding(host, port, certificate, key, without_tls, names or [], proxies or [])
    check_binding(binding)
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder: name folders that hold runs")
    state = state_folder(folders[0])
    check_somebody_may_enter(TokenFile(state), folders[0])
    try:
        from sifu.console.app import Settings, make_app
    except ModuleNotFoundError as error:
        raise InputError(f"the console needs {error.name}: pip install 'sifu[console]'") from error
    listening = listen(binding)
    app = make_app(
        Settings(
            folders=folders,
            state=state,
            data_folder=data,
            hosts=[host, *(names or [])],
            secure_cookie=binding.encrypted,
            webhooks=webhooks or [],
        )
    )
    out.print(f"The console listens at {'https' if binding.tls else 'http'}://{host}:{port}", markup=False)
    answer(app, binding, listening)
