"""What programs read: the JSON API with its OpenAPI 3.1 description, from one table, and metrics for Prometheus.

Metrics are counts and times of every run, and nothing of any client.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sifu.choices import SigmaChoice, TermOnOffer, terms_on_offer
from sifu.console.asking import (
    NotKnownError,
    client_names,
    console_of,
    days,
    read_json,
    status_code,
    terms_given,
    visitor_of,
    work,
)
from sifu.console.desk import Desk
from sifu.console.run_at_desk import NumberedRequest, RunAtDesk
from sifu.console.tokens import Token
from sifu.core.ledger import plain_values
from sifu.core.request_terms import AUTO
from sifu.errors import InputError, SifuError
from sifu.requests.approvals import pending_requests
from sifu.store.clock import current_time, time_of
from sifu.version import __version__

STATES = ("received", "verified", "planned", "running", "done", "refused", "withdrawn", "posted")
METRICS = {
    "sifu_readable": "0 where the run cannot be read: damaged, or signed with another key.",
    "sifu_rounds_total": "Rounds that were run, in all branches.",
    "sifu_incidents_total": "Absences and other incidents in rounds.",
    "sifu_refused_replies_total": "Replies of clients that were refused.",
    "sifu_clients": "Clients that the run knows.",
    "sifu_at_work": "1 while a process writes to the run.",
    "sifu_accuracy": "Accuracy of the current model on the active clients' training data.",
    "sifu_held_out_accuracy": "Accuracy of the current model on held-out rows.",
    "sifu_requests": "Requests by state.",
    "sifu_requests_overdue": "Requests that should be done by now.",
    "sifu_seconds_to_deadline": "Seconds to the next deadline; negative when it is over.",
    "sifu_last_verification_timestamp_seconds": "When this console last verified the run.",
    "sifu_last_verification_holds": "1 if it held, 0 if something was wrong.",
}
"""Every metric and what it says; what ends in _total is a counter."""


class _AllRuns(Collector):
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def collect(self) -> Iterable[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for name, words in METRICS.items():
            labels = ["run", "name", *(["state"] if name == "sifu_requests" else [])]
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            families[name] = kind(name, words, labels=labels)
        for run in self._desk.every_run().values():
            try:
                figures = list(_of_run(run, self._desk))
            except SifuError:
                figures = [("sifu_readable", 0.0)]
            for name, value, *labels in figures:
                families[name].add_metric([run.key, run.name, *labels], value)
        return families.values()


def render_metrics(desk: Desk) -> bytes:
    """The text that Prometheus reads."""
    return generate_latest(_AllRuns(desk))


def _of_run(run: RunAtDesk, desk: Desk) -> Iterator[tuple[str, float] | tuple[str, float, str]]:
    live = run.live()
    now = current_time()
    with run.run.reader() as reader, reader.snapshot():
        ((rounds,),) = reader.query("SELECT COUNT(*) FROM nodes WHERE kind = 'round'")
        ((incidents,),) = reader.query(
            "SELECT COALESCE(SUM(json_array_length(payload, '$.incidents')), 0) FROM events WHERE kind = 'incidents'"
        )
        ((refused,),) = reader.query("SELECT COUNT(*) FROM rejections")
        states = Counter(row.status for row in reader.requests())
        pending = pending_requests(reader, now)
    states["posted"] = sum(row.status == "posted" for row in pending)
    yield "sifu_readable", 1.0
    yield "sifu_rounds_total", rounds
    yield "sifu_incidents_total", incidents
    yield "sifu_refused_replies_total", refused
    yield "sifu_clients", live.clients
    yield "sifu_at_work", live.at_work
    if live.accuracy is not None:
        yield "sifu_accuracy", live.accuracy
    if live.held_out is not None and live.held_out.accuracy is not None:
        yield "sifu_held_out_accuracy", live.held_out.accuracy
    for state in STATES:
        yield "sifu_requests", states[state], state
    yield "sifu_requests_overdue", live.overdue
    if pending:
        yield "sifu_seconds_to_deadline", (time_of(pending[0].deadline) - now).total_seconds()
    verified = desk.verifications().get(run.key)
    if verified:
        yield "sifu_last_verification_timestamp_seconds", time_of(str(verified["time"])).timestamp()
        yield "sifu_last_verification_holds", bool(verified["holds"])


TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
PLAIN: dict[Any, dict[str, Any]] = {
    float: {"type": "number"},
    int: WHOLE,
    str: TEXT,
    SigmaChoice: {"oneOf": [{"type": "number"}, {"const": "auto"}]},
    Sequence[int | str]: {"type": "array", "items": {"oneOf": [WHOLE, TEXT]}},
}


def _term(term: TermOnOffer) -> dict[str, Any]:
    shape = {"enum": list(term.choices)} if term.choices else PLAIN[term.kind]
    return shape | {"description": term.about.help}


TERMS = {
    "type": "object",
    "description": "What is left out comes from the run's spec.",
    "additionalProperties": False,
    "properties": {name: _term(term) for name, term in terms_on_offer().items()},
}
CLIENTS = {"type": "array", "items": TEXT, "minItems": 1}
BODIES: dict[str, dict[str, Any]] = {
    "file_request": {
        "required": ["clients"],
        "properties": {
            "request": TEXT | {"description": "Your own id; the same again changes nothing."},
            "clients": CLIENTS,
            "deadline_days": WHOLE | {"default": 30, "minimum": 0},
            "terms": TERMS,
        },
    },
    "decide": {
        "required": ["request", "decision"],
        "properties": {
            "request": TEXT,
            "decision": {"enum": ["approved", "verified", "refused", "withdrawn"]},
            "reason": TEXT,
            "terms": TEXT | {"description": "The terms_digest of the request that you saw; an approval needs it."},
        },
    },
    "carry_out": {"required": ["request"], "properties": {"request": TEXT}},
    "compare_ways": {"required": ["clients"], "properties": {"clients": CLIENTS, "terms": TERMS}},
    "verify": {"properties": {}},
}
WHY_NOT = {"application/json": {"schema": {"type": "object", "properties": {"error": TEXT}}}}
ERRORS = {
    "400": "What was sent cannot be used; the sentence says why.",
    "401": "No token, or one that does not work.",
    "403": "The roles of this token do not allow it.",
    "404": "There is no such run or request, or it is not for this token.",
    "409": "The run is in use, or what is asked cannot be certified.",
    "429": "Too many requests.",
}


Handler = Callable[[Request], Awaitable[Response]]


def answering(handler: Handler) -> Handler:
    """Errors become a JSON object with a sentence and the right status."""

    @functools.wraps(handler)
    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except SifuError as error:
            headers = {"WWW-Authenticate": "Bearer"} if isinstance(error, NotKnownError) else None
            return JSONResponse({"error": str(error)}, status_code(error), headers)

    return answer


def _json(value: Any, status: int = 200) -> JSONResponse:
    return JSONResponse(plain_values(value), status)


@answering
async def list_runs(request: Request) -> Response:
    """Every run with what it does now."""
    who, desk = visitor_of(request).token, console_of(request).desk
    return _json({"runs": await work(_runs, desk, who)})


def _runs(desk: Desk, who: Token) -> list[dict[str, Any]]:
    listed = []
    for run in desk.runs(who):
        try:
            live = run.live().to_mapping() if who.may("see") else {}
        except SifuError as error:  # one run that cannot be read hides no other
            live = {"error": str(error)}
        listed.append({"run": run.key, "name": run.name} | {key: live[key] for key in live if key != "curve"})
    return listed


@answering
async def show_run(request: Request) -> Response:
    """One run now, the curve of its accuracy, its last verification."""
    who, desk, key = visitor_of(request).token, console_of(request).desk, request.path_params["run"]
    live = await work(desk.live, who, key)
    run = desk.find(who, key)
    verified = await work(desk.last_verification, who, key)
    jobs = [asdict(job) for job in desk.jobs.of_run(key)]
    return _json({"run": run.key, "name": run.name, "verification": verified, "jobs": jobs} | live.to_mapping())


@answering
async def list_requests(request: Request) -> Response:
    """The requests of a run, and those in its inbox."""
    who, desk, key = visitor_of(request).token, console_of(request).desk, request.path_params["run"]
    recorded = await work(desk.requests, who, key)
    posted = await work(desk.posted, who, key)
    listed = [{key: value for key, value in row.to_mapping().items() if key != "run"} for row in posted]
    return _json({"requests": [_request(numbered) for numbered in recorded], "posted": listed})


def _request(numbered: NumberedRequest) -> dict[str, Any]:
    return {"number": numbered.number} | numbered.record.to_mapping() | {"state": numbered.state}


@answering
async def show_request(request: Request) -> Response:
    """One request with every step of its life."""
    who, desk = visitor_of(request).token, console_of(request).desk
    key, number = request.path_params["run"], request.path_params["number"]
    return _json(_request(await work(desk.request, who, key, number)))


@answering
async def file_request(request: Request) -> Response:
    """File a request; idempotent by its id."""
    visitor, desk, key = visitor_of(request), console_of(request).desk, request.path_params["run"]
    content = await read_json(request, visitor)
    unknown = set(content) - {"request", "clients", "deadline_days", "terms"}
    if unknown:
        raise InputError(f"a request has no field {', '.join(sorted(unknown))[:80]!r}")
    name = content.get("request")
    if name is not None and not isinstance(name, str):
        raise InputError("request is a text")
    terms = terms_given(content.get("terms") or {})
    arguments = (client_names(content.get("clients")), name, days(content.get("deadline_days")), terms)
    filed = await work(desk.file, visitor.token, key, *arguments)
    run = desk.find(visitor.token, key)
    status = await work(run.run.request_status, filed)
    number = await work(_number_of, desk, visitor.token, run, filed)
    return _json({"request": filed, "number": number, "status": status}, 201)


def _number_of(desk: Desk, who: Token, run: RunAtDesk, request: str) -> int | None:
    numbered = (row.number for row in desk.requests(who, run.key) if row.record.status.request == request)
    return next(numbered, None)


@answering
async def decide(request: Request) -> Response:
    """Approve, verify, refuse or withdraw a request."""
    visitor, desk, key = visitor_of(request), console_of(request).desk, request.path_params["run"]
    content = await read_json(request, visitor)
    words = [content.get(name, "") for name in ("request", "decision", "reason", "terms")]
    if not all(isinstance(word, str) for word in words):
        raise InputError("request, decision, reason and terms are texts")
    outcome = await work(desk.decide, visitor.token, key, *words)
    return _json({"request": words[0], "decision": words[1], "outcome": outcome})


@answering
async def carry_out(request: Request) -> Response:
    """Start to carry a request out."""
    visitor, desk, key = visitor_of(request), console_of(request).desk, request.path_params["run"]
    content = await read_json(request, visitor)
    job = await work(desk.carry_out, visitor.token, key, str(content.get("request", "")))
    return _json({"job": asdict(job)}, 202)


@answering
async def compare_ways(request: Request) -> Response:
    """What every method would do for some clients; changes nothing."""
    visitor, desk, key = visitor_of(request), console_of(request).desk, request.path_params["run"]
    content = await read_json(request, visitor)
    terms = terms_given(content.get("terms") or {})
    terms["method"] = AUTO
    plan = await work(desk.plan, visitor.token, key, client_names(content.get("clients")), terms)
    why = plan.auto.reason if plan.auto else None
    return _json({"ways": [asdict(way) for way in plan.ways], "chosen": plan.terms.method, "why": why})


@answering
async def verify(request: Request) -> Response:
    """Start to verify a run."""
    visitor, desk, key = visitor_of(request), console_of(request).desk, request.path_params["run"]
    await read_json(request, visitor)
    return _json({"job": asdict(await work(desk.verify, visitor.token, key))}, 202)


@answering
async def certificate(request: Request) -> Response:
    """Its public certificate."""
    who, desk = visitor_of(request).token, console_of(request).desk
    return _json(await work(desk.certificate, who, request.path_params["run"], request.path_params["number"]))


@answering
async def evidence(request: Request) -> Response:
    """Its evidence, a zip file."""
    who, desk = visitor_of(request).token, console_of(request).desk
    name, content = await work(desk.evidence, who, request.path_params["run"], request.path_params["number"])
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(content, media_type="application/zip", headers=headers)


@answering
async def pending(request: Request) -> Response:
    """What waits in all runs, overdue first."""
    who, desk = visitor_of(request).token, console_of(request).desk
    desk.demand(who, "see")
    return _json({"requests": [asdict(line) for line in await work(desk.lines, who) if not line.settled]})


@answering
async def metrics(request: Request) -> Response:
    """Metrics for Prometheus; needs a token that may examine."""
    console, who = console_of(request), visitor_of(request).token
    console.desk.demand(who, "examine")
    return Response(await work(render_metrics, console.desk), media_type="text/plain; version=0.0.4; charset=utf-8")


OPERATIONS: list[tuple[str, str, Handler, int]] = [
    ("get", "/runs", list_runs, 200),
    ("get", "/pending", pending, 200),
    ("get", "/runs/{run}", show_run, 200),
    ("get", "/runs/{run}/requests", list_requests, 200),
    ("post", "/runs/{run}/requests", file_request, 201),
    ("get", "/runs/{run}/requests/{number}", show_request, 200),
    ("get", "/runs/{run}/requests/{number}/certificate", certificate, 200),
    ("get", "/runs/{run}/requests/{number}/evidence", evidence, 200),
    ("post", "/runs/{run}/decisions", decide, 200),
    ("post", "/runs/{run}/carry-out", carry_out, 202),
    ("post", "/runs/{run}/plan", compare_ways, 200),
    ("post", "/runs/{run}/verify", verify, 202),
]
"""Method, path, what answers and says what it does, and the status when it works."""


def openapi_document() -> dict[str, Any]:
    """The whole document."""
    paths: dict[str, dict[str, Any]] = {}
    for method, path, handler, success in OPERATIONS:
        operation = handler.__name__
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": WHOLE if name == "number" else TEXT}
            for name in ("run", "number")
            if f"{{{name}}}" in path
        ]
        kind = "application/zip" if operation == "evidence" else "application/json"
        shape = TEXT | {"format": "binary"} if operation == "evidence" else {"type": "object"}
        entry: dict[str, Any] = {
            "operationId": operation,
            "summary": handler.__doc__,
            "parameters": parameters,
            "responses": {str(success): {"description": "Done.", "content": {kind: {"schema": shape}}}}
            | {code: {"description": why, "content": WHY_NOT} for code, why in ERRORS.items()},
        }
        if operation in BODIES:
            schema = {"type": "object", "additionalProperties": False} | BODIES[operation]
            entry["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths.setdefault(path, {})[method] = entry
    return {
        "openapi": "3.1.0",
        "info": {"title": "sifu console", "version": __version__},
        "servers": [{"url": "/api/v1"}],
        "security": [{"token": []}],
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "paths": paths,
    }


async def openapi(request: Request) -> Response:
    """This API in words for machines; tells nothing of any run."""
    return JSONResponse(openapi_document())


API = "/api/v1"
ROUTES = [
    Route(f"{API}/openapi.json", openapi),
    *(
        Route(API + path.replace("{number}", "{number:int}"), handler, methods=[method.upper()])
        for method, path, handler, _ in OPERATIONS
    ),
    Route("/metrics", metrics),
]
