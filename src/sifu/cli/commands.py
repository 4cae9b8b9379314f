"""What the commands show: tables that fit 80 columns, or the same as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from sifu.api import Outcome, Run
from sifu.cli.output import err, level_text, names_text, number, out, percent, print_json
from sifu.core.certificate import attacker_rate
from sifu.core.ledger import finite_or_text
from sifu.core.premises import BEFORE_TRAINING
from sifu.methods.plan import Plan
from sifu.methods.registry import METHODS

MOST_CLIENTS = 10


def table(*columns: str, title: str | None = None) -> Table:
    """A plain table; figures are right-aligned where the column's name starts with a dash."""
    made = Table(
        title=title, title_justify="left", box=None, pad_edge=False, title_style="bold", show_header=any(columns)
    )
    for column in columns:
        made.add_column(column.lstrip("-"), justify="right" if column.startswith("-") else "left", overflow="fold")
    return made


def download_progress() -> Callable[[int, int], None] | None:
    """Bytes fetched, on a terminal only."""
    if not err.is_terminal:
        return None

    def show(done: int, total: int) -> None:
        share = f" of {total / 1e6:.1f}" if total else ""
        err.print(f"fetched {done / 1e6:.1f}{share} MB", end="\r" if done != total else "\n")

    return show


def show_status(run: Run, as_json: bool) -> None:
    """`sifu status`, and what `sifu train` ends with."""
    status = run.status()
    if as_json:
        print_json(status)
        return
    clients = status["clients"]
    counts = {state: sum(1 for one in clients if one["state"] == state) for state in ("active", "waiting", "forgotten")}
    out.print(
        f"[bold]{escape(status['run'])}[/]: {status['phase']}, {status['rounds']} rounds on the active history "
        f"({status['rounds_run']} run in all), accuracy {percent(status['accuracy'])} on the active clients' data"
    )
    missed = missed_target(status["accuracy"], status["target"])
    if missed and status["phase"] == "ready":
        out.print(f"[yellow]{missed}[/]")
    if status["phase"] != "ready":
        way = "sifu train" if status["phase"] == "training" else "sifu forget"
        out.print(f"It was interrupted, or is at work: {way} goes on with it.")
    out.print(
        f"{len(clients)} clients: "
        + ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        + f"; {status['parameters']} parameters; losses {status['regularity']}"
    )
    kept = [one for one in status["models"] if one["kept"]]
    out.print(f"{len(kept)} models kept to go back to, {sum(one['bytes'] for one in kept) / 1e6:.2f} MB")
    if status["updates"]["files"]:
        stored = status["updates"]
        out.print(f"updates of clients stored for {stored['files']} rounds, {stored['bytes'] / 1e6:.2f} MB")
    if status["psi_star"]:
        out.print(f"sigma {number(status['sigma'])} hides Psi up to Psi* = {number(status['psi_star'])}")
    active = sorted((one for one in clients if one["state"] == "active"), key=lambda one: -float(one["psi"]))
    shown = table("client", "-samples", "-Psi", "-sigma needed now", title="\nMost influential active clients")
    for one in active[:MOST_CLIENTS]:
        shown.add_row(
            escape(one["name"]), str(one["samples"]), number(float(one["psi"])), number(float(one["sigma_needed_now"]))
        )
    out.print(shown)
    if status["rejections"]:
        out.print(f"\n{len(status['rejections'])} replies of clients were refused; the latest:")
        for one in status["rejections"][-3:]:
            out.print(f"  round {one['round']} of branch {one['branch']}: {escape(one['client'])}, {one['reason']}")
    if status["requests"]:
        requests = table("request", "status", "until", "clients", "-epsilon", "-sigma", "level", title="\nRequests")
        for one in status["requests"]:
            sigma = one["sigma"] if isinstance(one["sigma"], str) else number(one["sigma"])
            requests.add_row(
                one["request"],
                one["status"],
                one["deadline"][:10] + (" [bold red]overdue[/]" if one["overdue"] else ""),
                names_text(one["clients"], 2),
                number(one["epsilon"]),
                sigma,
                level_text(one["level"] or "-"),
            )
        out.print(requests)


