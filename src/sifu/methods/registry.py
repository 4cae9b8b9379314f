"""Registry of methods by name, and plans of requests, made by the named method or the one that `auto` chooses."""

from __future__ import annotations

from dataclasses import replace

from sifu.choices import Level
from sifu.core.method_info import CLOSED_FORM, method_info
from sifu.core.operator_words import forgotten_words
from sifu.core.request_terms import AUTO, Terms
from sifu.errors import InputError, NotCertifiableError
from sifu.methods.base import Method
from sifu.methods.closed_form import ClosedForm
from sifu.methods.groups import Groups
from sifu.methods.scratch import Scratch
from sifu.methods.sifu import Sifu
from sifu.planning.plan import AutoChoice, MethodOption, Plan, choose_method, least_level, reason_of, strongest_option
from sifu.run.few_clients import consequences, staying_without
from sifu.run.releases import guarantee_of_all, waiting_note
from sifu.run.run_view import RunView
from sifu.store.given_approvals import approved_requests
from sifu.store.reader import plain_names

METHODS: dict[str, type[Method]] = {method.info.name: method for method in (Sifu, Scratch, ClosedForm, Groups)}


def method_named(name: str) -> Method:
    """Return an instance of the method `name`."""
    return METHODS[method_info(name).name]()


def method_for(view: RunView, name: str) -> Method:
    """Return the method `name`; raise `InputError` if it cannot work with this run."""
    method = method_named(name)
    view.regime.check_method(name)
    method.check_run(view)
    return method


def plan_request(view: RunView, terms: Terms, floor: Level | None = None) -> Plan:
    """Return the plan of a request, made by its method or by the method that `auto` chooses.

    If no method reaches the lowest accepted level, `auto` chooses the strongest method, and the plan's reason says so.
    Notes of the plan warn if too few clients remain.

    Args:
        view: View of the run.
        terms: Terms of the request.
        floor: Lowest level that `auto` accepts, unless the terms demand a higher one.
    """
    plan = _planned(view, terms, floor)
    staying = set(view.active.tolist()) - set(view.indices(terms.clients))
    waiting = waiting_note(view.reader, view.spec, staying)
    left = consequences(view, staying_without(view, terms.clients, records=bool(terms.records)))
    notes = (*left, also_left_out(view, terms), waiting)
    solved = plan.terms.method == CLOSED_FORM
    return replace(
        plan,
        notes=(*plan.notes, *filter(None, notes)),
        before_after=guarantee_of_all(view.reader, view.spec, view.indices(terms.clients), terms) if solved else None,
    )


def also_left_out(view: RunView, terms: Terms) -> str:
    """Describe the clients and records that other approved requests leave out of the release, or return ""."""
    others = [row for row in approved_requests(view.reader) if set(row.clients).isdisjoint(terms.clients)]
    words = [
        f"{forgotten_words(plain_names(view.reader, row.clients), len(row.records) or None)} (request {row.request})"
        for row in others
    ]
    return f"also left out by pending requests: {'; '.join(words)}" if words else ""


def _planned(view: RunView, terms: Terms, floor: Level | None) -> Plan:
    if terms.method != AUTO:
        return method_for(view, terms.method).plan(view, terms)
    view.new_subjects(terms, view.next_order)
    plans: dict[str, Plan] = {}
    options = []
    for name in METHODS:
        try:
            method = method_for(view, name)
            plans[name] = method.plan(view, replace(terms, method=name))
        except (InputError, NotCertifiableError) as error:
            options.append(MethodOption(name, summary=method_info(name).summary, refused=str(error)))
        else:
            options.append(_option(method, plans[name]))
    # Allowed methods come first; among them, certified methods; among these, methods with fewer rounds.
    options.sort(key=lambda option: (bool(option.refused), option.level == "none", option.cost))
    least = least_level(terms, floor)
    allowed = [option for option in options if not option.refused]
    if not allowed:
        raise InputError(f"no method can execute this request in this run: {options[0].refused}")
    compared = tuple(option for option in allowed if option.may_be_chosen) or tuple(allowed)
    chosen = choose_method(compared, least) or strongest_option(compared)
    choice = AutoChoice(least, compared, reason_of(chosen, compared, least))
    return replace(plans[chosen], ways=tuple(options), auto=choice)


def _option(method: Method, plan: Plan) -> MethodOption:
    info = method.info
    return MethodOption(
        method=info.name,
        summary=info.summary,
        level=plan.level,
        rounds=plan.rounds,
        source_rounds=None if plan.source_node is None else plan.source_rounds,
        noise_std=plan.noise_std,
        may_be_chosen=plan.terms.sigma == AUTO or info.takes_sigma,
    )
