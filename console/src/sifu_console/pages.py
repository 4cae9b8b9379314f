"""The console's pages of runs, and the login; forms and tables work without JavaScript."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, RedirectResponse

from sifu.choices import terms_on_offer
from sifu.core.method_info import METHOD_INFOS
from sifu.core.operator_words import psi_words
from sifu.core.request_terms import AUTO
from sifu.errors import InputError, NotCertifiableError, SifuError
from sifu_console.asking import (
    Console,
    RunOf,
    Visit,
    Visiting,
    answer_to,
    client_names,
    console_of,
    days,
    read_form,
    status_code,
)
from sifu_console.bodies import terms_in_form
from sifu_console.rendering import render
from sifu_console.runs import RECEIVED, REPORT, ServedRun
from sifu_console.security import origin_of
from sifu_console.tokens import COOKIE, LONGEST_SECONDS, TERMS_OF_REQUESTERS, Session, Token, Visitor

router = APIRouter()
CLIENTS_PER_PAGE = 100
MOST_LINES = 200
"""Maximum number of requests on the first page; the list of requests shows all."""
MOST_PICKED = 2000
"""Maximum number of clients that the form's picker offers. Users type the names of all other clients."""
FILE_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""Content security policy of the report and figures, which contain their own styles."""


def way_back(request: Request) -> str:
    """Return the URL of the form's run, or of the first page if the form belongs to no run."""
    run = request.path_params.get("run")
    return f"/runs/{quote(str(run))}" if run else "/"


def show(template: str, visitor: Visitor | None, code: int = 200, **values: Any) -> HTMLResponse:
    """Return a page rendered for a visitor, with their pending messages."""
    session = visitor.session if visitor else None
    text = render(
        template,
        who=visitor.token if visitor else None,
        csrf=session.csrf if session else "",
        notes=session.take_notes() if session and visitor and not visitor.refreshes else [],
        **values,
    )
    return HTMLResponse(text, code)


@router.get("/login")
async def show_login(request: Request) -> Response:
    """Show the login page."""
    return _login(request)


def _login(request: Request, code: int = 200) -> Response:
    """Return the login page. With code 401, it says that the token does not work."""
    return show("login.html", None, code, wrong=code == 401, sign_in=console_of(request).sign_in is not None)


@router.post("/login")
async def log_in(request: Request) -> Response:
    """Begin a session with a token."""
    console, fields = console_of(request), await read_form(request)
    session = await run_in_threadpool(console.sessions.begin, fields.get("token", ""))
    if session is None:
        # Count failed logins only, so that valid ones from the same address are never locked out.
        if console.logins.allows(origin_of(request.scope)):
            return _login(request, 401)
        return show("error.html", None, 429, sentence="too many attempts: wait a minute")
    return enter(console, session, RedirectResponse("/", 303))


def enter(console: Console, session: Session, response: Response) -> Response:
    """Set the session cookie in a response."""
    response.set_cookie(
        COOKIE,
        session.id,
        max_age=int(LONGEST_SECONDS),
        httponly=True,
        samesite="strict",
        secure=console.secure_cookie,
    )
    return response


@router.post("/logout")
def log_out(visit: Visiting) -> Response:
    """End the session."""
    if visit.visitor.session:
        console_of(visit.request).sessions.end(visit.visitor.session)
    response = RedirectResponse("/login", 303)
    response.delete_cookie(COOKIE)
    return response


@router.get("/")
def home(visit: Visiting) -> Response:
    """Show all runs and their open requests."""
    (lines, unread), sees = visit.runs.lines(visit.who), visit.who.may("see")
    lines = [line for line in lines if not (sees and line.settled)]
    runs = []
    for run in visit.runs.of(visit.who):
        try:
            runs.append((run, run.progress() if sees else None, ""))
        except SifuError as error:  # an unreadable run must not hide other runs
            runs.append((run, None, str(error)))
    more = len(lines) - MOST_LINES
    return show("home.html", visit.visitor, runs=runs, lines=lines[:MOST_LINES], more=more, unread=unread)


@router.get("/runs/{run}")
def show_run(visit: Visiting, run: RunOf) -> Response:
    """Show one run: its current state, its requests, and the form for new requests."""
    number = visit.request.query_params.get("forget", "")
    chosen = int(number) if number.isdecimal() and len(number) < 8 else None
    return show("run.html", visit.visitor, **_run_values(run, visit.who, chosen))


