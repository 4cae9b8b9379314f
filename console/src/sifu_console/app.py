"""The console as one application: pages, JSON API and static files behind the guard."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from sifu.errors import SifuError
from sifu_console import finding, json_api, pages, request_pages
from sifu_console.asking import Console
from sifu_console.security import PROBES, Guard, RateLimit, refused
from sifu_console.service import ConsoleService
from sifu_console.tokens import Sessions, TokenFile

if TYPE_CHECKING:
    from sifu_console.sign_in import SignIn

STATIC = {
    "console.css": "text/css; charset=utf-8",
    "console.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
LOOPBACK = ("localhost", "127.0.0.1", "::1")
LOGINS_PER_SECOND, LOGINS_AT_ONCE = 0.2, 10


@dataclass(frozen=True)
class Settings:
    """Settings of a console; `hosts` are the host names it answers to in addition to localhost."""

    folders: Sequence[Path]
    state: Path
    hosts: Collection[str] = ()
    secure_cookie: bool = False
    provider: SignIn | None = None


def make_app(settings: Settings) -> ASGIApp:
    """Return the application, ready for a server."""
    tokens = TokenFile(settings.state)
    service = ConsoleService(settings.folders, settings.state)
    logins = RateLimit(LOGINS_PER_SECOND, LOGINS_AT_ONCE)
    console = Console(service, tokens, Sessions(tokens), settings.secure_cookie, logins, settings.provider)

    static = [Route(f"/static/{name}", _static_file) for name in STATIC]
    probes = [Route(path, _probe) for path in PROBES]
    parts = (pages, request_pages, finding, json_api)
    routes = [*probes, *(route for part in parts for route in part.ROUTES), *static]
    if settings.provider is not None:
        from sifu_console.sign_in import ROUTES

        routes += ROUTES
    app = Starlette(routes=routes, exception_handlers=dict.fromkeys((404, 413), _not_served))
    app.state.console = console
    return Guard(app, {*LOOPBACK, *settings.hosts})


async def _not_served(request: Request, error: Exception) -> Response:
    """Answer a request that failed with an HTTP error, such as an unknown page or a body that is too large."""
    assert isinstance(error, HTTPException)
    if error.status_code != 404:
        return refused(error.status_code, error.detail)
    if request.url.path.startswith("/api/"):
        return refused(404, "there is nothing at this address")
    return pages.show("error.html", None, 404, sentence="There is no page at this address.")


async def _probe(request: Request) -> Response:
    """Answer a health check; `/readyz` fails if the console cannot read its tokens or find runs."""
    if request.url.path == "/readyz":
        console: Console = request.app.state.console
        try:
            await run_in_threadpool(console.tokens.all)
            await run_in_threadpool(console.service.every_run)
        except (SifuError, OSError) as error:
            return JSONResponse({"status": "not ready", "because": type(error).__name__}, 503)
    return JSONResponse({"status": "ok"})


async def _static_file(request: Request) -> Response:
    name = request.url.path.rsplit("/", 1)[1]
    content = files("sifu_console").joinpath("static", name).read_bytes()
    return Response(content, media_type=STATIC[name], headers={"Cache-Control": "max-age=300"})
