"""Output of `sifu plan` and `sifu advise`: methods, plan, curve, units, budgets, and advice before training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from sifu.advice import Advice
from sifu.advice.release_options import ReleaseAdvice
from sifu.cli.commands import MOST_CLIENTS
from sifu.cli.output import Answer, level_text, names_text, number, out, percent, table
from sifu.core.ledger import finite_or_text
from sifu.core.method_info import CLOSED_FORM, GUESSING, attacker_rate
from sifu.core.operator_words import forgotten_words
from sifu.core.premises import premises_that_count
from sifu.errors import InputError
from sifu.planning.forecast import LOOK_AHEAD, BudgetLine, Outlook
from sifu.planning.plan import MethodOption, Plan
from sifu.plots.style import byte_size, counted


def _attacker(way: MethodOption) -> str:
    """Return the bound on the attacker's success rate as a table cell: a percentage, "guessing" or "no bound"."""
    if way.attacker_rate is None:
        return "no bound"
    return "guessing" if way.attacker_rate <= GUESSING else f"{100.0 * way.attacker_rate:.3g} %"


def print_options(plan: Plan, everything: bool) -> None:
    """Print the comparison of methods; nothing if a method was named."""
    if plan.auto is None:
        return
    records = len(plan.terms.records or ())
    whom = forgotten_words([names_text(plan.terms.clients)], records or None)
    out.print(f"Methods to forget {whom}, certified ones first:")
    allowed = [way for way in plan.ways if not way.refused]
    shown = table("method", "level", "-rounds", "-sent", "-time", "-attacker", "cost to earlier requests")
    for way in allowed:
        shown.add_row(
            way.method + (" *" if way.method == plan.terms.method else ""),
            level_text(way.level),
            _rounds(way),
            "-" if way.bytes_sent is None else byte_size(way.bytes_sent),
            "-" if way.seconds is None else seconds_text(way.seconds),
            _attacker(way),
            f"{way.earlier_charged}, up to {way.largest_charge:.0%}" if way.earlier_charged else "nothing",
        )
    out.print(shown)
    if any(_attacker(way) != "guessing" for way in allowed):
        note = "attacker: an observer of later releases only; detection rate at 1 % false alarms, guessing gives 1 %"
        out.print(note, style="dim")
    refused_options = [way.method for way in plan.ways if way.refused]
    if everything:
        _print_more(plan, allowed)
    elif refused_options:
        out.print(f"Not possible here: {', '.join(refused_options)}", style="dim")
    out.print(f"auto chooses {escape(plan.auto.reason)}.\n")


def _print_more(plan: Plan, allowed: list[MethodOption]) -> None:
    """Print methods that `auto` never chooses, data that stay, costs of rebuilding, and reasons for refusals."""
    never = [way.method for way in allowed if not way.may_be_chosen]
    if never:
        out.print(f"auto never chooses {', '.join(never)}: a control, or it ignores the given sigma", style="dim")
    for kept in dict.fromkeys(way.kept for way in allowed):
        who = ", ".join(way.method for way in allowed if way.kept == kept)
        out.print(f"Kept after {who}: {escape(kept)}")
    for way in allowed:
        if way.rebuild_client_rounds:
            out.print(f"{way.method}: retraining affected groups takes {way.rebuild_client_rounds} more client-rounds")
    # Several methods may be refused for the same reason, which contains the method's name.
    reasons: dict[str, list[MethodOption]] = {}
    for way in plan.ways:
        if way.refused:
            reasons.setdefault(way.refused.replace(way.method, "it"), []).append(way)
    for refused in reasons.values():
        names = ", ".join(way.method for way in refused)
        out.print(f"Not possible: {names}. {escape(refused[0].refused)}", style="dim")


def _rounds(way: MethodOption) -> str:
    if way.predicted_rounds is None:
        return "-" if way.rounds is None else f"about {number(way.rounds, 3)}"
    low, high = way.predicted_interval or (way.predicted_rounds,) * 2
    return f"{way.predicted_rounds}" + (f" ({low}-{high})" if high > low else "")


