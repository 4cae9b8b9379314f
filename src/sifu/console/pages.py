"""The console's pages: forms and tables that work without JavaScript, rendered by jinja2 with automatic escaping."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from functools import wraps
from typing import Any
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from sifu.choices import terms_on_offer
from sifu.console.asking import (
    Console,
    NotKnownError,
    Visit,
    client_names,
    console_of,
    days,
    read_form,
    status_code,
    terms_given,
    visitor_of,
)
from sifu.console.rendering import charts, expected_words, measured_words, render
from sifu.console.security import origin_of
from sifu.console.served_run import RECEIVED, REPORT, ServedRun
from sifu.console.tokens import COOKIE, LONGEST_SECONDS, TERMS_OF_REQUESTERS, Session, Token, Visitor
from sifu.core.method_info import all_method_infos
from sifu.core.operator_words import psi_words, rows_words
from sifu.core.request_terms import AUTO, RequestTerms
from sifu.core.spec import Spec
from sifu.errors import InputError, NotCertifiableError, SifuError
from sifu.requests.messages import usual_terms
from sifu.requests.request_record import can_be_undone, plain_answer
from sifu.run.clients_and_engine import executed_elsewhere
from sifu.run.run_view import RunView
from sifu.store.actors import same_person
from sifu.store.reader import clients_now, plain_name

Handler = Callable[[Request], Awaitable[Response]]
CLIENTS_PER_PAGE = 100
MOST_LINES = 200
"""Maximum number of requests on the first page; the list of requests shows all."""
MOST_PICKED = 2000
"""Maximum number of clients that the form's picker offers; others are typed."""
FILE_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""Content security policy of the report and figures, which contain their own styles."""
NOTHING_TO_PLAN = b'<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"/>'
"""Placeholder figure of a request that is already being executed."""


def catching(handler: Handler) -> Handler:
    """Wrap a handler so that errors become a page with a message; redirect visitors who are not logged in."""

    @wraps(handler)
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

    return answer


def page(handler: Callable[[Visit], Response]) -> Handler:
    """Wrap a handler as a page for logged-in visitors that is made in a worker thread."""

    @catching
    @wraps(handler)
    async def answer(request: Request) -> Response:
        visitor = visitor_of(request)
        fields = await read_form(request, visitor) if request.method == "POST" else {}
        return await run_in_threadpool(handler, Visit(request, visitor, fields))

    return answer


def way_back(request: Request) -> str:
    """Return the URL of the run that a form belongs to."""
    run = request.path_params.get("run")
    return f"/runs/{quote(str(run))}" if run else "/"


def show(template: str, visitor: Visitor | None, code: int = 200, **values: Any) -> HTMLResponse:
    """Return a page rendered for a visitor, with their pending messages."""
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
    """Show the login page."""
    return _door(request)


def _door(request: Request, code: int = 200) -> Response:
    return show("login.html", None, code, wrong=code == 401, sign_in=console_of(request).sign_in is not None)


@catching
async def log_in(request: Request) -> Response:
    """Begin a session with a token."""
    console, fields = console_of(request), await read_form(request)
    session = await run_in_threadpool(console.sessions.begin, fields.get("token", ""))
    if session is None:
        # Count failed logins only, so that valid ones from the same address are never locked out.
        if console.logins.allows(origin_of(request.scope)):
            return _door(request, 401)
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


@page
def log_out(visit: Visit) -> Response:
    """End the session."""
    if visit.visitor.session:
        visit.console.sessions.end(visit.visitor.session)
    response = RedirectResponse("/login", 303)
    response.delete_cookie(COOKIE)
    return response


@page
def home(visit: Visit) -> Response:
    """Show all runs and their open requests."""
    lines, sees = visit.service.lines(visit.who), visit.who.may("see")
    lines = [line for line in lines if not (sees and line.settled)]
    runs = []
    for run in visit.service.runs(visit.who):
        try:
            runs.append((run, run.live() if sees else None, ""))
        except SifuError as error:  # an unreadable run must not hide the others
            runs.append((run, None, str(error)))
    return show("home.html", visit.visitor, runs=runs, lines=lines[:MOST_LINES], more=len(lines) - MOST_LINES)


@page
def show_run(visit: Visit) -> Response:
    """Show one run: its current state, its requests, and the form for new ones."""
    number = visit.request.query_params.get("forget", "")
    chosen = int(number) if number.isdecimal() and len(number) < 8 else None
    return show("run.html", visit.visitor, **_run_values(visit.run, visit.who, chosen))


def _run_values(run: ServedRun, who: Token, chosen: int | None = None) -> dict[str, Any]:
    spec, may_see = run.run.spec, who.may("see")
    clients = [client for client in _clients(run) if client[1]] if may_see and who.may("file") else []
    offered = terms_on_offer()
    return {
        "run": run,
        "live": run.live() if may_see else None,
        "spec": spec,
        "lines": run.lines(who),
        "verified": run.verification(who) if may_see else None,
        "jobs": run.jobs.of_run(run.key)[:5] if may_see else [],
        "has_report": (run.folder / REPORT).is_file(),
        "approval": spec.requests.approval,
        "terms_offered": offered if who.may("set terms") else {name: offered[name] for name in TERMS_OF_REQUESTERS},
        "methods": [AUTO, *(info.name for info in all_method_infos() if info.certifies and not info.control)],
        "usual": usual_terms(spec, ["-"]).shown(),
        "clients": [name for name, _, _ in clients[:MOST_PICKED]],
        "fields": {"clients": "".join(name for name, _, number in clients if number == chosen)},
        "errors": {},
    }


def _clients(run: ServedRun) -> list[tuple[str, bool, int]]:
    """Return the name of each client of a run, whether it can be forgotten, and its number."""

    def read() -> list[tuple[str, bool, int]]:
        with run.run.snapshot() as reader:  # not the shared view: a plan in another thread may be using it
            active = set(RunView(reader).active.tolist())
            now = enumerate(clients_now(reader))
            return [(plain_name(reader, client), client in active, number) for number, client in now]

    names: list[tuple[str, bool, int]] = run.remembered(("clients",), read, run.lists_lock)
    return names


@page
def show_clients(visit: Visit) -> Response:
    """Show one page of a run's clients, the most influential first."""
    status = visit.run.status(visit.who)
    clients = sorted(enumerate(status.clients), key=lambda row: (row[1].state != "active", -row[1].psi, row[1].name))
    return show(
        "clients.html",
        visit.visitor,
        run=visit.run,
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


@page
def file_request(visit: Visit) -> Response:
    """File a request from the form."""
    run, who, fields = visit.run, visit.who, visit.fields
    try:
        clients = client_names(visit.text("clients"), {name for name, _, _ in _clients(run)})
        terms = terms_given({name: visit.text(name) for name in terms_on_offer()})
        if "plan" in fields:
            terms["method"] = AUTO
            plan = run.plan(who, clients, terms)
            return show("ways.html", visit.visitor, run=run, plan=plan, clients=clients, fields=fields)
        if fields.get("release") == "now" and who.may("set terms"):
            _check_confirmed(visit, "releasing a model before it has recovered")
        due, name = days(fields.get("deadline_days")), visit.text("request").strip() or None
        filed, nonces = run.file(who, clients, name, due, terms)
    except (InputError, NotCertifiableError) as error:
        values = _run_values(run, who) | {"fields": fields, "errors": {_field_of(str(error)): str(error)}}
        return show("run.html", visit.visitor, code=status_code(error), **values)
    visit.note(f"Request {filed} was filed." if who.may("see") else f"Request {filed}: {RECEIVED}.")
    for identity, nonce in nonces.items():
        visit.note(f"Hand this nonce to the person of record {identity}; the console keeps it until the end: {nonce}")
    return RedirectResponse(way_back(visit.request), 303)


def _field_of(sentence: str) -> str:
    """Return the form field that an error message is about; the clients by default."""
    first = sentence.split()[0] if sentence.split() else ""
    if first in terms_on_offer():
        return first
    words = {"deadline": "deadline_days", "request id": "request", "use another id": "request", "level": "level"}
    words |= {"record": "records", "row ": "records", "identit": "records", "releasing": "release"}
    return next((field for word, field in words.items() if word in sentence), "clients")


def _check_confirmed(visit: Visit, what: str) -> None:
    """Refuse an irreversible action unless its confirmation box is ticked."""
    if visit.text("confirm") != "yes":
        raise InputError(f"{what} cannot be undone: tick the box to confirm")


@page
def start(visit: Visit) -> Response:
    """Start the verification or the report of a run."""
    if visit.request.url.path.endswith("/verify"):
        visit.run.start(visit.who, "verify")
        visit.note("The run is being verified.")
    else:
        visit.run.start(visit.who, "report")
        visit.note("The report is being written.")
    return RedirectResponse(way_back(visit.request), 303)


@page
def show_report(visit: Visit) -> Response:
    """Show the report that was written last."""
    return HTMLResponse(visit.run.report(visit.who), headers={"Content-Security-Policy": FILE_POLICY})


def live_values(run: ServedRun, who: Token) -> dict[str, Any]:
    """Return the values that a live page updates; when `stamp` changes, the page fetches more."""
    who.demand("see")
    live, jobs = run.live(), [asdict(job) for job in run.jobs.of_run(run.key)[:5]]
    states = "".join(f"{job['id']}{job['state']}" for job in jobs)
    stamp = f"{live.phase}|{live.request}|{live.last_step}|{live.waiting}|{live.overdue}|{live.at_work}|{states}"
    rendered = {"charts": str(charts(live)), "expected_words": expected_words(live)}
    rendered["measured_words"] = measured_words(live)
    return asdict(live) | {"jobs": jobs, "stamp": stamp} | rendered


@page
def show_request(visit: Visit) -> Response:
    """Show one request: its state, the possible decisions, and a comparison of methods or its certificate in words."""
    run, who = visit.run, visit.who
    numbered, spec = run.request(who, visit.number), run.run.spec
    status = numbered.record.status
    usual, waits = usual_terms(spec, status.terms.clients), status.status in ("received", "verified", "planned")
    plan, others, body, refusal, erased = None, None, None, "", ""
    if waits and who.may("see"):
        try:
            plan = run.plan_of(who, status.request)
            others = plan if plan.ways else _other_options(run, who, status.terms)
        except NotCertifiableError as error:
            refusal = str(error)
        except InputError:  # its execution has started in the meantime, so it needs no plan
            pass
    # A requester who named row numbers does not learn whose records they are.
    identities = run.identities(who, status.request) if who.may("see") else ()
    if status.status == "done":
        try:
            body = run.certificate(who, visit.number)["body"]
        except InputError as error:
            erased = str(error)
    return show(
        "request.html",
        visit.visitor,
        run=run,
        number=numbered.number,
        record=numbered.record,
        status=status,
        state=numbered.state,
        waits=waits and numbered.state != "running",
        plan=plan,
        others=others,
        refusal=refusal,
        terms=_terms_in_words(status.terms, spec, identities),
        usual=_terms_in_words(usual, spec),
        changed=[name for name in terms_on_offer() if getattr(status.terms, name) != getattr(usual, name)],
        answer=_certificate_words(body) if body else None,
        body=body,
        erased=erased,
        live=run.live() if who.may("see") else None,
        jobs=[job for job in run.jobs.of_run(run.key) if job.request == status.request][:1],
        own=same_person(who.name) == same_person(status.filed_by),
        approval=spec.requests.approval,
        elsewhere=executed_elsewhere(spec),
        undoable=numbered.state == "failed" and status.status == "running" and _is_undoable(run, status.request),
    )


def _is_undoable(run: ServedRun, request: str) -> bool:
    """Return whether a request that failed in execution can still be refused or withdrawn."""
    with run.run.reader() as reader:
        return any(can_be_undone(reader, row) for row in reader.requests() if row.request == request)


def _other_options(run: ServedRun, who: Token, terms: RequestTerms) -> Any:
    """Return a plan that compares all methods under the same terms, or None if no such plan is possible."""
    given = terms.to_mapping() | {"method": AUTO}
    clients = given.pop("clients")
    with suppress(InputError, NotCertifiableError):
        return run.plan(who, clients, terms_given({name: given[name] for name in given if given[name] != []}))
    return None


def _terms_in_words(terms: RequestTerms, spec: Spec, identities: Sequence[str] = ()) -> dict[str, str]:
    """Return the terms of a request in words; a default from the spec is shown with its value."""
    filed = terms.shown()
    words = {name: f"{value:.6g}" if isinstance(value, float) else str(value) for name, value in filed.items()}
    for name, offered in terms_on_offer().items():
        if words[name] in offered.about.words:
            words[name] = f"{offered.about.words[words[name]]} ({words[name]})"
    words["records"] = rows_words(terms.records, identities)
    if terms.level is None:
        words["level"] = "conditional, or none for a method without a guarantee"
    if terms.target is None:
        words["target"] = f"{spec.stop.target:g} (the run's)" if spec.stop.target > 0 else "none (the run's)"
    if terms.before_after is None:
        words["before_after"] = "not demanded"
    if terms.max_rounds == 0:
        words["max_rounds"] = f"{spec.stop.max_rounds} (the run's)"
    return words


def _certificate_words(body: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Return the answer to the client as paragraphs, each with its list."""
    paragraphs: list[tuple[str, list[str]]] = []
    for line in plain_answer(body):
        if line.startswith("- ") and paragraphs:
            paragraphs[-1][1].append(line[2:])
        else:
            paragraphs.append((line, []))
    return paragraphs


@page
def decide(visit: Visit) -> Response:
    """Record a decision that was made with a button."""
    name, decision = visit.text("request"), visit.text("decision")
    if decision == "refused" and visit.who.may("refuse"):
        _check_confirmed(visit, "a refusal")
    outcome = visit.run.decide(visit.who, name, decision, visit.text("reason"), visit.text("terms"))
    words = {"recorded": f"is {decision}", "unchanged": f"was {decision} already"}
    visit.note(f"Request {name} {words.get(outcome, f'{decision}: handed to the process that writes to the run')}.")
    return _back_to_request(visit)


@page
def execute(visit: Visit) -> Response:
    """Start the execution of a request."""
    if visit.who.may("carry out"):
        _check_confirmed(visit, "execution")
    visit.run.execute(visit.who, visit.text("request"))
    visit.note(f"Request {visit.text('request')} is being executed.")
    return _back_to_request(visit)


def _back_to_request(visit: Visit) -> Response:
    number, back = visit.text("number"), way_back(visit.request)
    return RedirectResponse(f"{back}/requests/{number}" if number.isdecimal() else back, 303)


@page
def figure(visit: Visit) -> Response:
    """Return the figure of the predicted cost of each noise level, for a waiting request."""
    from sifu.plots.style import figure_bytes, narrow_figures
    from sifu.report.psi_figure import draw_plan

    phone = visit.request.query_params.get("phone") == "yes"
    request = visit.run.request(visit.who, visit.number).record.status.request
    if not visit.who.may("see"):
        raise InputError("your roles do not allow you to see this figure")

    def draw() -> bytes:
        try:
            plan = visit.run.plan_of(visit.who, request)
        except (InputError, NotCertifiableError):  # its execution has started since its page was loaded
            return NOTHING_TO_PLAN
        with narrow_figures() if phone else nullcontext():
            return figure_bytes(draw_plan(plan), "svg")

    drawing = visit.run.remembered(("figure", request, phone), draw, visit.run.lock)
    return Response(drawing, media_type="image/svg+xml", headers={"Content-Security-Policy": FILE_POLICY})


def evidence(visit: Visit) -> Response:
    """Return the evidence of a request as a zip file."""
    name, content = visit.run.evidence(visit.who, visit.number)
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(content, media_type="application/zip", headers=headers)


ROUTES = [
    Route("/login", show_login, methods=["GET"]),
    Route("/login", log_in, methods=["POST"]),
    Route("/logout", log_out, methods=["POST"]),
    Route("/", home),
    Route("/runs/{run}", show_run),
    Route("/runs/{run}/clients", show_clients),
    Route("/runs/{run}/report", show_report, methods=["GET"]),
    Route("/runs/{run}/report", start, methods=["POST"]),
    Route("/runs/{run}/verify", start, methods=["POST"]),
    Route("/runs/{run}/requests", file_request, methods=["POST"]),
    Route("/runs/{run}/decide", decide, methods=["POST"]),
    Route("/runs/{run}/carry-out", execute, methods=["POST"]),
    Route("/runs/{run}/requests/{number:int}", show_request),
    Route("/runs/{run}/requests/{number:int}/figure.svg", figure),
    Route("/runs/{run}/requests/{number:int}/evidence", page(evidence)),
]
