"""The console as one application: pages, JSON API and static files behind the guard."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from sifu.errors import SifuError
from sifu_console import __version__, finding, json_api, pages, request_pages
from sifu_console.asking import Console, NotKnownError, answer_to, console_of, status_code
from sifu_console.bodies import first_mismatch
from sifu_console.runs import ServedRuns
from sifu_console.security import PROBES, Guard, RateLimit, refused
from sifu_console.tokens import Sessions, TokenFile

if TYPE_CHECKING:
    from sifu_console.sign_in import SignIn

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
    runs = ServedRuns(settings.folders, settings.state)
    logins = RateLimit(LOGINS_PER_SECOND, LOGINS_AT_ONCE)
    app = FastAPI(
        title="sifu console",
        version=__version__,
        openapi_url=f"{json_api.API}/openapi.json",
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
        exception_handlers={
            SifuError: _say_why,
            RequestValidationError: _name_the_field,
            HTTPException: _not_served,
            Exception: _unexpected,
        },
    )
    app.state.console = Console(runs, tokens, Sessions(tokens), settings.secure_cookie, logins, settings.provider)
    for path in PROBES:
        app.add_api_route(path, _probe, include_in_schema=False)
    app.include_router(json_api.router)
    for part in (pages, request_pages, finding):
        app.include_router(part.router, include_in_schema=False)
    if settings.provider is not None:
        from sifu_console.sign_in import router

        app.include_router(router, include_in_schema=False)
    app.mount("/static", StaticFiles(packages=[("sifu_console", "static")]))
    return Guard(app, {*LOOPBACK, *settings.hosts})


def _for_a_program(request: Request) -> bool:
    return request.url.path.startswith(json_api.API)


async def _say_why(request: Request, error: Exception) -> Response:
    """Answer an error with its message; send browsers to the login, or back to the page of their form."""
    assert isinstance(error, SifuError)
    code, (visitor, sentence) = status_code(error), answer_to(request, error)
    if _for_a_program(request):
        headers = {"WWW-Authenticate": "Bearer"} if isinstance(error, NotKnownError) else None
        return JSONResponse({"error": sentence}, code, headers)
    if isinstance(error, NotKnownError):
        return RedirectResponse("/login", 303)
    if request.method == "POST" and visitor and visitor.session and code in (400, 409):
        visitor.session.notes.append(("bad", sentence))
        return RedirectResponse(pages.way_back(request), 303)
    return pages.show("error.html", visitor, code=code, sentence=sentence)


async def _name_the_field(request: Request, error: Exception) -> Response:
    """Answer a body that the API's description forbids with its first mismatch."""
    assert isinstance(error, RequestValidationError)
    return refused(400, first_mismatch(error.errors()))


async def _not_served(request: Request, error: Exception) -> Response:
    """Answer a request that failed with an HTTP error, such as an unknown page or a body that is too large."""
    assert isinstance(error, HTTPException)
    if error.status_code != 404:
        return refused(error.status_code, error.detail)
    if _for_a_program(request):
        return refused(404, "there is nothing at this address")
    return pages.show("error.html", None, 404, sentence="There is no page at this address.")


async def _unexpected(request: Request, error: Exception) -> Response:
    """Answer an error of the console itself, which the guard logs by its type alone."""
    sentence = "an unexpected error of the console: tell an operator"
    if _for_a_program(request):
        return refused(500, sentence)
    return pages.show("error.html", None, 500, sentence=sentence)


def _probe(request: Request) -> Response:
    """Answer a health check; `/readyz` fails if the console cannot read its tokens or find runs."""
    if request.url.path == "/readyz":
        console = console_of(request)
        try:
            console.tokens.all()
            console.runs.every_run()
        except (SifuError, OSError) as error:
            return JSONResponse({"status": "not ready", "because": type(error).__name__}, 503)
    return JSONResponse({"status": "ok"})
