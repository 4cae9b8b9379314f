"""Pages that cover all runs: the searchable list of requests, the overview, the people, and the audit trail."""

from __future__ import annotations

import csv
import datetime
import io
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Response

from sifu.choices import LEVELS
from sifu.errors import SifuError
from sifu.store.actors import same_person
from sifu.store.times import current_time, time_of, utc_now
from sifu_console.asking import RunOf, Visit, Visiting, console_of
from sifu_console.pages import page_number, pager, show
from sifu_console.runs import Line, ServedRun

router = APIRouter()
LINES_PER_PAGE = 100
EVENTS_PER_PAGE = 100
RECENT_DAYS = 30
STATES = ("open", "overdue", "received", "waiting for approval", "approved", "running", "failed", "done", "refused",
          "withdrawn")  # fmt: skip
"""Filters of the list of requests: a state, all open requests, or all overdue requests."""
FILTERS = ("state", "run", "level", "text", "page")
COLUMNS = ("run", "name", "number", "request", "state", "level", "deadline", "overdue", "received", "finished",
           "clients", "method", "filed_by", "approvals", "approvals_missing", "records")  # fmt: skip
"""Columns of the list as CSV."""
KINDS = {"": "all", "request": "of requests", "rolled back": "of rollbacks", "key": "of keys"}
"""Labels of the audit trail's filters, by prefix of the event kind."""


@router.get("/requests")
@router.post("/requests")
def list_requests(visit: Visiting) -> Response:
    """Show the visitor's visible requests that match the filters."""
    chosen = _filters(visit)
    lines, unread = visit.runs.lines(visit.who)
    narrowed = [line for line in lines if _fits(line, chosen)]
    return show(
        "requests.html",
        visit.visitor,
        **pager("lines", narrowed, LINES_PER_PAGE, chosen["page"]),
        chosen=chosen,
        states=STATES,
        levels=LEVELS[::-1],
        runs=visit.runs.of(visit.who),
        unread=unread,
        posted=visit.request.method == "POST",
    )


@router.get("/requests.csv")
@router.post("/requests.csv")
def download_requests(visit: Visiting) -> Response:
    """Return all pages of the filtered list of requests as CSV, with a row for each run that cannot be read."""
    chosen, text = _filters(visit), io.StringIO()
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    lines, unread = visit.runs.lines(visit.who)
    rows = [line.to_mapping() for line in lines if _fits(line, chosen)]
    rows += [{"run": run.key, "name": run.name, "state": "cannot be read"} for run in unread]
    for row in rows:
        writer.writerow(_cell(row.get(name)) for name in COLUMNS)
    headers = {"Content-Disposition": 'attachment; filename="requests.csv"'}
    return Response(text.getvalue(), media_type="text/csv; charset=utf-8", headers=headers)


def _filters(visit: Visit) -> dict[str, str]:
    """Return the filters of a list. The search text may be a name, so it is read from a form only, not from the URL."""
    posted = visit.request.method == "POST"
    given = visit.fields if posted else visit.request.query_params
    return {name: given.get(name, "").strip()[:200] if posted or name != "text" else "" for name in FILTERS}


def _fits(line: Line, chosen: Mapping[str, str]) -> bool:
    request = line.request
    narrowed = {"open": not line.settled, "overdue": request.overdue and not line.settled, "": True}
    words = " ".join((request.request, line.run.name, request.filed_by, request.method, *request.clients)).casefold()
    return (
        narrowed.get(chosen["state"], line.state == chosen["state"])
        and chosen["run"] in ("", line.run.key)
        and chosen["level"] in ("", request.level)
        and chosen["text"].casefold() in words
    )


def _cell(value: Any) -> str:
    """Return a CSV cell that no spreadsheet interprets as a formula."""
    text = "; ".join(value) if isinstance(value, tuple) else "" if value is None else str(value)
    return f"'{text}" if text[:1] in tuple("=+-@\t\r") else text


@router.get("/overview")
def show_overview(visit: Visiting) -> Response:
    """Show the overview for a data-protection officer: open, overdue and recently settled requests."""
    visit.who.demand("see")
    lines, unread = visit.runs.lines(visit.who)
    now = current_time()
    since = now - datetime.timedelta(days=RECENT_DAYS)
    recent = [line for line in lines if line.settled and time_of(line.finished) >= since]
    done = [line for line in lines if line.state == "done"]
    return show(
        "overview.html",
        visit.visitor,
        now=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        days=RECENT_DAYS,
        open=[line for line in lines if not line.settled],
        recent=recent,
        done=done,
        levels=Counter(line.request.level for line in done),
        every_level=LEVELS[::-1],
        runs=len(visit.runs.of(visit.who)),
        unread=unread,
    )


@router.get("/people")
def show_people(visit: Visiting) -> Response:
    """Show each person's roles and actions; names from the ledgers without a token come last."""
    visit.who.demand("examine")
    did: dict[str, Counter[str]] = {}
    names: dict[str, str] = {}
    for run in visit.runs.of(visit.who):
        with suppress(SifuError):  # an unreadable run is reported in the list of runs
            for step in (step for line in run.requests(visit.who) for step in line.request.steps):
                person = same_person(step.actor)
                names.setdefault(person, step.actor)
                did.setdefault(person, Counter())[step.status] += 1
    today = utc_now()[:10]
    people = []
    for token in console_of(visit.request).tokens.all():
        state = "works" if token.works(today) else "revoked" if token.revoked else "expired"
        people.append((token, state, did.get(same_person(token.name), Counter())))
    owners = {same_person(token.name) for token, _, _ in people}
    others = sorted(name for person, name in names.items() if person not in owners)
    return show("people.html", visit.visitor, people=people, others=others)


@router.get("/trail")
def show_trail(visit: Visiting) -> Response:
    """Show the audit trail of all runs, latest events first."""
    return _trail(visit, None)


@router.get("/runs/{run}/trail")
def show_trail_of_run(visit: Visiting, run: RunOf) -> Response:
    """Show the audit trail of one run, latest events first."""
    return _trail(visit, run)


def _trail(visit: Visit, run: ServedRun | None) -> Response:
    asked_for = visit.request.query_params
    number, kind = page_number(asked_for.get("page", "")), asked_for.get("kind", "")
    kind = kind if kind in KINDS else ""
    events, count = visit.runs.trail(visit.who, run, kind, EVENTS_PER_PAGE * number)
    values: dict[str, Any] = {
        "run": run,
        "events": events[EVENTS_PER_PAGE * (number - 1) :],
        "count": count,
        "page": number,
        "pages": -(-count // EVENTS_PER_PAGE),
    }
    return show("trail.html", visit.visitor, kind=kind, kinds=KINDS, **values)
