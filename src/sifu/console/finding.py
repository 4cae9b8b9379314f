"""Pages over all runs: the list of requests with its search, the overview, the people, and the audit trail."""

from __future__ import annotations

import csv
import datetime
import io
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sifu.choices import LEVELS
from sifu.console.asking import console_of, read_form, visitor_of, work
from sifu.console.desk import Desk
from sifu.console.pages import page, page_number, show
from sifu.console.run_at_desk import RequestLine
from sifu.console.tokens import Token, TokenFile, Visitor
from sifu.store.clock import current_time, same_person, time_of, utc_now

LINES_PER_PAGE = 100
EVENTS_PER_PAGE = 100
RECENT_DAYS = 30
STATES = ("open", "overdue", "received", "waiting for approval", "approved", "running", "failed", "done", "refused",
          "withdrawn")  # fmt: skip
"""What the list of requests can be narrowed to: a state, all that are not settled, or all that are late."""
FILTERS = ("state", "run", "level", "text", "page")
KINDS = {"": "all", "request": "of requests", "rolled back": "of rollbacks", "key": "of keys"}
"""What the audit trail can be narrowed to, by how the kind of an event begins."""


@page
async def list_requests(request: Request) -> Response:
    """Every request that the visitor sees, narrowed as they asked."""
    visitor, desk = visitor_of(request), console_of(request).desk
    chosen = await _filters(request, visitor)
    lines = await work(desk.lines, visitor.token)
    narrowed = [line for line in lines if _fits(line, chosen)]
    number = page_number(chosen["page"])
    first = (number - 1) * LINES_PER_PAGE
    return show(
        "requests.html",
        visitor,
        lines=narrowed[first : first + LINES_PER_PAGE],
        count=len(narrowed),
        page=number,
        pages=-(-len(narrowed) // LINES_PER_PAGE),
        chosen=chosen,
        states=STATES,
        levels=LEVELS[::-1],
        runs=desk.runs(visitor.token),
        posted=request.method == "POST",
    )


@page
async def download_requests(request: Request) -> Response:
    """The same as a table for a spreadsheet, all pages of it."""
    visitor, desk = visitor_of(request), console_of(request).desk
    chosen = await _filters(request, visitor)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(field.name for field in fields(RequestLine))
    for line in await work(desk.lines, visitor.token):
        if _fits(line, chosen):
            writer.writerow(_cell(value) for value in asdict(line).values())
    headers = {"Content-Disposition": 'attachment; filename="requests.csv"'}
    return Response(text.getvalue(), media_type="text/csv; charset=utf-8", headers=headers)


async def _filters(request: Request, visitor: Visitor) -> dict[str, str]:
    """What a list is narrowed to. A text may be a name, so it is taken from a form alone, never from an address."""
    given: Mapping[str, str] = request.query_params
    if request.method == "POST":
        given = await read_form(request, visitor)
    chosen = {name: given.get(name, "").strip()[:200] for name in FILTERS}
    return chosen if request.method == "POST" else chosen | {"text": ""}


def _fits(line: RequestLine, chosen: Mapping[str, str]) -> bool:
    narrowed = {"open": not line.settled, "overdue": line.overdue and not line.settled, "": True}
    words = " ".join((line.request, line.name, line.filed_by, line.method, *line.clients)).casefold()
    return (
        narrowed.get(chosen["state"], line.state == chosen["state"])
        and chosen["run"] in ("", line.run)
        and chosen["level"] in ("", line.level)
        and chosen["text"].casefold() in words
    )


def _cell(value: Any) -> str:
    """A cell that no spreadsheet takes for a formula."""
    text = "; ".join(value) if isinstance(value, tuple) else "" if value is None else str(value)
    return f"'{text}" if text[:1] in tuple("=+-@\t\r") else text


@page
async def show_overview(request: Request) -> Response:
    """What a data-protection officer is asked for: what is open, what is late, what was done and what it is worth."""
    visitor, desk = visitor_of(request), console_of(request).desk
    desk.demand(visitor.token, "see")
    lines = await work(desk.lines, visitor.token)
    now = current_time()
    since = now - datetime.timedelta(days=RECENT_DAYS)
    recent = [line for line in lines if line.settled and time_of(line.finished) >= since]
    done = [line for line in lines if line.state == "done"]
    return show(
        "overview.html",
        visitor,
        now=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        days=RECENT_DAYS,
        open=[line for line in lines if not line.settled],
        recent=recent,
        done=done,
        levels=Counter(line.level for line in done),
        every_level=LEVELS[::-1],
        runs=len(desk.runs(visitor.token)),
    )


@page
async def show_people(request: Request) -> Response:
    """Who may do what here, and what they did."""
    visitor, console = visitor_of(request), console_of(request)
    console.desk.demand(visitor.token, "examine")
    people, others = await work(_people, console.desk, console.tokens, visitor.token)
    return show("people.html", visitor, people=people, others=others)


def _people(desk: Desk, tokens: TokenFile, who: Token) -> tuple[list[tuple[Token, str, Counter[str]]], list[str]]:
    """Every token with whether it works and what its owner did, and names in the ledgers that have no token."""
    did: dict[str, Counter[str]] = {}
    names: dict[str, str] = {}
    for line in desk.lines(who):
        if line.number is not None:
            for step in desk.request(who, line.run, line.number).record.steps:
                person = same_person(step.actor)
                names.setdefault(person, step.actor)
                did.setdefault(person, Counter())[step.status] += 1
    today = utc_now()[:10]
    people = [
        (
            token,
            "works" if token.works(today) else "revoked" if token.revoked else "expired",
            did.get(same_person(token.name), Counter()),
        )
        for token in tokens.all()
    ]
    owners = {same_person(token.name) for token, _, _ in people}
    return people, sorted(name for person, name in names.items() if person not in owners)


@page
async def show_trail(request: Request) -> Response:
    """The audit trail of a run, or of all: every event, the latest first."""
    visitor, desk, key = visitor_of(request), console_of(request).desk, request.path_params.get("run")
    number, kind = page_number(request.query_params.get("page", "")), request.query_params.get("kind", "")
    kind = kind if kind in KINDS else ""
    events, count = await work(desk.trail, visitor.token, key, kind, number, EVENTS_PER_PAGE)
    run = desk.find(visitor.token, key) if key else None
    pages = -(-count // EVENTS_PER_PAGE)
    values: dict[str, Any] = {
        "events": events,
        "count": count,
        "page": number,
        "pages": pages,
        "kind": kind,
        "kinds": KINDS,
    }
    return show("trail.html", visitor, run=run, **values)


ROUTES = [
    Route("/requests", list_requests, methods=["GET", "POST"]),
    Route("/requests.csv", download_requests, methods=["GET", "POST"]),
    Route("/overview", show_overview),
    Route("/people", show_people),
    Route("/trail", show_trail),
    Route("/runs/{run}/trail", show_trail),
]
