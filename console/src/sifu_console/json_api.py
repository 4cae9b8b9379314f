"""The JSON API; FastAPI derives its OpenAPI description from the functions and models here."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Depends, Response
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer

from sifu.core.ledger import plain_values
from sifu.core.request_terms import AUTO
from sifu.errors import SifuError
from sifu_console.asking import RunOf, Visiting
from sifu_console.bodies import Chosen, Compared, Decided, Filed, Problem
from sifu_console.request_pages import bundle
from sifu_console.runs import RECEIVED

API = "/api/v1"


WHY_NOT = (
    "400: this cannot be used. 401: no token, or one that does not work. 403: the roles of this token do not allow it. "
    "404: there is no such run or request, or it is not for this token. 409: the run or the id is in use, or what is "
    "asked cannot be certified. 429: too many requests."
)
router = APIRouter(
    prefix=API,
    dependencies=[Depends(HTTPBearer(auto_error=False))],
    responses={"4XX": {"model": Problem, "description": WHY_NOT}},
)


def answer(value: Any, code: int = 200) -> Response:
    """Return a value as JSON; numbers that JSON cannot represent become null."""
    return JSONResponse(plain_values(value), code)


@router.get("/runs")
def list_runs(visit: Visiting) -> Response:
    """List every run with its current state."""
    listed = []
    for run in visit.runs.of(visit.who):
        try:
            live = asdict(run.progress()) if visit.who.may("see") else {}
        except SifuError as error:  # an unreadable run must not hide other runs
            live = {"error": str(error)}
        listed.append({"run": run.key, "name": run.name} | {key: live[key] for key in live if key != "curve"})
    return answer({"runs": listed})


@router.get("/pending")
def pending(visit: Visiting) -> Response:
    """List the open requests of all runs, overdue ones first, and the runs that cannot be read."""
    visit.who.demand("see")
    lines, unread = visit.runs.lines(visit.who)
    listed = [line.to_mapping() for line in lines if not line.settled]
    return answer({"requests": listed, "unread": [{"run": run.key, "name": run.name} for run in unread]})


@router.get("/runs/{run}")
def show_run(visit: Visiting, run: RunOf) -> Response:
    """Return one run: its current state, accuracy curve and last verification."""
    about = {"run": run.key, "name": run.name, "verification": run.verification(visit.who)}
    return answer(about | {"jobs": [asdict(job) for job in run.jobs.of_run(run.key)]} | asdict(run.progress()))


@router.get("/runs/{run}/requests")
def list_requests(visit: Visiting, run: RunOf) -> Response:
    """List the requests of a run, those in its inbox, and those refused before they were in its ledger."""
    parts = {"requests": run.requests, "posted": run.posted, "refused": run.refused}
    return answer({name: [line.to_mapping() for line in read(visit.who)] for name, read in parts.items()})


@router.get("/runs/{run}/requests/{number:int}")
def show_request(visit: Visiting, run: RunOf, number: int) -> Response:
    """Return one request with all its steps."""
    return answer(run.request(visit.who, number).to_mapping())


@router.post("/runs/{run}/requests", status_code=201)
def file_request(visit: Visiting, run: RunOf, body: Filed) -> Response:
    """File a request; idempotent by its id."""
    terms = body.terms.model_dump(exclude_unset=True)
    filed, nonces = run.file(visit.who, body.clients, body.request, body.deadline_days, terms)
    told = {"nonces": nonces} if terms.get("records") else {}
    if not visit.who.may("see"):
        return answer({"request": filed, "status": RECEIVED} | told, 201)
    numbers = (line.request.number for line in run.requests(visit.who) if line.request.request == filed)
    about = {"request": filed, "number": next(numbers, None), "status": run.run.request_record(filed).status}
    return answer(about | told, 201)


@router.post("/runs/{run}/decisions")
def decide(visit: Visiting, run: RunOf, body: Decided) -> Response:
    """Approve, verify, refuse or withdraw a request."""
    outcome = run.decide(visit.who, body.request, body.decision, body.reason, body.terms)
    return answer({"request": body.request, "decision": body.decision, "outcome": outcome})


@router.post("/runs/{run}/carry-out", status_code=202)
def execute(visit: Visiting, run: RunOf, body: Chosen) -> Response:
    """Start the execution of a request."""
    return answer({"job": asdict(run.execute(visit.who, body.request))}, 202)


@router.post("/runs/{run}/plan")
def compare_ways(visit: Visiting, run: RunOf, body: Compared) -> Response:
    """Compare the methods for forgetting some clients; changes nothing."""
    plan = run.plan(visit.who, body.clients, body.terms.model_dump(exclude_unset=True) | {"method": AUTO})
    return answer(plan.to_mapping())


@router.post("/runs/{run}/verify", status_code=202)
def verify(visit: Visiting, run: RunOf) -> Response:
    """Start the verification of a run."""
    return answer({"job": asdict(run.start(visit.who, "verify"))}, 202)


@router.get("/runs/{run}/requests/{number:int}/certificate")
def certificate(visit: Visiting, run: RunOf, number: int) -> Response:
    """Return the public certificate of a request."""
    return answer(run.certificate(visit.who, number).to_mapping())


router.get("/runs/{run}/requests/{number:int}/bundle")(bundle)