def _run_values(run: ServedRun, who: Token, chosen: int | None = None) -> dict[str, Any]:
    spec, may_see = run.run.spec, who.may("see")
    picked = run.status(who).clients if may_see and who.may("file") else ()
    clients = [(number, client.name) for number, client in enumerate(picked) if client.state == "active"]
    offered = terms_on_offer()
    return {
        "run": run,
        "live": run.progress() if may_see else None,
        "spec": spec,
        "lines": run.lines(who),
        "verified": run.verification(who) if may_see else None,
        "jobs": run.jobs.of_run(run.key)[:5] if may_see else [],
        "has_report": (run.folder / REPORT).is_file(),
        "approval": spec.requests.approval,
        "terms_offered": offered if who.may("set terms") else {name: offered[name] for name in TERMS_OF_REQUESTERS},
        "methods": [AUTO, *METHOD_INFOS],
        "usual": run.run.usual_terms().to_mapping(),
        "clients": [name for _, name in clients[:MOST_PICKED]],
        "fields": {"clients": "".join(name for number, name in clients if number == chosen)},
        "errors": {},
    }


def _names(run: ServedRun, who: Token) -> set[str]:
    """Return the names of the clients, which may contain separators, or nothing for those who may not see them."""
    return {client.name for client in run.status(who).clients} if who.may("see") else set()


@router.get("/runs/{run}/clients")
def show_clients(visit: Visiting, run: RunOf) -> Response:
    """Show one page of a run's clients, the most influential first."""
    status = run.status(visit.who)
    clients = sorted(enumerate(status.clients), key=lambda row: (row[1].state != "active", -row[1].psi, row[1].name))
    return show(
        "clients.html",
        visit.visitor,
        run=run,
        **pager("clients", clients, CLIENTS_PER_PAGE, visit.request.query_params.get("page", "")),
        closed_form=status.closed_form,
        psi_words=psi_words(status.psi_status).replace("Psi", "Ψ"),
    )


def page_number(text: str) -> int:
    """Return the number of the requested page of a list, from 1."""
    return max(1, int(text)) if text.isdecimal() and len(text) < 8 else 1


def pager(name: str, rows: Sequence[Any], size: int, text: str) -> dict[str, Any]:
    """Return the template values of one page of a list: its rows as `name`, and the counts of rows and pages."""
    number = page_number(text)
    shown = rows[size * (number - 1) : size * number]
    return {name: shown, "count": len(rows), "page": number, "pages": -(-len(rows) // size)}


@router.post("/runs/{run}/requests")
def file_request(visit: Visiting, run: RunOf) -> Response:
    """File the request in the form, or show its plan if the form asks for one."""
    who, fields = visit.who, visit.fields
    try:
        clients = client_names(visit.text("clients"), _names(run, who))
        terms = terms_in_form(fields)
        if "plan" in fields:
            terms["method"] = AUTO
            plan = run.plan(who, clients, terms)
            return show("ways.html", visit.visitor, run=run, plan=plan, clients=clients, fields=fields)
        due, name = days(visit.text("deadline_days").strip()), visit.text("request").strip() or None
        filed, nonces = run.file(who, clients, name, due, terms)
    except (InputError, NotCertifiableError) as error:
        _, sentence = answer_to(visit.request, error)
        values = _run_values(run, who) | {"fields": fields, "errors": {_field_of(sentence): sentence}}
        return show("run.html", visit.visitor, code=status_code(error), **values)
    visit.note(f"Request {filed} was filed." if who.may("see") else f"Request {filed}: {RECEIVED}.")
    for identity, nonce in nonces.items():
        visit.note(f"Hand this nonce to the person of record {identity}; keep it, the run does not: {nonce}")
    return RedirectResponse(way_back(visit.request), 303)


def _field_of(sentence: str) -> str:
    """Return the form field that an error message is about, by default the clients."""
    first = re.split(r"[.: ]", sentence)[0]
    if first in terms_on_offer():
        return first
    words = {"deadline": "deadline_days", "request id": "request", "use another id": "request", "level": "level"}
    words |= {"record": "records", "row ": "records", "identit": "records"}
    return next((field for word, field in words.items() if word in sentence), "clients")


def check_confirmed(visit: Visit, what: str) -> None:
    """Refuse an irreversible action unless its confirmation box is ticked."""
    if visit.text("confirm") != "yes":
        raise InputError(f"{what} cannot be undone: tick the box to confirm")


@router.post("/runs/{run}/verify")
@router.post("/runs/{run}/report")
def start(visit: Visiting, run: RunOf) -> Response:
    """Start the verification or the report of a run."""
    verifies = visit.request.url.path.endswith("/verify")
    run.start(visit.who, "verify" if verifies else "report")
    visit.note("The run is being verified." if verifies else "The report is being written.")
    return RedirectResponse(way_back(visit.request), 303)


@router.get("/runs/{run}/report")
def show_report(visit: Visiting, run: RunOf) -> Response:
    """Show the report that was written last."""
    return HTMLResponse(run.report(visit.who), headers={"Content-Security-Policy": FILE_POLICY})