def missed_target(accuracy: float | None, target: float) -> str | None:
    """A sentence if the stop rule ended at max_rounds without reaching its target."""
    if target <= 0 or accuracy is None or accuracy >= target:
        return None
    return f"It stopped at its limit of rounds: the target of {percent(target)} was not reached."


def plan_values(plan: Plan) -> dict[str, Any]:
    """A plan as plain values."""
    return {
        "clients": list(plan.terms.clients),
        "method": plan.terms.method,
        "unit": plan.terms.unit,
        "scope": plan.terms.scope,
        "level": plan.level,
        "epsilon": plan.terms.epsilon,
        "delta": plan.terms.delta,
        "delta_reached": plan.delta_reached,
        "sigma": plan.noise_std,
        "psi": finite_or_text(plan.psi),
        "psi_star": plan.psi_star,
        "training_noise": asdict(plan.training_noise) if plan.training_noise else None,
        "rollback_to": plan.source_rounds,
        "node": plan.source_node,
        "wanted_node": plan.wanted_node,
        "rounds_so_far": plan.tip_rounds,
        "predicted_rounds": plan.predicted_rounds,
        "scratch_rounds": plan.scratch_rounds,
        "attacker_true_positive_rate_at_1_percent": attacker_rate(plan.level, plan.multiplier),
        "charges": [
            {
                "subject": one.subject.subject,
                "clients": list(one.subject.clients),
                "psi": finite_or_text(one.psi),
                "charge": one.charge,
                "budget": one.subject.budget,
                "used": one.subject.used,
            }
            for one in plan.charges
        ],
        "premises": [asdict(one) for one in plan.premises],
        "options": [asdict(one) for one in plan.options],
        "notes": list(plan.notes),
    }


def show_plan(plan: Plan, as_json: bool) -> None:
    """`sifu plan`."""
    if as_json:
        print_json(plan_values(plan))
        return
    print_plan(plan)
    out.print("Nothing was changed.")


def print_plan(plan: Plan) -> None:
    """A plan for people."""
    terms = plan.terms
    together = {"client": ", each by itself" if len(terms.clients) > 1 else "", "joint": ", all together"}[terms.unit]
    out.print(f"To forget {names_text(terms.clients)}{together}, within ({terms.epsilon:g}, {terms.delta:g}):")
    facts = table("", "")
    back = plan.tip_rounds - plan.source_rounds
    if plan.source_node is None:
        facts.add_row("start from", "a fresh initial model")
    else:
        undone = f", {back} undone" if back else ", nothing undone"
        facts.add_row("go back to", f"round {plan.source_rounds} of {plan.tip_rounds}{undone}")
    noise = f"sigma {number(plan.noise_std)}, hides an influence Psi up to {number(plan.psi_star)}"
    without = {
        "noise": "none: the clients never touched that model",
        "training noise": "none: every update was noised in training",
        "nothing": "none",
    }
    facts.add_row("add noise", noise if plan.noise_std else without[plan.protection])
    facts.add_row("their Psi there", number(plan.psi) if math.isfinite(plan.psi) else "unknown")
    if plan.predicted_rounds is not None and plan.scratch_rounds is not None:
        facts.add_row("retrain", f"perhaps {plan.predicted_rounds} rounds; training took {plan.scratch_rounds}")
    covers = "every later release" if terms.scope == "all" else "the latest release only"
    facts.add_row("covers", "nothing" if plan.level == "none" else covers)
    facts.add_row("level", level_text(plan.level))
    if not plan.untouched and plan.level != "none":
        facts.add_row("delta at most", number(plan.delta_reached, 5))
    rate = attacker_rate(plan.level, plan.multiplier)
    if rate is None:
        meaning = "nothing is guaranteed"
    else:
        assumed = ", if the assumptions hold" if plan.level == "conditional" else ""
        meaning = f"allowed 1 % false alarms, an attacker spots at most {_percent_up(rate)} %{assumed}"
    facts.add_row("what it means", meaning)
    if terms.retention == "strict":
        facts.add_row("erased", "every model that holds their part, also from before that round")
    out.print(facts)
    exact = plan.untouched
    for one in plan.premises:
        if one.status in ("assumed", "failed") and not (exact and one.name not in BEFORE_TRAINING):
            out.print(f"[yellow]{one.status}[/] {one.name}: {escape(one.statement)}")
    others = [one for one in plan.charges if one.subject.order != plan.order]
    if others:
        out.print(f"It also uses up budget of {len(others)} subject(s) forgotten earlier.")
    for note in plan.notes:
        out.print(f"Note: {escape(note)}")


