"""Output of `sifu plan`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.markup import escape

from sifu.api.spec_plan import SpecPlan
from sifu.cli.output import Answer, level_text, number, out, table, whom_text
from sifu.core.ledger import finite_or_text
from sifu.core.method_info import CLOSED_FORM, attacker_rate
from sifu.core.premises import premises_that_count
from sifu.planning.plan import MethodOption, Plan, rounds_words


def print_options(plan: Plan, everything: bool) -> None:
    """Print the comparison of methods, unless a method was named."""
    if plan.auto is None:
        return
    whom = whom_text(plan.terms.clients, len(plan.terms.records) or None)
    out.print(f"Methods to forget {whom}, certified ones first:")
    allowed = [way for way in plan.ways if not way.refused]
    shown = table("method", "level", "start from", "-rounds")
    for way in allowed:
        name = way.method + (" *" if way.method == plan.terms.method else "")
        shown.add_row(name, level_text(way.level), _start(way), rounds_words(way.rounds))
    out.print(shown)
    refused = [way for way in plan.ways if way.refused]
    if everything:
        for way in refused:
            out.print(f"Not possible: {way.method}. {escape(way.refused)}", style="dim")
    elif refused:
        out.print(f"Not possible here: {', '.join(way.method for way in refused)}", style="dim")
    out.print(f"auto chooses {escape(plan.auto.reason)}.\n")


def _start(way: MethodOption) -> str:
    if way.method == CLOSED_FORM:
        return "kept statistics"
    if way.source_rounds is None:
        return "a fresh model"
    return f"round {way.source_rounds}" + (f", noise {number(way.noise_std)}" if way.noise_std else "")


OF_TERMS = ("method", "epsilon", "delta")
OF_PLAN = ("level", "delta_at_most", "delta_reached", "psi_star", "wanted_node", "rounds", "notes")


def plan_values(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain values."""
    terms, auto = plan.terms, plan.auto
    return {
        "clients": list(terms.clients),
        "records": len(terms.records) or None,
        **{name: getattr(terms, name) for name in OF_TERMS},
        **{name: getattr(plan, name) for name in OF_PLAN},
        "sigma": plan.noise_std,
        "psi": finite_or_text(plan.psi),
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
        "ways": [asdict(way) | {"allowed": not way.refused} for way in plan.ways],
        "chosen": terms.method,
        "least_level": auto.least_level if auto else None,
        "why": auto.reason if auto else None,
    }


def show_plan(plan: Plan, everything: bool) -> Answer:
    """Return the answer of `sifu plan`."""
    shown = [partial(print_options, plan, everything), partial(print_plan, plan, everything)]
    return Answer(
        lambda: plan_values(plan), *shown, "Nothing was changed." + ("" if everything else " More with --all.")
    )


def show_spec_plan(file: Path, plan: SpecPlan) -> Answer:
    """Return the answer of `sifu plan SPEC`."""
    notes = [escape(f"Note: {note}.") for note in plan.notes]
    told = f"Use {plan.row}: {plan.reason}."
    return Answer(asdict(plan), escape(told), *notes, f"Next: sifu train {escape(str(file))} --run my-run")


def print_plan(plan: Plan, everything: bool) -> None:
    """Print a plan as text and tables."""
    terms = plan.terms
    together = ", each separately" if len(terms.clients) > 1 else ""
    whom = whom_text(terms.clients, len(terms.records) or None)
    within = "" if plan.untouched and plan.noise_std == 0.0 else f", within ({terms.epsilon:g}, {terms.delta:g})"
    out.print(f"To forget {whom}{together}{within}:")
    facts = table("", "")
    for row in _solve_facts(plan) if terms.method == CLOSED_FORM else _retraining_facts(plan):
        facts.add_row(*row)
    if terms.records:
        facts.add_row("afterwards", f"{escape(terms.clients[0])} stays with its remaining records")
    facts.add_row("covers", "nothing" if plan.level == "none" else "every later release")
    facts.add_row("level", level_text(plan.level))
    if not plan.untouched and plan.level != "none":
        reached = f"{number(plan.delta_reached, 5)} by this release"
        facts.add_row("delta", f"{reached}; at most {number(plan.delta_at_most, 5)} with all later releases")
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
    if plan.rounds != 0:
        yield "rounds", "1: remaining clients send their statistics"
    elif plan.terms.records:
        yield "rounds", "none: the client alone sends its statistics again, without these records"
    else:
        yield "rounds", "none: no client is contacted"


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
    yield "add noise", noise if plan.noise_std else "none: the clients did not influence that model"
    yield "their Psi there", number(plan.psi) if math.isfinite(plan.psi) else "unknown"
    yield "rounds", rounds_words(plan.rounds)
