"""Registry of methods by name, and plans of requests, made by the named method or the one that `auto` chooses.

Methods of other packages are found through entry points (`sifu.core.extensions`, docs/new-method.md).

A plan also predicts the accuracy of the released model, from recorded evaluations. If retraining is expected to reach
its target, the prediction is the target. If the terms end retraining earlier, or release the model at once, the
prediction is the accuracy on the recorded curve after the same number of rounds, minus the accuracy that the added
noise still costs by then (`planning.measure`).
"""

from __future__ import annotations

import datetime
import math
from dataclasses import replace

import numpy as np

from sifu.choices import Level
from sifu.core.certificate_words import Start, what_was_erased
from sifu.core.extensions import METHODS as EXTENSION_METHODS
from sifu.core.extensions import provided
from sifu.core.method_info import (
    CLOSED_FORM,
    METHOD_INFOS,
    MethodInfo,
    all_method_infos,
    attacker_rate,
    method_info,
)
from sifu.core.operator_words import FLOWER, LOOP, forgotten_words
from sifu.core.request_terms import AUTO, RequestTerms
from sifu.errors import InputError, NotCertifiableError
from sifu.methods.base import Method
from sifu.methods.closed_form import ClosedForm
from sifu.methods.groups import Groups
from sifu.methods.scratch import Scratch
from sifu.methods.sifu import Sifu
from sifu.planning.forecast import Forecast
from sifu.planning.plan import AutoChoice, MethodOption, Plan, choose_method, least_level, reason_of, strongest_option
from sifu.planning.solve_time import measured_speed, request_seconds
from sifu.run.few_clients import consequences, staying_without
from sifu.run.releases import guarantee_of_all, waiting_note
from sifu.run.run_view import RunView
from sifu.store.given_approvals import leaving_requests
from sifu.store.reader import plain_names

METHODS: dict[str, type[Method]] = {method.info.name: method for method in (Sifu, Scratch, ClosedForm, Groups)}


def method_named(name: str) -> Method:
    """Return an instance of the method `name`, from sifu or from an installed package."""
    info = method_info(name)
    if info.name not in METHODS and (method := provided(EXTENSION_METHODS, name)) is not None:
        METHODS[info.name] = method
    return METHODS[info.name]()


def all_methods() -> dict[str, type[Method]]:
    """Return all method classes by name: built-in, from installed packages, and registered in this process."""
    for info in all_method_infos():
        method_named(info.name)
    return METHODS


def method_for(view: RunView, name: str) -> Method:
    """Return the method `name`; raise `InputError` if it cannot work with this run."""
    method = method_named(name)
    view.regime.check_method(name)
    method.check_run(view)
    return method


def register(method: type[Method]) -> None:
    """Register a method in this process; an entry point of the group `sifu.methods` registers it in every process."""
    METHOD_INFOS[method.info.name] = method.info
    METHODS[method.info.name] = method


def released_accuracy(view: RunView, plan: Plan) -> float | None:
    """Return the expected accuracy of the final model on the remaining clients, or None if it is not predictable."""
    forecast = Forecast(view, plan.terms)
    tip = forecast.first.evaluated.get(view.path.nodes[view.path.tip].node)
    if tip is None or not math.isfinite(tip.accuracy) or not view.spec.regime.has_accuracy:
        return None
    now = tip.accuracy + forecast.gain
    if plan.terms.method == CLOSED_FORM:
        return min(1.0, now)
    stop = plan.terms.stop(view.spec.stop)
    limit = 0 if plan.terms.release == "now" else stop.max_rounds
    if stop.target > 0.0 and plan.predicted_rounds is not None and plan.predicted_rounds <= limit:
        return stop.target
    if method_info(plan.terms.method).starts_from in ("initial", "merge") and plan.source_node is not None:
        return None  # the recorded curve does not apply to merged or replayed models
    points = [(at, row.accuracy) for at, row in forecast.first.points if math.isfinite(row.accuracy)]
    if not points:
        return None
    done = 0 if plan.source_node is None else plan.source_rounds
    accuracy = float(np.interp(done + limit, [at for at, _ in points], [value for _, value in points]))
    if plan.noise_std > 0.0:
        measure = forecast.measure
        if measure is None or not measure.of_errors:
            return None
        ahead, place = np.array([float(limit)]), np.array([float(done + limit)])
        accuracy -= float(measure.harm(plan.noise_std, ahead, place)[0])
    elif plan.source_node == view.path.nodes[view.path.tip].node:
        accuracy = max(accuracy, now)  # training continues from the current model
    return float(np.clip(accuracy, 0.0, 1.0))


RELEASED_NOW = ("the model it starts from is released at once; it is less accurate until retraining has recovered it",)


def plan_request(view: RunView, terms: RequestTerms, floor: Level | None = None) -> Plan:
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
    tip = Forecast(view, plan.terms).first.evaluated.get(view.path.nodes[view.path.tip].node)
    return replace(
        plan,
        notes=(*plan.notes, *filter(None, notes)),
        before_after=guarantee_of_all(view.reader, view.spec, view.indices(terms.clients), terms) if solved else None,
        predicted_accuracy=released_accuracy(view, plan),
        squared_error_now=view.spec.regime.squared_error(tip.loss if tip else None),
    )


def also_left_out(view: RunView, terms: RequestTerms) -> str:
    """Describe the clients and records that other approved requests leave out of the release, or return ""."""
    others = [row for row in leaving_requests(view.reader) if set(row.clients).isdisjoint(terms.clients)]
    words = [
        f"{forgotten_words(plain_names(view.reader, row.clients), len(row.records) or None)} (request {row.request})"
        for row in others
    ]
    return f"also left out by pending requests: {'; '.join(words)}" if words else ""


