"""The console's pages of one request: its plan, the decisions on it, its execution and its certificate."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

from fastapi import APIRouter, Response
from fastapi.responses import RedirectResponse

from sifu.choices import terms_on_offer
from sifu.core.operator_words import rows_words
from sifu.core.request_terms import AUTO, Terms
from sifu.errors import InputError, NotCertifiableError
from sifu.store.actors import same_person
from sifu_console.asking import RunOf, Visit, Visiting
from sifu_console.pages import check_confirmed, show, way_back
from sifu_console.runs import ServedRun
from sifu_console.tokens import Token

router = APIRouter()


@router.get("/runs/{run}/requests/{number:int}")
def show_request(visit: Visiting, run: RunOf, number: int) -> Response:
    """Show one request with the possible decisions, and a comparison of methods or the certificate's statements."""
    who = visit.who
    (_, record, state), spec = run.request(who, number), run.run.spec
    terms, usual = cast("Terms", record.terms), run.run.usual_terms(record.clients)
    plan, others, certificate, refusal = None, None, None, ""
    if record.waits and who.may("see"):
        try:
            plan = run.plan_of(who, record.request)
            others = plan if plan.ways else _other_options(run, who, terms)
        except NotCertifiableError as error:
            refusal = str(error)
        except InputError:  # the request has started meanwhile and needs no plan
            pass
    # Requesters may name row numbers, but may not see the identities of these rows.
    identities = run.identities(who, record.request) if who.may("see") else ()
    if record.status == "done":
        certificate = run.certificate(who, number)
    return show(
        "request.html",
        visit.visitor,
        run=run,
        number=number,
        status=record,
        state=state,
        waits=record.waits and state != "running",
        plan=plan,
        others=others,
        refusal=refusal,
        terms=_terms_in_words(terms, identities),
        usual=_terms_in_words(usual),
        changed=[name for name in terms_on_offer() if getattr(terms, name) != getattr(usual, name)],
        answer=_paragraphs(certificate.lines(everything=True)) if certificate else None,
        body=certificate.body if certificate else None,
        live=run.progress() if who.may("see") else None,
        jobs=[job for job in run.jobs.of_run(run.key) if job.request == record.request][:1],
        own=same_person(who.name) == same_person(record.filed_by),
        approval=spec.requests.approval,
        elsewhere=run.run.executed_elsewhere,
    )


def _other_options(run: ServedRun, who: Token, terms: Terms) -> Any:
    """Return a plan that compares all methods under the same terms, or None if no such plan is possible."""
    given: Any = {name: value for name, value in terms.to_mapping().items() if value not in (None, [])}
    clients = given.pop("clients")
    with suppress(InputError, NotCertifiableError):
        return run.plan(who, clients, given | {"method": AUTO})
    return None


def _terms_in_words(terms: Terms, identities: Sequence[str] = ()) -> dict[str, str]:
    """Return the terms of a request as readable phrases."""
    filed = terms.to_mapping()
    words = {name: f"{value:.6g}" if isinstance(value, float) else str(value) for name, value in filed.items()}
    for name, offered in terms_on_offer().items():
        if words[name] in offered.about.words:
            words[name] = f"{offered.about.words[words[name]]} ({words[name]})"
    words["records"] = rows_words(terms.records, identities)
    if terms.level is None:
        words["level"] = "conditional, or none for a method without a guarantee"
    if terms.before_after is None:
        words["before_after"] = "not demanded"
    return words


def _paragraphs(lines: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the lines of a certificate as paragraphs, each with its list items."""
    paragraphs: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith("- ") and paragraphs:
            paragraphs[-1][1].append(line[2:])
        else:
            paragraphs.append((line, []))
    return paragraphs


@router.post("/runs/{run}/decide")
def decide(visit: Visiting, run: RunOf) -> Response:
    """Record a decision that was made with a button."""
    name, decision = visit.text("request"), visit.text("decision")
    if decision == "refused" and visit.who.may("refuse"):
        check_confirmed(visit, "a refusal")
    outcome = run.decide(visit.who, name, decision, visit.text("reason"), visit.text("terms"))
    words = {"recorded": f"is {decision}", "unchanged": f"was {decision} already"}
    visit.note(f"Request {name} {words.get(outcome, f'{decision}: handed to the process that writes to the run')}.")
    return _back_to_request(visit)


@router.post("/runs/{run}/carry-out")
def execute(visit: Visiting, run: RunOf) -> Response:
    """Start the execution of a request."""
    if visit.who.may("carry out"):
        check_confirmed(visit, "execution")
    run.execute(visit.who, visit.text("request"))
    visit.note(f"Request {visit.text('request')} is being executed.")
    return _back_to_request(visit)


def _back_to_request(visit: Visit) -> Response:
    number, back = visit.text("number"), way_back(visit.request)
    return RedirectResponse(f"{back}/requests/{number}" if number.isdecimal() else back, 303)


@router.get("/runs/{run}/requests/{number:int}/bundle")
def bundle(visit: Visiting, run: RunOf, number: int) -> Response:
    """Return the bundle of a request."""
    name, content = run.bundle(visit.who, number)
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(content, media_type="application/json", headers=headers)