def seconds_text(seconds: float) -> str:
    """Return a time in a readable unit.

    >>> seconds_text(0.2), seconds_text(75.0), seconds_text(7200.0)
    ('0.2 s', '75 s', '2 h')
    """
    if seconds < 120.0:
        return f"{seconds:.2g} s"
    return f"{seconds / 60.0:.2g} min" if seconds < 7200.0 else f"{seconds / 3600.0:.2g} h"


MOST_OPTIONS = 16
OF_TERMS = ("method", "unit", "scope", "epsilon", "delta")
OF_PLAN = ("level", "delta_at_most", "delta_reached", "psi_star", "wanted_node")
OF_PREDICTION = (
    "predicted_rounds",
    "predicted_accuracy",
    "squared_error_now",
    "predicted_interval",
    "scratch_rounds",
    "notes",
)
OF_BUDGET = ("budget", "used", "cost", "left", "covered")


def plan_values(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain values."""
    terms, auto = plan.terms, plan.auto
    return {
        "clients": list(terms.clients),
        "records": len(terms.records) or None,
        **{name: getattr(terms, name) for name in OF_TERMS},
        **{name: getattr(plan, name) for name in (*OF_PLAN, *OF_PREDICTION)},
        "sigma": plan.noise_std,
        "psi": finite_or_text(plan.psi),
        "training_noise": asdict(plan.training_noise) if plan.training_noise else None,
        "rollback_to": plan.source_rounds,
        "node": plan.source_node,
        "rounds_so_far": plan.tip_rounds,
        "attacker_true_positive_rate_at_1_percent": attacker_rate(plan.level, plan.multiplier),
        "observers": asdict(plan.observers),
        "charges": [
            {"psi": finite_or_text(charge.psi), "charge": charge.charge}
            | {name: getattr(charge.subject, name) for name in ("subject", "clients", "budget", "used")}
            for charge in plan.charges
        ],
        "premises": [premise.in_words() for premise in plan.premises],
        "options": [asdict(option) for option in plan.options],
        "units": [asdict(unit) | {"psi_now": finite_or_text(unit.psi_now)} for unit in plan.units],
        "budgets": [
            {"clients": line.names} | {name: getattr(line, name) for name in OF_BUDGET} for line in plan.budgets
        ],
        "outlook": asdict(plan.outlook) if plan.outlook else None,
        "ways": [asdict(way) | {"allowed": not way.refused} for way in plan.ways],
        "chosen": terms.method,
        "least_level": auto.least_level if auto else None,
        "why": auto.reason if auto else None,
    }


def show_plan(plan: Plan, picture: Path | None, everything: bool) -> Answer:
    """Return the answer of `sifu plan`."""
    shown: list[Any] = [partial(print_options, plan, everything), partial(print_plan, plan, everything)]
    if everything:
        shown += [partial(print_curve, plan), partial(print_units, plan)]
        shown += [budgets_table(plan.budgets)] if plan.budgets else []
        shown += [lambda: out.print(outlook_text(plan.outlook))] if plan.outlook else []
    shown += [lambda: out.print(f"Wrote {picture}", markup=False)] if picture is not None else []
    end = "Nothing was changed." + ("" if everything else " More with --all.")
    return Answer(lambda: plan_values(plan) | {"picture": str(picture) if picture else None}, *shown, end)


def draw_picture(plan: Plan, file: Path) -> None:
    """Write the plan's curve as a picture."""
    from sifu.plots.style import figure_bytes
    from sifu.report.psi_figure import draw_plan
    from sifu.store.files import write_atomically

    kind = file.suffix.lower().lstrip(".")
    if kind not in ("png", "svg"):
        raise InputError(f"--picture {file} must end in .png or .svg")
    if not file.parent.is_dir():
        raise InputError(f"folder {file.parent} does not exist: make it, or write {file.name} elsewhere")
    write_atomically(file, figure_bytes(draw_plan(plan), kind))


def print_curve(plan: Plan) -> None:
    """Print the effect of each noise level."""
    if len(plan.options) < 2:
        return
    shown = table(
        "-sigma", "-back to round", "-noise/signal", "-rounds, predicted", "level", title="\nEffect of each noise"
    )
    chosen = [
        option for option in plan.options if option.depth == plan.source_depth and option.noise_std == plan.noise_std
    ]
    last = len(plan.options) - 1
    places = {round(k * last / (MOST_OPTIONS - 1)) for k in range(MOST_OPTIONS)}
    few = [plan.options[place] for place in sorted(places)]
    few += [option for option in chosen if option not in few]  # always show the plan itself
    for option in sorted(few, key=lambda option: (-option.rounds, option.noise_std)):
        shown.add_row(
            number(option.noise_std) + (" *" if option in chosen else ""),
            str(option.rounds),
            number(option.noise_to_signal, 2),
            interval_text(option.predicted_rounds, option.predicted_interval),
            level_text(option.level),
        )
    out.print(shown)


def interval_text(rounds: int | None, interval: tuple[int, int] | None) -> str:
    """Return a prediction with its interval."""
    if rounds is None:
        return "-"
    return f"{rounds}" + (f" ({interval[0]} to {interval[1]})" if interval else "")


def print_units(plan: Plan) -> None:
    """Print a request for several clients in both units, each client separately and all jointly."""
    if not plan.units:
        return
    shown = table(
        "unit", "-Psi now", "-sigma needed now", "-back to round", "Psi is", title="\nClients separately, or together"
    )
    for unit in plan.units:
        bound = unit.shared_rounds - unit.gram_rounds
        how = "each client's own"
        if unit.unit == "joint":
            how = "exact, from Gram matrices" if bound == 0 else "bounded (triangle inequality)"
            if bound and unit.gram_rounds:
                how = f"exact in {unit.gram_rounds} rounds, bounded in {bound}"
        shown.add_row(unit.unit, number(unit.psi_now), number(unit.noise_now), str(unit.rollback_to), how)
    out.print(shown)


def budgets_table(lines: Sequence[BudgetLine]) -> Table:
    """Return a table of the budgets of clients forgotten earlier, smallest remaining share first."""
    shown = table("client", "-used", "-this costs", "-left", title="\nBudgets of earlier forgotten subjects")
    for line in sorted(lines, key=lambda line: line.left_share)[:MOST_CLIENTS]:
        share = [f"{100 * value / line.budget:.0f} %" if line.budget else "-" for value in (line.used, line.cost)]
        shown.add_row(
            names_text(line.names, 2),
            share[0],
            "nothing, covered" if line.covered else share[1],
            f"{100 * line.left_share:.0f} %",
        )
    return shown


def outlook_text(outlook: Outlook) -> str:
    """Return how many later requests the history still allows, in a sentence or two."""
    expected, size = outlook.expected_requests, f"{outlook.usual_size:g}"
    more = "fewer than one more request" if expected < 1.0 else f"about {expected:.0f} more requests"
    text = (
        f"With the same noise, {outlook.fitting} of the {outlook.active} other clients could be forgotten later "
        f"without a rollback to before it: {more} of {size}, if clients ask in random order."
    )
    if outlook.fitting == outlook.active:
        text = (
            f"With the same noise, each of the {outlook.active} other clients could be forgotten later without a "
            "rollback to before it, where earlier forgotten subjects have little budget left."
        )
    if outlook.auto_requests is None:
        return text
    many = f"{LOOK_AHEAD} or more" if outlook.auto_requests >= LOOK_AHEAD else f"about {outlook.auto_requests}"
    return f"{text} With --sigma auto, {many} further requests of {size} should each be faster than Scratch."


def show_advice(spec: Path, advice: Advice, everything: bool) -> Answer:
    """Return the answer of `sifu advise`."""
    return Answer({"spec": str(spec), **asdict(advice)}, partial(_print_advice, advice, everything))


def _print_advice(advice: Advice, everything: bool) -> None:
    style = "green" if advice.worthwhile else "yellow"
    out.print(f"[bold {style}]{advice.verdict}[/]")
    if everything:
        _print_pilot(advice)
    _print_training_options(advice, everything)
    if advice.release is not None:
        _print_releases(advice.release)
    if everything:
        for suggestion in advice.suggestions:
            out.print(f"- {escape(suggestion)}")
    out.print("Nothing was kept." + ("" if everything else " --all shows reasons, the pilot, and what to change."))


def _print_releases(advice: ReleaseAdvice) -> None:
    """Print, for each budget, the noise that protects against observers of all releases and the accuracy with it."""
    best = f"{percent(advice.accuracy)} on {advice.rows} held-out rows without it, at r = {advice.relative_penalty:.3g}"
    columns = ("hides", "-epsilon", "-delta", "-r", "-distance", "-noise", "-accuracy", "-without noise")
    shown = table(*columns, title=f"\nNoise on releases: {best}")
    for option in advice.options:
        figures = (option.epsilon, option.delta, option.relative_penalty, option.distance, option.noise)
        accuracies = (percent(option.accuracy), percent(option.without_noise))
        shown.add_row(f"a {option.unit}", *(f"{value:.3g}" for value in figures), *accuracies)
    out.print(shown)
    out.print(advice.verdict)


def _print_pilot(advice: Advice) -> None:
    facts = table("", "")
    facts.add_row("clients, parameters", f"{advice.clients}, {advice.parameters}")
    solved = [way.name for way in advice.ways] == ["closed form"]
    if not solved:
        facts.add_row(
            "enough clients?",
            f"{number(advice.clients_over_law, 3)} times the rule of thumb s sqrt(parameters); several times 1 is good",
        )
        facts.add_row(
            "noise / signal",
            f"{number(advice.noise_to_signal, 3)} for the most expensive client, "
            f"{number(advice.typical_noise_to_signal, 3)} for a typical one: the noise that hides a client, relative "
            "to how far training moved the model; well below 1 is good",
        )
    reached = "its target was reached" if advice.reached_target else "its target was not reached"
    reached = reached if advice.target > 0.0 else "the spec has no target"
    pilot = "a solve" if solved else counted(advice.pilot_rounds, "round")
    facts.add_row("pilot", f"{pilot}, accuracy {percent(advice.accuracy)}; {reached}")
    if advice.predicted_rounds is not None and not solved:
        low, high = advice.predicted_interval or (advice.predicted_rounds,) * 2
        predicted = counted(advice.predicted_rounds, "round")
        rounds = f"perhaps {predicted} ({low} to {high}); Scratch {advice.scratch_rounds}"
        facts.add_row("a plain request", rounds)
    chosen = next((way for way in advice.ways if way.name == advice.recommended), None)
    trained_by = f", trained by {chosen.name}" if chosen is not None and chosen.name == "groups" else ""
    facts.add_row("level", level_text(advice.level if chosen is None else chosen.level) + trained_by)
    if advice.epsilon_needed is not None:
        facts.add_row(
            "worthwhile with", f"epsilon {number(advice.epsilon_needed)}, or about {advice.clients_needed} such clients"
        )
    elif advice.clients_needed is not None:
        facts.add_row("worthwhile with", f"about {advice.clients_needed} such clients")
    out.print(facts)


def _print_training_options(advice: Advice, everything: bool) -> None:
    """Print the comparison of training regimes; with `everything`, also an explanation of each."""
    columns = ("train by", "level", "-accuracy", "-training", "-a request", "-its time", "-its traffic")
    tuned = any(way.name == "blocks" for way in advice.ways)
    title = "The network frozen, in blocks or merged" if tuned else "Plain rounds, groups or closed form"
    shown = table(*columns, title=f"\n{title}")
    for way in advice.ways:
        rounds = "-" if way.request_rounds is None else counted(round(way.request_rounds), "round")
        if way.request_interval is not None:
            rounds += f" ({way.request_interval[0]}-{way.request_interval[1]})"
        name = way.name + (" *" if way.name == advice.recommended else "")
        shown.add_row(
            name,
            level_text(way.level),
            percent(way.accuracy),
            "-" if way.training_seconds is None else seconds_text(way.training_seconds),
            rounds,
            "-" if way.request_seconds is None else seconds_text(way.request_seconds),
            "-" if way.request_bytes is None else byte_size(way.request_bytes),
        )
    out.print(shown)
    out.print(f"Accuracy {advice.measured_on}, the same rows for every method.", style="dim")
    if everything:
        for way in advice.ways:
            out.print(f"{way.name}: {escape(way.reason)}")
    chosen = next((way for way in advice.ways if way.name == advice.recommended), None)
    if chosen is not None and chosen.settings:
        out.print(f"Train by {chosen.name}: set {escape(', '.join(chosen.settings))}")


def print_plan(plan: Plan, everything: bool) -> None:
    """Print a plan as text and tables."""
    terms = plan.terms
    together = {"client": ", each separately" if len(terms.clients) > 1 else "", "joint": ", all together"}[terms.unit]
    whom = escape(forgotten_words(terms.clients, len(terms.records))) if terms.records else names_text(terms.clients)
    within = "" if plan.untouched and plan.noise_std == 0.0 else f", within ({terms.epsilon:g}, {terms.delta:g})"
    out.print(f"To forget {whom}{together}{within}:")
    facts = table("", "")
    back = plan.tip_rounds - plan.source_rounds
    if plan.terms.method == CLOSED_FORM:
        facts.add_row("solve again", "from the sum over the clients that stay, exact to the bit")
    elif plan.source_node is None:
        facts.add_row("start from", "a fresh initial model")
    elif plan.terms.method == "groups":
        facts.add_row("start from", "the merge of the groups without a forgotten client")
    else:
        undone = f", {back} undone" if back else ", nothing undone"
        facts.add_row(
            "roll back to" if back else "start from", f"round {plan.source_rounds} of {plan.tip_rounds}{undone}"
        )
    noise = f"sigma {number(plan.noise_std)}, hides an influence Psi up to {number(plan.psi_star)}"
    without = {
        "noise": "none: the clients did not influence that model",
        "training noise": "none: every update was noised in training",
        "nothing": "none",
    }
    if plan.terms.method == CLOSED_FORM:
        contacts_none = plan.predicted_rounds == 0
        rounds = "none: no client is contacted" if contacts_none else "1: remaining clients send their statistics"
        if terms.records and contacts_none:
            rounds = "none: the client alone sends its statistics again, without these records"
        facts.add_row("rounds", rounds)
    else:
        facts.add_row("add noise", noise if plan.noise_std else without[plan.protection])
        facts.add_row("their Psi there", number(plan.psi) if math.isfinite(plan.psi) else "unknown")
    if plan.terms.method != CLOSED_FORM and plan.predicted_rounds is not None and plan.scratch_rounds is not None:
        guess = interval_text(plan.predicted_rounds, plan.predicted_interval)
        when = "released at once, then " if terms.release == "now" else ""
        facts.add_row("retrain", f"{when}perhaps {guess} rounds; Scratch perhaps {plan.scratch_rounds}")
    if plan.predicted_accuracy is not None:
        facts.add_row("accuracy", f"perhaps {100 * plan.predicted_accuracy:.1f} % at the end")
    if plan.squared_error_now is not None:
        facts.add_row("mean squared error", f"{number(plan.squared_error_now)} now, on training data")
    if terms.records:
        facts.add_row("afterwards", f"{escape(terms.clients[0])} stays with its remaining records")
    covers = "every later release" if terms.scope == "all" else "the latest release only"
    facts.add_row("covers", "nothing" if plan.level == "none" else covers)
    facts.add_row("level", level_text(plan.level))
    if not plan.untouched and plan.level != "none":
        later = "with all later releases" if terms.scope == "all" else "in any one later release"
        reached = f"{number(plan.delta_reached, 5)} by this release"
        facts.add_row("delta", f"{reached}; at most {number(plan.delta_at_most, 5)} {later}")
    facts.add_row("later releases only", plan.observers.later_only)
    facts.add_row("earlier ones kept", plan.observers.kept_earlier)
    if terms.retention == "strict":
        facts.add_row("erased", "every earlier model that they influenced, including those before that round")
    out.print(facts)
    for status in ("assumed", "failed"):
        premises = premises_that_count(plan.premises, exact=plan.untouched, fresh=plan.source_node is None)
        chosen = [premise for premise in premises if premise.status == status]
        if everything:
            for premise in chosen:
                out.print(f"[yellow]{status}[/] {premise.name}: {escape(premise.statement)}")
        elif chosen:
            out.print(f"[yellow]{status}[/]: {', '.join(premise.name for premise in chosen)}")
    others = [charge for charge in plan.charges if charge.subject.order != plan.order]
    if others:
        out.print(f"It also uses budget of {len(others)} subject(s) forgotten earlier.")
    for note in plan.notes:
        out.print(f"Note: {escape(note)}")