def _planned(view: RunView, terms: RequestTerms, floor: Level | None) -> Plan:
    if terms.method != AUTO:
        return method_for(view, terms.method).plan(view, terms)
    view.new_subjects(terms, view.next_order)
    plans: dict[str, Plan] = {}
    options = []
    for name in [name for name, method in all_methods().items() if not method.info.control]:
        try:
            method = method_for(view, name)
            plans[name] = method.plan(view, replace(terms, method=name))
        except (InputError, NotCertifiableError) as error:
            options.append(MethodOption(name, summary=method_info(name).summary, refused=str(error)))
        else:
            options.append(_option(view, method, plans[name]))
    # Allowed methods come first; among them, certified methods; among these, methods with fewer rounds.
    options.sort(
        key=lambda option: (
            bool(option.refused),
            option.level == "none",
            math.inf if option.rounds is None else option.rounds,
        )
    )
    least = least_level(terms, floor)
    allowed = [option for option in options if not option.refused]
    if not allowed:
        raise InputError(f"no method can execute this request in this run: {options[0].refused}")
    compared = tuple(option for option in allowed if option.may_be_chosen) or tuple(allowed)
    chosen = choose_method(compared, least) or strongest_option(compared)
    choice = AutoChoice(chosen, least, compared, reason_of(chosen, compared, least))
    return replace(plans[chosen], ways=tuple(options), auto=choice)


def _option(view: RunView, method: Method, plan: Plan) -> MethodOption:
    info, terms = method.info, plan.terms
    rounds = plan.expected_rounds if plan.predicted_rounds is None else float(plan.predicted_rounds)
    rounds = rounds if rounds is None or math.isfinite(rounds) else None
    staying, drawn = staying_without(view, terms.clients, records=bool(terms.records)).size, view.facts.participation
    taking_part = float(min(drawn.count, staying)) if drawn.count else staying * drawn.rate  # mean over rounds
    sent = None
    if rounds is not None and info.name != CLOSED_FORM:
        layout = view.reader.layout
        sent = (rounds * taking_part + plan.rebuild_client_rounds) * 2.0 * layout.size * np.dtype(layout.dtype).itemsize
    exact: Level = "none" if plan.level == "none" else "exact"
    charged = [charge for charge in plan.charges if charge.subject.order != plan.order and charge.charge > 0.0]
    return MethodOption(
        method=info.name,
        summary=info.summary,
        level=plan.level,
        rounds=rounds,
        predicted_rounds=plan.predicted_rounds,
        predicted_interval=plan.predicted_interval,
        noise_std=plan.noise_std,
        client_rounds=None if rounds is None else rounds * taking_part,
        rebuild_client_rounds=plan.rebuild_client_rounds,
        bytes_sent=sent,
        seconds=_seconds(view, plan, rounds),
        attacker_rate=attacker_rate(exact if plan.untouched else plan.level, plan.multiplier),
        kept=_kept(view, info, plan),
        bytes_kept=method.bytes_kept(view),
        earlier_charged=len(charged),
        largest_charge=max((charge.charge / charge.subject.budget for charge in charged), default=0.0),
        may_be_chosen=terms.sigma == AUTO or info.takes_sigma,
        notes=(*plan.notes, *RELEASED_NOW) if terms.release == "now" else plan.notes,
    )


def _kept(view: RunView, info: MethodInfo, plan: Plan) -> str:
    """Return the certificate's sentences on the data that the operator still holds after the request."""
    afresh: Start = "fresh" if plan.source_node is None else "merge" if info.starts_from == "merge" else "trained"
    _, remains = what_was_erased(
        plan.terms.retention,
        "initial" if info.starts_from == "initial" else afresh,
        protection=info.protection,
        keeps_updates=view.spec.round_extras.updates_every > 0,
        statistics=view.spec.keep.kept_statistics if info.name == CLOSED_FORM else None,
        grouped=view.spec.groups.count != 0,
        untouched=plan.untouched,
    )
    return remains


def _seconds(view: RunView, plan: Plan, rounds: float | None) -> float | None:
    """Return the expected duration of the request in seconds, or None if it cannot be predicted.

    Rounds take as long as in the first training, plus the start of the command unless a server is already running.
    """
    if plan.terms.method == CLOSED_FORM and rounds == 0.0 and not plan.terms.records:
        return request_seconds(view, set(view.leaving(plan.terms.clients)))
    pace = _seconds_a_round(view)
    if not rounds or pace is None:
        return None
    return rounds * pace + (0.0 if view.spec.data.name in (FLOWER, LOOP) else measured_speed().start)


def _seconds_a_round(view: RunView) -> float | None:
    """Return the seconds per round of the first training, or None if it is not done or took less than a second."""
    rows = view.reader.query("SELECT time FROM events WHERE kind IN ('run created', 'training done') ORDER BY seq")
    times = [datetime.datetime.strptime(time, "%Y-%m-%dT%H:%M:%SZ") for (time,) in rows]
    first = [node for node in view.reader.nodes() if node.branch == 0]
    # All groups train their separate rounds at the same time, so a merge counts as these rounds (its position).
    rounds = sum(node.position if node.kind == "merge" else node.kind == "round" for node in first)
    if len(times) < 2 or rounds == 0:
        return None
    seconds = (times[-1] - times[0]).total_seconds()
    return seconds / rounds if seconds > 0.0 else None
