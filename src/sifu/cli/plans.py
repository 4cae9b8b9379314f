"""Output of `sifu plan`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from sifu.cli.output import Answer, duration, level_text, names_text, number, out, table, whom_text
from sifu.cli.run_output import MOST_CLIENTS
from sifu.core.ledger import finite_or_text
from sifu.core.method_info import BLIND_GUESS_RATE, CLOSED_FORM, attacker_rate
from sifu.core.premises import premises_that_count
from sifu.errors import InputError
from sifu.planning.outlook import LOOK_AHEAD, BudgetLine, Outlook
from sifu.planning.plan import MethodOption, Plan
from sifu.plots.style import byte_size


def _attacker(way: MethodOption) -> str:
    """Return the bound on the attacker's success rate as a table cell: a percentage, "guessing" or "no bound"."""
    if way.attacker_rate is None:
        return "no bound"
    return "guessing" if way.attacker_rate <= BLIND_GUESS_RATE else f"{100.0 * way.attacker_rate:.3g} %"


def print_options(plan: Plan, everything: bool) -> None:
    """Print the comparison of methods, unless a method was named."""
    if plan.auto is None:
        return
    whom = whom_text(plan.terms.clients, len(plan.terms.records) or None)
    out.print(f"Methods to forget {whom}, certified ones first:")
    allowed = [way for way in plan.ways if not way.refused]
    shown = table("method", "level", "-rounds", "-sent", "-time", "-attacker", "cost to earlier requests")
    for way in allowed:
        shown.add_row(
            way.method + (" *" if way.method == plan.terms.method else ""),
            level_text(way.level),
            _rounds(way),
            "-" if way.bytes_sent is None else byte_size(way.bytes_sent),
            "-" if way.seconds is None else duration(way.seconds),
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
    """Print methods that `auto` never chooses, data that are kept, costs of rebuilding, and reasons for refusals."""
    never = [way.method for way in allowed if not way.may_be_chosen]
    if never:
        out.print(f"auto never chooses {', '.join(never)}: a control, or it ignores the given sigma", style="dim")
    for kept in dict.fromkeys(way.kept for way in allowed):
        who = ", ".join(way.method for way in allowed if way.kept == kept)
        out.print(f"Kept after {who}: {escape(kept)}")
    for way in allowed:
        if way.rebuild_client_rounds:
            out.print(f"{way.method}: retraining affected groups takes {way.rebuild_client_rounds} more client-rounds")
    # Reasons that differ only in the name of the method are printed once.
    reasons: dict[str, list[MethodOption]] = {}
    for way in plan.ways:
        if way.refused:
            reasons.setdefault(way.refused.replace(way.method, "it"), []).append(way)
    for refused in reasons.values():
        names = ", ".join(way.method for way in refused)
        out.print(f"Not possible: {names}. {escape(refused[0].refused)}", style="dim")


def _rounds(way: MethodOption) -> str:
    if way.predicted_rounds is None and way.rounds is not None:
        return f"about {number(way.rounds, 3)}"
    return interval_text(way.predicted_rounds, way.predicted_interval)


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
    shown += [f"Wrote {picture}"] if picture is not None else []
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
    """Return a predicted number of rounds with its interval."""
    if rounds is None:
        return "-"
    low, high = interval or (rounds, rounds)
    return f"{rounds}" + (f" ({low}-{high})" if high > low else "")


def print_units(plan: Plan) -> None:
    """Print the noise of a request in both units: for each client separately, and for all clients jointly."""
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
    """Return a note on how many later requests the history still allows."""
    expected, size = outlook.expected_requests, f"{outlook.usual_size:g}"
    more = "fewer than one more request" if expected < 1.0 else f"about {expected:.0f} more requests"
    later = "could be forgotten later without a rollback to before it"
    text = f"With the same noise, each of the {outlook.active} other clients {later}."
    if outlook.fitting < outlook.active:
        text = (
            f"With the same noise, {outlook.fitting} of the {outlook.active} other clients {later}: {more} of {size}, "
            "if clients ask in random order."
        )
    if outlook.auto_requests is None:
        return text
    many = f"{LOOK_AHEAD} or more" if outlook.auto_requests >= LOOK_AHEAD else f"about {outlook.auto_requests}"
    return f"{text} With --sigma auto, {many} further requests of {size} should each be faster than Scratch."


def print_plan(plan: Plan, everything: bool) -> None:
    """Print a plan as text and tables."""
    terms = plan.terms
    together = {"client": ", each separately" if len(terms.clients) > 1 else "", "joint": ", all together"}[terms.unit]
    whom = whom_text(terms.clients, len(terms.records) or None)
    within = "" if plan.untouched and plan.noise_std == 0.0 else f", within ({terms.epsilon:g}, {terms.delta:g})"
    out.print(f"To forget {whom}{together}{within}:")
    facts = table("", "")
    for row in _solve_facts(plan) if terms.method == CLOSED_FORM else _retraining_facts(plan):
        facts.add_row(*row)
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


def _solve_facts(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "solve again", "from the sum over the clients that stay, exact to the bit"
    if plan.predicted_rounds != 0:
        yield "rounds", "1: remaining clients send their statistics"
    elif plan.terms.records:
        yield "rounds", "none: the client alone sends its statistics again, without these records"
    else:
        yield "rounds", "none: no client is contacted"


WITHOUT_NOISE = {
    "noise": "none: the clients did not influence that model",
    "training noise": "none: every update was noised in training",
    "nothing": "none",
}
"""Descriptions of a plan without noise, by the protection of its method."""


def _retraining_facts(plan: Plan) -> Iterator[tuple[str, str]]:
    back = plan.tip_rounds - plan.source_rounds
    if plan.source_node is None:
        yield "start from", "a fresh initial model"
    elif plan.terms.method == "groups":
        yield "start from", "the merge of the groups without a forgotten client"
    else:
        path = f"round {plan.source_rounds} of {plan.tip_rounds}"
        yield ("roll back to", f"{path}, {back} undone") if back else ("start from", f"{path}, nothing undone")
    noise = f"sigma {number(plan.noise_std)}, hides an influence Psi up to {number(plan.psi_star)}"
    yield "add noise", noise if plan.noise_std else WITHOUT_NOISE[plan.protection]
    yield "their Psi there", number(plan.psi) if math.isfinite(plan.psi) else "unknown"
    if plan.predicted_rounds is not None and plan.scratch_rounds is not None:
        guess = interval_text(plan.predicted_rounds, plan.predicted_interval)
        when = "released at once, then " if plan.terms.release == "now" else ""
        yield "retrain", f"{when}perhaps {guess} rounds; Scratch perhaps {plan.scratch_rounds}"
