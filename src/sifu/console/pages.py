"""The pages: forms and tables that work without JavaScript, filled by jinja2, which escapes everything."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
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
from sifu.console.desk import Desk, RunAtDesk
from sifu.console.rendering import charts, expected_words, render
from sifu.console.sessions import COOKIE, LONGEST_SECONDS, Session, Visitor
from sifu.console.tokens import TERMS_OF_REQUESTERS, Token
from sifu.core.method_info import METHOD_INFOS
from sifu.core.request_terms import AUTO, RequestTerms
from sifu.core.spec import Spec
from sifu.core.wording import psi_words, rows_words
from sifu.errors import InputError, NotCertifiableError, SifuError
from sifu.requests.letters import usual_terms
from sifu.requests.request_record import plain_answer
from sifu.run.clients_and_engine import carried_out_elsewhere
from sifu.store.clock import same_person
from sifu.store.remainders import clients_now, plain_name

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
NOTHING_TO_PLAN = b'<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"/>'
"""Instead of the figure of a request that is being carried out already."""


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
                return RedirectResponse(_way_back(request), 303)
            return show("error.html", visitor, code=status_code(error), sentence=str(error))

    answer.__name__ = handler.__name__
    return answer


def _way_back(request: Request) -> str:
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
async def show_request(request: Request) -> Response:
    """One request: where it stands, what can be decided, every way to forget, or its certificate in words."""
    visitor, desk, key = visitor_of(request), console_of(request).desk, request.path_params["run"]
    numbered = await work(desk.request, visitor.token, key, request.path_params["number"])
    status, run = numbered.record.status, desk.find(visitor.token, key)
    spec = await work(lambda: run.run.spec)
    done = status.status == "done"
    waits = status.status in ("received", "verified", "planned")
    plan, others, refusal = None, None, ""
    if waits and visitor.token.may("see"):
        try:
            plan = await work(desk.plan_of, visitor.token, key, numbered.number)
            others = plan if plan.ways else await work(_other_ways, desk, visitor.token, key, status.terms)
        except NotCertifiableError as error:
            refusal = str(error)
        except InputError:  # it was begun since it was read: there is nothing to plan any more
            pass
    body = (await work(desk.certificate, visitor.token, key, numbered.number))["body"] if done else None
    answer = _certificate_words(body) if body else None
    return show(
        "request.html",
        visitor,
        run=run,
        number=numbered.number,
        record=numbered.record,
        status=status,
        state=numbered.state,
        waits=waits and numbered.state != "running",
        plan=plan,
        others=others,
        refusal=refusal,
        terms=shown_terms(status.terms, spec),
        answer=answer,
        body=body,
        live=await work(desk.live, visitor.token, key) if visitor.token.may("see") else None,
        jobs=[job for job in desk.jobs.of_run(key) if job.request == status.request][:1],
        own=same_person(visitor.token.name) == same_person(status.filed_by),
        approval=spec.requests.approval,
        elsewhere=carried_out_elsewhere(spec),
    )


def _other_ways(desk: Desk, who: Token, key: str, terms: RequestTerms) -> Any:
    """Every way side by side under the same terms; nothing where they rule all others out."""
    given = terms.to_mapping() | {"method": AUTO}
    clients = given.pop("clients")
    with suppress(InputError, NotCertifiableError):
        return desk.plan(who, key, clients, terms_given({name: given[name] for name in given if given[name] != []}))
    return None


def shown_terms(terms: RequestTerms, spec: Spec) -> list[dict[str, Any]]:
    """Every term of a request but its clients: what it is about, what was filed, and what is usual in the run."""
    usual, filed = usual_terms(spec, terms.clients).to_mapping(), terms.to_mapping()
    return [
        {
            "name": name,
            "help": term.about.help,
            "value": _term_words(name, filed[name], spec),
            "usual": _term_words(name, usual[name], spec),
            "changed": filed[name] != usual[name],
        }
        for name, term in terms_on_offer().items()
    ]


def _term_words(name: str, value: Any, spec: Spec) -> str:
    """A term as people read it; a default from the spec is shown with its value."""
    if name == "records":
        return rows_words(value)
    if name == "target" and value is None:
        return f"{spec.stop.target:g} (the run's)" if spec.stop.target > 0 else "none (the run's)"
    if name == "max_rounds" and value == 0:
        return f"{spec.stop.max_rounds} (the run's)"
    if value is None:
        return "conditional, or none for a method without a guarantee"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _certificate_words(body: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """The answer to the client as paragraphs, each with the list that belongs to it."""
    paragraphs: list[tuple[str, list[str]]] = []
    for line in plain_answer(body):
        if line.startswith("- ") and paragraphs:
            paragraphs[-1][1].append(line[2:])
        else:
            paragraphs.append((line, []))
    return paragraphs


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
            _check_confirmed(fields, "releasing a model before it has healed")
        filed = await work(desk.file, visitor.token, key, clients, name, days(fields.get("deadline_days")), terms)
    except (InputError, NotCertifiableError) as error:
        values = await work(_run_values, desk, visitor.token, key)
        values |= {"fields": fields, "errors": {_field_of(str(error)): str(error)}}
        return show("run.html", visitor, code=status_code(error), **values)
    _note(visitor, f"Request {filed} was filed.")
    return RedirectResponse(_way_back(request), 303)


def _field_of(sentence: str) -> str:
    """The field of the form that an error is about; the clients where nothing else is named."""
    first = sentence.split()[0] if sentence.split() else ""
    if first in terms_on_offer():
        return first
    words = {"deadline": "deadline_days", "request id": "request", "use another id": "request", "level": "level"}
    words |= {"record": "records", "row ": "records", "identit": "records"}
    return next((field for word, field in words.items() if word in sentence), "clients")


def _check_confirmed(fields: dict[str, str], what: str) -> None:
    if fields.get("confirm") != "yes":
        raise InputError(f"{what} cannot be undone: tick the box to confirm it")


@page
async def decide(request: Request) -> Response:
    """Record a decision from a button."""
    visitor, desk, key = visitor_of(request), console_of(request).desk, request.path_params["run"]
    fields = await read_form(request, visitor)
    name, decision = fields.get("request", ""), fields.get("decision", "")
    if decision == "refused" and visitor.token.may("refuse"):
        _check_confirmed(fields, "a refusal")
    arguments = (name, decision, fields.get("reason", ""), fields.get("terms", ""))
    outcome = await work(desk.decide, visitor.token, key, *arguments)
    words = {"recorded": f"is {decision}", "unchanged": f"was {decision} already"}
    _note(visitor, f"Request {name} {words.get(outcome, f'{decision}: handed to the process that writes to the run')}.")
    return RedirectResponse(_back_to_request(request, fields), 303)


@page
async def carry_out(request: Request) -> Response:
    """Start to carry a request out."""
    visitor, desk, key = visitor_of(request), console_of(request).desk, request.path_params["run"]
    fields = await read_form(request, visitor)
    if visitor.token.may("carry out"):
        _check_confirmed(fields, "carrying out a request")
    await work(desk.carry_out, visitor.token, key, fields.get("request", ""))
    _note(visitor, f"Request {fields.get('request', '')} is being carried out.")
    return RedirectResponse(_back_to_request(request, fields), 303)


def _back_to_request(request: Request, fields: dict[str, str]) -> str:
    number = fields.get("number", "")
    return f"{_way_back(request)}/requests/{number}" if number.isdecimal() else _way_back(request)


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
    _note(visitor, sentence)
    return RedirectResponse(_way_back(request), 303)


def _note(visitor: Visitor, sentence: str) -> None:
    if visitor.session:
        visitor.session.notes.append(("good", sentence))


@page
async def show_report(request: Request) -> Response:
    """The report as it was last written."""
    visitor, desk, key = visitor_of(request), console_of(request).desk, request.path_params["run"]
    content = await work(desk.report, visitor.token, key)
    return HTMLResponse(content, headers={"Content-Security-Policy": FILE_POLICY})


@page
async def figure(request: Request) -> Response:
    """The figure of what each noise would cost, for a request that waits."""
    visitor, desk, key = visitor_of(request), console_of(request).desk, request.path_params["run"]
    numbered = await work(desk.request, visitor.token, key, request.path_params["number"])
    phone = request.query_params.get("phone") == "yes"
    drawing = await work(_draw, desk, visitor.token, key, numbered.record.status, phone)
    return Response(drawing, media_type="image/svg+xml", headers={"Content-Security-Policy": FILE_POLICY})


def _draw(desk: Desk, who: Token, key: str, status: Any, phone: bool) -> bytes:
    from sifu.plots.psi_figure import draw_plan
    from sifu.plots.style import figure_bytes, narrow_figures

    if not who.may("see"):
        raise InputError("this figure is not for your roles")
    run = desk.find(who, key)

    def draw() -> bytes:
        try:
            plan = run.run.plan_of(status.request)
        except (InputError, NotCertifiableError):  # it was begun since its page was loaded
            return NOTHING_TO_PLAN
        with narrow_figures() if phone else nullcontext():
            return figure_bytes(draw_plan(plan), "svg")

    drawing: bytes = run.remembered(("figure", status.request, phone), draw)
    return drawing


@page
async def evidence(request: Request) -> Response:
    """Download the evidence of a request."""
    visitor, desk, key = visitor_of(request), console_of(request).desk, request.path_params["run"]
    name, content = await work(desk.evidence, visitor.token, key, request.path_params["number"])
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(content, media_type="application/zip", headers=headers)


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
    Route("/runs/{run}/decide", decide, methods=["POST"]),
    Route("/runs/{run}/carry-out", carry_out, methods=["POST"]),
    Route("/runs/{run}/requests/{number:int}", show_request),
    Route("/runs/{run}/requests/{number:int}/figure.svg", figure),
    Route("/runs/{run}/requests/{number:int}/evidence", evidence),
]
