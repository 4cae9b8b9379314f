"""The page of a request: what was asked for, what it would do, what can be decided, and its certificate in words."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from sifu.choices import terms_on_offer
from sifu.console.asking import console_of, read_form, terms_given, visitor_of, work
from sifu.console.desk import Desk
from sifu.console.pages import FILE_POLICY, check_confirmed, note, page, show, way_back
from sifu.console.tokens import Token
from sifu.core.request_terms import AUTO, RequestTerms
from sifu.core.spec import Spec
from sifu.core.wording import rows_words
from sifu.errors import InputError, NotCertifiableError
from sifu.requests.letters import usual_terms
from sifu.requests.request_record import plain_answer
from sifu.run.clients_and_engine import carried_out_elsewhere
from sifu.store.clock import same_person

NOTHING_TO_PLAN = b'<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"/>'
"""Instead of the figure of a request that is being carried out already."""


@page
async def show_request(request: Request) -> Response:
    """One request: where it stands, what can be decided, every way to forget, or its certificate in words."""
    visitor, desk, key = visitor_of(request), console_of(request).desk, request.path_params["run"]
    numbered = await work(desk.request, visitor.token, key, request.path_params["number"])
    status, run = numbered.record.status, desk.find(visitor.token, key)
    spec = await work(lambda: run.run.spec)
    done = status.status == "done"
    waits = status.status in ("received", "verified", "planned")
    plan, others, body, refusal, erased = None, None, None, "", ""
    if waits and visitor.token.may("see"):
        try:
            plan = await work(desk.plan_of, visitor.token, key, numbered.number)
            others = plan if plan.ways else await work(_other_ways, desk, visitor.token, key, status.terms)
        except NotCertifiableError as error:
            refusal = str(error)
        except InputError:  # it was begun since it was read: there is nothing to plan any more
            pass
    if done:
        try:
            body = (await work(desk.certificate, visitor.token, key, numbered.number))["body"]
        except InputError as error:
            erased = str(error)
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
        erased=erased,
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
async def decide(request: Request) -> Response:
    """Record a decision from a button."""
    visitor, desk, key = visitor_of(request), console_of(request).desk, request.path_params["run"]
    fields = await read_form(request, visitor)
    name, decision = fields.get("request", ""), fields.get("decision", "")
    if decision == "refused" and visitor.token.may("refuse"):
        check_confirmed(fields, "a refusal")
    arguments = (name, decision, fields.get("reason", ""), fields.get("terms", ""))
    outcome = await work(desk.decide, visitor.token, key, *arguments)
    words = {"recorded": f"is {decision}", "unchanged": f"was {decision} already"}
    note(visitor, f"Request {name} {words.get(outcome, f'{decision}: handed to the process that writes to the run')}.")
    return RedirectResponse(_back_to_request(request, fields), 303)


@page
async def carry_out(request: Request) -> Response:
    """Start to carry a request out."""
    visitor, desk, key = visitor_of(request), console_of(request).desk, request.path_params["run"]
    fields = await read_form(request, visitor)
    if visitor.token.may("carry out"):
        check_confirmed(fields, "carrying out a request")
    await work(desk.carry_out, visitor.token, key, fields.get("request", ""))
    note(visitor, f"Request {fields.get('request', '')} is being carried out.")
    return RedirectResponse(_back_to_request(request, fields), 303)


def _back_to_request(request: Request, fields: dict[str, str]) -> str:
    number = fields.get("number", "")
    return f"{way_back(request)}/requests/{number}" if number.isdecimal() else way_back(request)


@page
async def figure(request: Request) -> Response:
    """The figure of what each noise would cost, for a request that waits."""
    visitor, desk, key = visitor_of(request), console_of(request).desk, request.path_params["run"]
    numbered = await work(desk.request, visitor.token, key, request.path_params["number"])
    phone = request.query_params.get("phone") == "yes"
    drawing = await work(_draw, desk, visitor.token, key, numbered.record.status, phone)
    return Response(drawing, media_type="image/svg+xml", headers={"Content-Security-Policy": FILE_POLICY})


def _draw(desk: Desk, who: Token, key: str, status: Any, phone: bool) -> bytes:
    from sifu.plots.style import figure_bytes, narrow_figures
    from sifu.report.psi_figure import draw_plan

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


ROUTES = [
    Route("/runs/{run}/decide", decide, methods=["POST"]),
    Route("/runs/{run}/carry-out", carry_out, methods=["POST"]),
    Route("/runs/{run}/requests/{number:int}", show_request),
    Route("/runs/{run}/requests/{number:int}/figure.svg", figure),
    Route("/runs/{run}/requests/{number:int}/evidence", evidence),
]