def _percent_up(rate: float) -> str:
    """A rate as a percentage, rounded up: a bound must not be rounded down."""
    percents = rate * 100
    return f"{math.ceil(percents - 1e-9)}" if percents >= 2 else f"{math.ceil(percents * 100 - 1e-7) / 100:g}"


def outcome_values(outcome: Outcome) -> dict[str, Any]:
    """An outcome as plain values."""
    return asdict(outcome) | {"psi": finite_or_text(outcome.psi)}


def outcomes_table(outcomes: list[Outcome]) -> Table:
    """Requests with what came of them."""
    shown = table("request", "clients", "level", "-sigma", "-back to", "-rounds", "-Scratch", "-accuracy")
    for one in outcomes:
        shown.add_row(
            one.request,
            escape(one.clients[0]) + (f" +{len(one.clients) - 1}" if len(one.clients) > 1 else ""),
            level_text(one.level),
            number(one.sigma),
            str(one.rollback_to),
            str(one.rounds),
            "-" if one.scratch_rounds is None else str(one.scratch_rounds),
            percent(one.accuracy),
        )
    return shown


def show_outcomes(folder: Path, outcomes: list[Outcome], as_json: bool) -> None:
    """`sifu forget`."""
    if as_json:
        print_json({"run": str(folder), "requests": [outcome_values(one) for one in outcomes]})
        return
    if not outcomes:
        out.print("No request is waiting. Ask with: sifu request DIR --clients A,B")
        return
    out.print(outcomes_table(outcomes))
    for one in outcomes:
        missed = missed_target(one.accuracy, one.target)
        if missed:
            out.print(f"[yellow]{one.request}: {missed}[/]")
        if one.training_noise:
            together, alone = one.training_noise.epsilon_composed, one.training_noise.epsilon_one_round
            out.print(
                f"{one.request}: epsilon {number(together)} for all rounds together; "
                f"{number(alone)} for one round, as the paper counts"
            )
    name = escape(str(folder))
    out.print(f"Certificates are in {name}/certificates. Check them with: sifu verify {name}")


def show_methods(as_json: bool) -> None:
    """`sifu methods`."""
    if as_json:
        listed = [
            {"name": name, "summary": one.summary, "certifies": one.certifies, "protection": one.protection}
            for name, one in METHODS.items()
        ]
        print_json({"methods": listed})
        return
    shown = table("method", "what it does")
    for name, one in METHODS.items():
        shown.add_row(name, one.summary)
    out.print(shown)


def show_doctor(as_json: bool) -> None:
    """`sifu doctor`."""
    import importlib.metadata
    import os
    import platform

    packages = {}
    for name in (
        "sifu",
        "numpy",
        "scipy",
        "torch",
        "safetensors",
        "cryptography",
        "scikit-learn",
        "matplotlib",
        "flwr",
    ):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
    import torch

    from sifu.data.sources import search_folders

    devices = ["cpu"] + [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    values = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "packages": packages,
        "engines": {
            "embedded": f"works, on cpu with {torch.get_num_threads()} threads",
            "flower": "flwr is installed; the engine is not part of this version"
            if packages["flwr"]
            else "not part of this version",
        },
        "devices": devices,
        "data_folders": [str(folder) for folder in search_folders(None)],
    }
    if as_json:
        print_json(values)
        return
    facts = table("", "")
    facts.add_row("python", f"{values['python']} on {values['platform']}, {values['cores']} cores")
    for name, version in packages.items():
        facts.add_row(name, version or "not installed")
    facts.add_row("embedded engine", values["engines"]["embedded"])
    facts.add_row("flower engine", values["engines"]["flower"])
    facts.add_row("devices", ", ".join(devices))
    facts.add_row("data looked for in", ", ".join(values["data_folders"]))
    out.print(facts)
