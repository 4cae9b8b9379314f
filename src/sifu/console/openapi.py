"""The JSON API described by OpenAPI 3.1, from one table; a test holds it against the routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sifu.choices import SigmaChoice, TermOnOffer, terms_on_offer
from sifu.version import __version__

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
OPERATIONS: list[tuple[str, str, str, str, str]] = [
    ("get", "/runs", "list_runs", "Every run with what it does now.", "200"),
    ("get", "/pending", "pending", "What waits in all runs, overdue first.", "200"),
    ("get", "/runs/{run}", "show_run", "One run now, the curve of its accuracy, its last verification.", "200"),
    ("get", "/runs/{run}/requests", "list_requests", "The requests of a run, and those in its inbox.", "200"),
    ("post", "/runs/{run}/requests", "file_request", "File a request; idempotent by its id.", "201"),
    ("get", "/runs/{run}/requests/{number}", "show_request", "One request with every step of its life.", "200"),
    ("get", "/runs/{run}/requests/{number}/certificate", "certificate", "Its public certificate.", "200"),
    ("get", "/runs/{run}/requests/{number}/evidence", "evidence", "Its evidence, a zip file.", "200"),
    ("post", "/runs/{run}/decisions", "decide", "Approve, verify, refuse or withdraw a request.", "200"),
    ("post", "/runs/{run}/carry-out", "carry_out", "Start to carry a request out.", "202"),
    (
        "post",
        "/runs/{run}/plan",
        "compare_ways",
        "What every method would do for some clients; changes nothing.",
        "200",
    ),
    ("post", "/runs/{run}/verify", "verify", "Start to verify a run.", "202"),
]
"""Method, path, operation, what it does, and the status when it works."""
ERRORS = {
    "400": "What was sent cannot be used; the sentence says why.",
    "401": "No token, or one that does not work.",
    "403": "The roles of this token do not allow it.",
    "404": "There is no such run or request, or it is not for this token.",
    "409": "The run is in use, or what is asked cannot be certified.",
    "429": "Too many requests.",
}


def openapi_document() -> dict[str, Any]:
    """The whole document."""
    paths: dict[str, dict[str, Any]] = {}
    for method, path, operation, words, success in OPERATIONS:
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": WHOLE if name == "number" else TEXT}
            for name in ("run", "number")
            if f"{{{name}}}" in path
        ]
        kind = "application/zip" if operation == "evidence" else "application/json"
        shape = TEXT | {"format": "binary"} if operation == "evidence" else {"type": "object"}
        entry: dict[str, Any] = {
            "operationId": operation,
            "summary": words,
            "parameters": parameters,
            "responses": {success: {"description": "Done.", "content": {kind: {"schema": shape}}}}
            | {code: {"description": why, "content": _error()} for code, why in ERRORS.items()},
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


def _error() -> dict[str, Any]:
    return {"application/json": {"schema": {"type": "object", "properties": {"error": TEXT}}}}
