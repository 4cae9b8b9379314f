"""The pages: forms and tables that work without JavaScript, filled by jinja2, which escapes everything."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from sifu.choices import terms_on_offer
from sifu.console.asking import (
    Console,
    NotKnownError,
    client_names,
    console_of,
    days,
    read_form,
    status_code,
    terms_given,
    visitor_of,
    work,
)
from sifu.console.desk import Desk
from sifu.console.rendering import charts, expected_words, render
from sifu.console.run_at_desk import RunAtDesk
from sifu.console.tokens import COOKIE, LONGEST_SECONDS, TERMS_OF_REQUESTERS, Session, Token, Visitor
from sifu.core.method_info import METHOD_INFOS
from sifu.core.request_terms import AUTO
from sifu.core.wording import psi_words
from sifu.errors import InputError, NotCertifiableError, SifuError
from sifu.requests.letters import usual_terms
from sifu.store.reader import clients_now, plain_name

Handler = Callable[[Request], Awaitable[Response]]
CLIENTS_PER_PAGE = 100
MOST_LINES = 200
"""Requests on the first page; the list of requests has all."""
MOST_PICKED = 2000
"""Clients that the picker of the form offers; others are typed."""
FILE_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""For documents of our own that carry their style within: the report and figures."""


def page(handler: Handler) -> Handler:
    """Errors become a page with a sentence; visitors who are not logged in are redirected to the login page."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except NotKnownError:
            return RedirectResponse("/login", 303)
        except SifuError as error:
            visitor = console_of(request).sessions.visitor(request)
            if request.method == "POST" and visitor and visitor.session and status_code(error) in (400, 409):
                visitor.session.notes.append(("bad", str(error)))
                return RedirectResponse(way_back(request), 303)
            return show("error.html", visitor, code=status_code(error), sentence=str(error))

    answer.__name__ = handler.__name__
    return answer


def way_back(request: Request) -> str:
    """The page of the run that a form belongs to."""
    run = request.path_params.get("run")
    return f"/runs/{quote(str(run))}" if run else "/"


def show(template: str, visitor: Visitor | None, code: int = 200, **values: Any) -> HTMLResponse:
    """A page for a visitor, with what is to be said to them."""
    session = visitor.session if visitor else None
    text = render(
        template,
        who=visitor.token if visitor else None,
        csrf=session.csrf if session else "",
        notes=session.take_notes() if session else [],
        **values,
    )
    return HTMLResponse(text, code)


async def show_login(request: Request) -> Response:
    """The door."""
    return _door(request)


def _door(request: Request, code: int = 200) -> Response:
    return show("login.html", None, code, wrong=code == 401, sign_in=console_of(request).sign_in is not None)


@page
async def log_in(request: Request) -> Response:
    """Begin a session with a token."""
    console = console_of(request)
    fields = await read_form(request)
    session = await work(console.sessions.begin, fields.get("token", ""))
    if session is None:
        # Only wrong ones are counted, so that they lock out no one else who comes from the same address.
        if console.logins.allows(request.client.host if request.client else "unknown"):
            return _door(request, 401)
        return show("error.html", None, 429, sentence="too many attempts: wait a minute")
    return enter(console, session, RedirectResponse("/", 303))


def enter(console: Console, session: Session, response: Response) -> Response:
    """Hand a browser the cookie of its session."""
    response.set_cookie(
        COOKIE,
        session.id,
        max_age=int(LONGEST_SECONDS),
        httponly=True,
        samesite="strict",
        secure=console.secure_cookie,
    )
    return response


@page
async def log_out(request: Request) -> Response:
    """End the session."""
    visitor = visitor_of(request)
    await read_form(request, visitor)
    if visitor.session:
        console_of(request).sessions.end(visitor.session)
    response = RedirectResponse("/login", 303)
    response.delete_cookie(COOKIE)
    return response


@page
async def home(request: Request) -> Response:
    """All runs, and what waits in them."""
    visitor, desk = visitor_of(request), console_of(request).desk
    runs = await work(_with_live, desk, visitor.token)
    lines = await work(desk.lines, visitor.token)
    if visitor.token.may("see"):
        lines = [line for line in lines if not line.settled]
    return show("home.html", visitor, runs=runs, lines=lines[:MOST_LINES], more=len(lines) - MOST_LINES)


def _with_live(desk: Desk, who: Token) -> list[tuple[RunAtDesk, Any, str]]:
    """Every run with what it does now, or the sentence that says why it cannot be read: it hides no other."""

    def read(run: RunAtDesk) -> tuple[Any, str]:
        try:
            return run.live() if who.may("see") else None, ""
        except SifuError as error:
            return None, str(error)

    return [(run, *read(run)) for run in desk.runs(who)]


@page
async def show_run(request: Request) -> Response:
    """One run: what it does now, its requests, and what can be asked of it."""
    visitor, desk, key = visitor_of(request), console_of(request).desk, request.path_params["run"]
    number = request.query_params.get("forget", "")
    chosen = int(number) if number.isdecimal() and len(number) < 8 else None
    return show("run.html", visitor, **await work(_run_values, desk, visitor.token, key, chosen))


def _run_values(desk: Desk, who: Token, key: str, chosen: int | None = None) -> dict[str, Any]:
    run, may_see = desk.find(who, key), who.may("see")
    spec = run.run.spec
    clients = [client for client in _clients(run) if client[1]] if may_see and who.may("file") else []
    offered = terms_on_offer()
    return {
        "run": run,
        "live": desk.live(who, key) if may_see else None,
        "spec": spec,
        "lines": desk.lines(who, key),
        "verified": desk.last_verification(who, key) if may_see else None,
        "jobs": desk.jobs.of_run(key)[:5] if may_see else [],
        "has_report": (run.folder / "report" / "index.html").is_file(),
        "approval": spec.requests.approval,
        "terms_offered": offered if who.may("set terms") else {name: offered[name] for name in TERMS_OF_REQUESTERS},
        "methods": [AUTO, *(name for name, info in METHOD_INFOS.items() if info.certifies)],
        "usual": usual_terms(spec, ["-"]).to_mapping(),
        "clients": [name for name, _, _ in clients[:MOST_PICKED]],
        "fields": {"clients": "".join(name for name, _, number in clients if number == chosen)},
        "errors": {},
    }


def _clients(run: RunAtDesk) -> list[tuple[str, bool, int]]:
    """Names, whether they can be asked to be forgotten, and numbers of the clients of a run."""
    with run.run.view() as view:
        active = set(view.active.tolist())
        now = enumerate(clients_now(view.reader))
        return [(plain_name(view.reader, client), client in active, number) for number, client in now]


@page
async def show_clients(request: Request) -> Response:
    """The clients of a run, a page of them, the most influential first."""
    visitor, desk, key = visitor_of(request), console_of(request).desk, request.path_params["run"]
    number = page_number(request.query_params.get("page", ""))
    status = await work(desk.status, visitor.token, key)
    numbered = enumerate(status.clients)
    clients = sorted(numbered, key=lambda row: (row[1].state != "active", -row[1].psi, row[1].name))
    first = (number - 1) * CLIENTS_PER_PAGE
    return show(
        "clients.html",
        visitor,
        run=desk.find(visitor.token, key),
        clients=clients[first : first + CLIENTS_PER_PAGE],
        count=len(clients),
        page=number,
        pages=-(-len(clients) // CLIENTS_PER_PAGE),
        closed_form=status.closed_form,
        psi_words=psi_words(status.psi_status).replace("Psi", "Ψ"),
    )


def page_number(text: str) -> int:
    """The page of a list that was asked for."""
    return max(1, int(text)) if text.isdecimal() and len(text) < 8 else 1


@page
async def file_request(request: Request) -> Response:
    """File a request from the form."""
    visitor, desk, key = visitor_of(request), console_of(request).desk, request.path_params["run"]
    fields = await read_form(request, visitor)
    try:
        names = {name for name, _, _ in await work(_clients, desk.find(visitor.token, key))}
        clients = client_names(fields.get("clients", ""), names)
        terms = terms_given({name: fields.get(name, "") for name in terms_on_offer()})
        if "plan" in fields:
            terms["method"] = AUTO
            plan = await work(desk.plan, visitor.token, key, clients, terms)
            run = desk.find(visitor.token, key)
            return show("ways.html", visitor, run=run, plan=plan, clients=clients, fields=fields)
        name = fields.get("request", "").strip() or None
        if fields.get("release") == "now" and visitor.token.may("set terms"):
            check_confirmed(fields, "releasing a model before it has healed")
        filed = await work(desk.file, visitor.token, key, clients, name, days(fields.get("deadline_days")), terms)
    except (InputError, NotCertifiableError) as error:
        values = await work(_run_values, desk, visitor.token, key)
        values |= {"fields": fields, "errors": {_field_of(str(error)): str(error)}}
        return show("run.html", visitor, code=status_code(error), **values)
    note(visitor, f"Request {filed} was filed.")
    return RedirectResponse(way_back(request), 303)


def _field_of(sentence: str) -> str:
    """The field of the form that an error is about; the clients where nothing else is named."""
    first = sentence.split()[0] if sentence.split() else ""
    if first in terms_on_offer():
        return first
    words = {"deadline": "deadline_days", "request id": "request", "use another id": "request", "level": "level"}
    words |= {"record": "records", "row ": "records", "identit": "records"}
    return next((field for word, field in words.items() if word in sentence), "clients")


def check_confirmed(fields: dict[str, str], what: str) -> None:
    """Refuse an irreversible action unless its confirmation box is ticked."""
    if fields.get("confirm") != "yes":
        raise InputError(f"{what} cannot be undone: tick the box to confirm it")


@page
async def verify(request: Request) -> Response:
    """Start a verification."""
    return await _start(request, console_of(request).desk.verify, "The run is being verified.")


@page
async def write_report(request: Request) -> Response:
    """Start to write the report."""
    return await _start(request, console_of(request).desk.write_report, "The report is being written.")


async def _start(request: Request, action: Callable[[Token, str], object], sentence: str) -> Response:
    """Begin something that a run is asked to do, and say so on its page."""
    visitor = visitor_of(request)
    await read_form(request, visitor)
    await work(action, visitor.token, request.path_params["run"])
    note(visitor, sentence)
    return RedirectResponse(way_back(request), 303)


def note(visitor: Visitor, sentence: str) -> None:
    """Something good for the visitor's next page to say."""
    if visitor.session:
        visitor.session.notes.append(("good", sentence))


