"""The JSON API with its OpenAPI 3.1 description, both from one table."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sifu.choices import SigmaChoice, TermOnOffer, terms_on_offer
from sifu.core.ledger import plain_values
from sifu.core.request_terms import AUTO
from sifu.errors import SifuError
from sifu.version import __version__
from sifu_console.asking import (
    MOST_CLIENTS,
    NotKnownError,
    Visit,
    answer_to,
    client_names,
    days,
    read_json,
    status_code,
    terms_given,
    visitor_of,
)
from sifu_console.request_lines import NumberedRequest
from sifu_console.request_pages import bundle
from sifu_console.schema import check_body
from sifu_console.served_run import RECEIVED

TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
PLAIN: dict[Any, dict[str, Any]] = {
    float: {"type": "number"},
    int: WHOLE,
    str: TEXT,
    SigmaChoice: {"oneOf": [{"type": "number"}, {"const": "auto"}]},
    Sequence[int | str]: {"type": "array", "items": {"oneOf": [WHOLE, TEXT]}, "minItems": 1},
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
CLIENTS = {"type": "array", "items": TEXT, "minItems": 1, "maxItems": MOST_CLIENTS}
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
    "execute": {"required": ["request"], "properties": {"request": TEXT}},
    "compare_ways": {"required": ["clients"], "properties": {"clients": CLIENTS, "terms": TERMS}},
    "verify": {"properties": {}},
}
SCHEMAS = {name: {"type": "object", "additionalProperties": False} | body for name, body in BODIES.items()}
"""Schemas of the request bodies, used both for the published description and for validation."""
WHY_NOT = {"application/json": {"schema": {"type": "object", "properties": {"error": TEXT}}}}
ERRORS = {
    "400": "What was sent cannot be used; the sentence says why.",
    "401": "No token, or one that does not work.",
    "403": "The roles of this token do not allow it.",
    "404": "There is no such run or request, or it is not for this token.",
    "409": "The run or the id of the request is in use, or what is asked cannot be certified.",
    "429": "Too many requests.",
}


Operation = Callable[[Visit], Any]
"""A function that returns a Response or a value to send as JSON; its docstring becomes its OpenAPI summary."""


def answering(operation: Operation, success: int) -> Callable[[Request], Awaitable[Response]]:
    """Wrap an operation as a handler for logged-in visitors.

    The operation runs in a worker thread. Errors become a JSON object with a message and the matching status.
    """

    @functools.wraps(operation)
    async def answer(request: Request) -> Response:
        try:
            visitor = visitor_of(request)
            fields = await read_json(request, visitor) if request.method == "POST" else {}
            check_body(SCHEMAS.get(operation.__name__, {}), fields)
            value = await run_in_threadpool(operation, Visit(request, visitor, fields))
        except SifuError as error:
            headers = {"WWW-Authenticate": "Bearer"} if isinstance(error, NotKnownError) else None
            _, sentence = answer_to(request, error)
            return JSONResponse({"error": sentence}, status_code(error), headers)
        return value if isinstance(value, Response) else JSONResponse(plain_values(value), success)

    return answer


def list_runs(visit: Visit) -> Any:
    """List every run with its current state."""
    listed = []
    for run in visit.service.runs(visit.who):
        try:
            live = asdict(run.live()) if visit.who.may("see") else {}
        except SifuError as error:  # an unreadable run must not hide other runs
            live = {"error": str(error)}
        listed.append({"run": run.key, "name": run.name} | {key: live[key] for key in live if key != "curve"})
    return {"runs": listed}


def show_run(visit: Visit) -> Any:
    """Return one run: its current state, accuracy curve and last verification."""
    run, verification = visit.run, visit.run.verification(visit.who)
    jobs = [asdict(job) for job in run.jobs.of_run(run.key)]
    return {"run": run.key, "name": run.name, "verification": verification, "jobs": jobs} | asdict(run.live())


def list_requests(visit: Visit) -> Any:
    """List the requests of a run, those in its inbox, and those refused before they were in its ledger."""
    recorded = [_request(numbered) for numbered in visit.run.requests(visit.who)]
    posted = [row.to_mapping() for row in visit.run.posted(visit.who)]
    refused = [asdict(line) for line in visit.run.refused(visit.who)]
    posted = [{key: row[key] for key in row if key != "run"} for row in posted]
    return {"requests": recorded, "posted": posted, "refused": refused}


def _request(numbered: NumberedRequest) -> dict[str, Any]:
    return {"number": numbered.number} | numbered.record.to_mapping() | {"state": numbered.state}


def show_request(visit: Visit) -> Any:
    """Return one request with all its steps."""
    return _request(visit.run.request(visit.who, visit.number))


def file_request(visit: Visit) -> Any:
    """File a request; idempotent by its id."""
    run, who, content = visit.run, visit.who, visit.fields
    terms, due = terms_given(content.get("terms", {})), days(content.get("deadline_days"))
    filed, nonces = run.file(who, client_names(content["clients"]), content.get("request"), due, terms)
    told = {"nonces": nonces} if terms.get("records") else {}
    if not who.may("see"):
        return {"request": filed, "status": RECEIVED} | told
    numbers = (row.number for row in run.requests(who) if row.record.status.request == filed)
    answer = {"request": filed, "number": next(numbers, None), "status": run.run.request_status(filed)}
    return answer | told


def decide(visit: Visit) -> Any:
    """Approve, verify, refuse or withdraw a request."""
    words = [visit.fields.get(name, "") for name in ("request", "decision", "reason", "terms")]
    outcome = visit.run.decide(visit.who, *words)
    return {"request": words[0], "decision": words[1], "outcome": outcome}


def execute(visit: Visit) -> Any:
    """Start the execution of a request."""
    return {"job": asdict(visit.run.execute(visit.who, visit.text("request")))}


def compare_ways(visit: Visit) -> Any:
    """Compare the methods for forgetting some clients; changes nothing."""
    terms = terms_given(visit.fields.get("terms", {}))
    terms["method"] = AUTO
    plan = visit.run.plan(visit.who, client_names(visit.fields["clients"]), terms)
    why = plan.auto.reason if plan.auto else None
    return {"ways": [asdict(way) for way in plan.ways], "chosen": plan.terms.method, "why": why}


def verify(visit: Visit) -> Any:
    """Start the verification of a run."""
    return {"job": asdict(visit.run.start(visit.who, "verify"))}


def certificate(visit: Visit) -> Any:
    """Return the public certificate of a request."""
    return visit.run.certificate(visit.who, visit.number)


def pending(visit: Visit) -> Any:
    """List the open requests of all runs, overdue ones first."""
    visit.who.demand("see")
    return {"requests": [asdict(line) for line in visit.service.lines(visit.who) if not line.settled]}


OPERATIONS: list[tuple[str, str, Operation, int]] = [
    ("get", "/runs", list_runs, 200),
    ("get", "/pending", pending, 200),
    ("get", "/runs/{run}", show_run, 200),
    ("get", "/runs/{run}/requests", list_requests, 200),
    ("post", "/runs/{run}/requests", file_request, 201),
    ("get", "/runs/{run}/requests/{number}", show_request, 200),
    ("get", "/runs/{run}/requests/{number}/certificate", certificate, 200),
    ("get", "/runs/{run}/requests/{number}/bundle", bundle, 200),
    ("post", "/runs/{run}/decisions", decide, 200),
    ("post", "/runs/{run}/carry-out", execute, 202),
    ("post", "/runs/{run}/plan", compare_ways, 200),
    ("post", "/runs/{run}/verify", verify, 202),
]
"""The operations: HTTP method, path, handler, and status code of success."""


DONE = {"application/json": {"schema": {"type": "object"}}}


def openapi_document() -> dict[str, Any]:
    """Return the OpenAPI document."""
    paths: dict[str, dict[str, Any]] = {}
    for method, path, handler, success in OPERATIONS:
        operation = handler.__name__
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": WHOLE if name == "number" else TEXT}
            for name in ("run", "number")
            if f"{{{name}}}" in path
        ]
        entry: dict[str, Any] = {
            "operationId": operation,
            "summary": handler.__doc__,
            "parameters": parameters,
            "responses": {
                str(success): {"description": "Done.", "content": {"application/json": {"schema": {"type": "object"}}}}
            }
            | {code: {"description": why, "content": WHY_NOT} for code, why in ERRORS.items()},
        }
        if operation in SCHEMAS:
            entry["requestBody"] = {"required": True, "content": {"application/json": {"schema": SCHEMAS[operation]}}}
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
    """Return the OpenAPI description of this API; it contains nothing about any run."""
    return JSONResponse(openapi_document())


API = "/api/v1"
ROUTES = [
    Route(f"{API}/openapi.json", openapi),
    *(
        Route(API + path.replace("{number}", "{number:int}"), answering(operation, success), methods=[method.upper()])
        for method, path, operation, success in OPERATIONS
    ),
]