@page
async def show_report(request: Request) -> Response:
    """The report as it was last written."""
    visitor, desk, key = visitor_of(request), console_of(request).desk, request.path_params["run"]
    content = await work(desk.report, visitor.token, key)
    return HTMLResponse(content, headers={"Content-Security-Policy": FILE_POLICY})


def live_values(desk: Desk, who: Token, key: str) -> dict[str, Any]:
    """What a page shows without being loaded again; `stamp` changes when more of it must be fetched."""
    live = desk.live(who, key)
    jobs = [asdict(job) for job in desk.jobs.of_run(key)[:5]]
    states = "".join(f"{job['id']}{job['state']}" for job in jobs)
    stamp = f"{live.phase}|{live.request}|{live.last_step}|{live.waiting}|{live.overdue}|{live.at_work}|{states}"
    rendered = {"charts": str(charts(live)), "expected_words": expected_words(live)}
    return live.to_mapping() | {"jobs": jobs, "stamp": stamp} | rendered


ROUTES = [
    Route("/login", show_login, methods=["GET"]),
    Route("/login", log_in, methods=["POST"]),
    Route("/logout", log_out, methods=["POST"]),
    Route("/", home),
    Route("/runs/{run}", show_run),
    Route("/runs/{run}/clients", show_clients),
    Route("/runs/{run}/report", show_report, methods=["GET"]),
    Route("/runs/{run}/report", write_report, methods=["POST"]),
    Route("/runs/{run}/verify", verify, methods=["POST"]),
    Route("/runs/{run}/requests", file_request, methods=["POST"]),
]
