"""Output of `sifu status`, `sifu train` and `sifu forget`: tables that fit 80 columns, or the same data as JSON."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from functools import partial
from typing import Any, get_args

from rich.markup import escape
from rich.table import Table

from sifu.api import Outcome, Run, RunStatus
from sifu.api.status import ClientState
from sifu.cli.output import Answer, level_text, number, out, percent, table, whom_text
from sifu.core.held_out_figures import TRAINING_DATA
from sifu.core.ledger import finite_or_text
from sifu.core.operator_words import FLOWER, LOOP, approvals_words, psi_words, way_to_go_on
from sifu.plots.style import byte_size
from sifu.store.inbox import INBOX

MOST_CLIENTS = 10
FEW = 3
"""Number of entries that a list shows without `--all`."""


def show_status(run: Run, everything: bool = False, *shown: Any) -> Answer:
    """Return the answer of `sifu status` and `sifu train`.

    Args:
        run: Run to describe.
        everything: True to show all clients and requests instead of a few.
        *shown: Further lines of the text output.
    """
    status = run.status()
    return Answer(
        status.to_mapping,
        partial(_print_standing, run, status),
        partial(_print_clients, status, MOST_CLIENTS if everything else FEW),
        partial(_print_refusals, status),
        partial(_print_inbox, run, status),
        partial(_print_requests, run, status, everything),
        *shown,
    )


def _print_standing(run: Run, status: RunStatus) -> None:
    rounds = f"{status.rounds} round{'' if status.rounds == 1 else 's'}"
    history = "" if status.closed_form else f", {rounds} on the active history ({status.rounds_run} run in all)"
    out.print(f"[bold]{escape(status.run)}[/]: {status.phase}{history}")
    out.print(_how_good(run, status))
    missed = missed_target(status.accuracy, status.target)
    if missed and status.phase == "ready":
        out.print(f"[yellow]{missed}[/]")
    if status.phase != "ready":
        way = way_to_go_on(run.spec, status.phase)
        out.print(f"The run was interrupted or is still in progress: {way} continues it.")
    counts = Counter(client.state for client in status.clients)
    out.print(
        f"{len(status.clients)} clients: "
        + ", ".join(f"{counts[state]} {state}" for state in get_args(ClientState) if counts[state])
        + f"; {status.parameters} parameters; "
        + ("a head in closed form" if status.closed_form else f"losses {status.regularity}")
    )
    for warning in status.warnings:
        out.print(f"[yellow]{escape(warning)}[/]")
    if status.closed_form:
        held = status.statistics
        kept = f"{held.files} statistics files kept, {byte_size(held.bytes)}"
        out.print(f"{kept}; forgetting a client means solving the head again")
    else:
        sizes = [model.bytes for model in status.models if model.kept]
        out.print(f"{len(sizes)} models kept for rollbacks, {byte_size(sum(sizes))}")
    if status.groups:
        unfinished = [group for group in status.groups if not group.finished]
        empty, finished = sum(not group.members for group in unfinished), len(status.groups) - len(unfinished)
        out.print(
            f"{len(status.groups)} groups: {finished} have a finished model that a request can "
            + ("use" if status.closed_form else "merge")
            + "".join(
                f"; group {group.group} has {group.rounds} of its rounds and {group.members} members"
                for group in unfinished
                if group.members
            )
            + (f"; {empty} without members" if empty else "")
        )
    if status.psi_star:
        out.print(
            f"Noise of standard deviation sigma = {number(status.sigma)} hides an influence of up to Psi* = "
            f"{number(status.psi_star)}"
        )


def _print_clients(status: RunStatus, most: int) -> None:
    if status.closed_form:  # Psi is not defined for a head in closed form
        return
    active = sorted((client for client in status.clients if client.state == "active"), key=lambda client: -client.psi)
    if status.groups and active and math.isinf(active[0].psi):
        out.print("Influence through a merge is unbounded: no noise can hide it, and method groups needs none.")
        active = [client for client in active if math.isfinite(client.psi)]
        if not active:
            return
    shown = table("client", "-samples", "-Psi", "-sigma needed now", title="\nMost influential active clients")
    for client in active[:most]:
        shown.add_row(escape(client.name), str(client.samples), number(client.psi), number(client.sigma_needed_now))
    out.print(shown)
    out.print(
        f"{psi_words(status.psi_status)}. Sigma needed now is the noise that hides it for ({status.epsilon:g}, "
        f"{status.delta:g}) without undoing a round; less noise requires a rollback."
    )


def _print_refusals(status: RunStatus) -> None:
    if status.rejections:
        out.print(f"\n{len(status.rejections)} replies of clients were refused; the latest ones:")
        for row in status.rejections[-3:]:
            out.print(f"  round {row.round} of branch {row.branch}: {escape(row.client)}, {row.reason}")
    if status.refused:
        out.print("\nLatest refusals:")
        for refusal in status.refused[-3:]:
            out.print(f"  {refusal.time} {escape(refusal.what)}: {escape(refusal.reason)}")
    if status.late:
        named = ", ".join(f"{escape(name)} ({count})" for name, count in list(status.late.items())[:MOST_CLIENTS])
        out.print(f"\nToo late in some of the latest rounds: {named}. See server.wait, or sifu clients block.")
    if status.incidents:
        out.print("\nLatest incidents:")
        for incident in status.incidents[-3:]:
            # An incident of an evaluation has no round; one of a whole round has no client.
            placed = incident["round"] or incident["branch"]
            where = f"round {incident['round']} of branch {incident['branch']}, " if placed else ""
            who = escape(incident["client"] or "all")
            out.print(f"  {incident['time']} {where}{who}: {escape(incident['what'])}")


def _print_inbox(run: Run, status: RunStatus) -> None:
    if not status.inbox:
        return
    named = ", ".join(f"{message.kind} {escape(message.id)}" for message in status.inbox[:MOST_CLIENTS])
    out.print(
        f"\n{len(status.inbox)} in the inbox: {named}. The process that trains ingests them; if none is running, "
        "the next sifu forget or sifu request does."
    )
    for message in status.inbox:
        if message.trouble:
            out.print(
                f"[bold red]{message.kind} {escape(message.id)} cannot be opened ({message.trouble})[/]: it waits in "
                f"{escape(str(run.folder / INBOX))} until the account that trains may read it."
            )


def _print_requests(run: Run, status: RunStatus, everything: bool) -> None:
    if status.requests:
        hidden = [] if everything else [request for request in status.requests if request.settled][:-FEW]
        shown = table("request", "status", "until", "clients", "-epsilon", "-sigma", "level", title="\nRequests")
        for request in status.requests:
            if request in hidden:
                continue
            shown.add_row(
                request.request,
                request.status,
                request.deadline[:10] + (" [bold red]overdue[/]" if request.overdue else ""),
                whom_text(request.clients, request.records, 2),
                "-" if status.closed_form or request.terms is None else number(request.terms.epsilon),
                request.sigma if isinstance(request.sigma, str) else number(request.sigma),
                level_text(request.level or "-"),
            )
        out.print(shown)
        if hidden:
            out.print(f"{len(hidden)} earlier ones: sifu status --all")
        lacking = [request for request in status.requests if request.approvals_missing]
        for request in lacking[:MOST_CLIENTS]:
            out.print(f"{request.request} needs {approvals_words(request.approvals_missing)}.")
        for request in status.requests:
            if request.failure:
                out.print(f"[bold red]{request.request} failed:[/] {escape(request.failure)}")
        waiting = sum(request.waits for request in status.requests) - len(lacking)
        if waiting and status.phase == "ready":
            out.print(f"{waiting} to be executed: use {way_to_go_on(run.spec, 'ready')}.")
    left = [line.left / line.budget for line in status.budgets if line.budget > 0 and line.used > 0]
    if left and not status.closed_form:
        out.print(
            f"\nBudgets of the {len(left)} subjects forgotten with noise: {min(left):.0%} to {max(left):.0%} left"
        )


def _how_good(run: Run, status: RunStatus) -> str:
    """Return the accuracy (for real targets, the mean squared error) with the rows that it was measured on."""
    error = run.spec.regime.squared_error(status.loss)
    figure = f"Accuracy {percent(status.accuracy)}" if error is None else f"Mean squared error {number(error)}"
    evaluates = status.closed_form and status.phase == "ready" and run.spec.data.name not in (FLOWER, LOOP)
    training = f"{figure} {TRAINING_DATA}" if status.loss is not None or not evaluates else ""
    held_out = status.held_out.words if status.held_out is not None else ""
    return "; ".join(filter(None, (training, held_out))) or _not_measured(run)


def _not_measured(run: Run) -> str:
    """Return a hint with the command that measures a model."""
    figure = "Accuracy" if run.spec.regime.has_accuracy else "Mean squared error"
    return f"{figure}: not measured; sifu evaluate {escape(str(run.folder))} measures it."


def missed_target(accuracy: float | None, target: float) -> str | None:
    """Return a warning if training stopped at max_rounds below its target, else None."""
    if target <= 0 or accuracy is None or accuracy >= target:
        return None
    return f"Training stopped at its limit of rounds: the target of {percent(target)} {TRAINING_DATA} was not reached."


def outcome_values(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as plain values."""
    return asdict(outcome) | {"psi": finite_or_text(outcome.psi)}


def outcomes_table(outcomes: list[Outcome]) -> Table:
    """Return a table of requests with their outcomes."""
    columns = ["request", "clients", "level", "-sigma", "-back to", "-rounds"]
    figure = _figure(outcomes)
    shown = table(*columns, *([f"-{figure.lower()}"] if figure else []))
    for outcome in outcomes:
        row = [
            outcome.request,
            whom_text(outcome.clients[:1], outcome.records)
            + (f" +{len(outcome.clients) - 1}" if len(outcome.clients) > 1 else ""),
            level_text(outcome.level),
            number(outcome.sigma),
            str(outcome.rollback_to),
            str(outcome.rounds),
        ]
        if figure:
            row.append(percent(outcome.accuracy) if figure == "Accuracy" else number(outcome.mean_squared_error))
        shown.add_row(*row)
    return shown


def _figure(outcomes: list[Outcome]) -> str:
    """Return the quality measure on training rows, accuracy or mean squared error; empty if nothing was measured."""
    if any(outcome.mean_squared_error is not None for outcome in outcomes):
        return "Mean squared error"
    return "Accuracy" if any(outcome.accuracy is not None for outcome in outcomes) else ""


def show_outcomes(run: Run, outcomes: list[Outcome]) -> Answer:
    """Return the answer of `sifu forget`, with the requests that still lack approvals."""
    values = {"run": str(run.folder), "requests": [outcome_values(outcome) for outcome in outcomes]}
    lacking = _unapproved_lines(run)
    if outcomes:
        return Answer(values, partial(_print_outcomes, run, outcomes), *lacking)
    nothing = f"No request waits. File one with: sifu request {run.folder} --clients A,B"
    return Answer(values, *(["Nothing was executed.", *lacking] if lacking else [nothing]))


def _unapproved_lines(run: Run) -> list[str]:
    """Return a line for each request that waits for approvals, with the command that records one."""
    if run.spec.requests.approval == "none":
        return []
    return [
        f"Request {status.request} needs {approvals_words(status.approvals_missing)}, not by {status.filed_by}, who "
        f"filed it: sifu decide {run.folder} {status.request} approve --actor NAME"
        for status in run.request_records()
        if status.approvals_missing
    ][:MOST_CLIENTS]


def _print_outcomes(run: Run, outcomes: list[Outcome]) -> None:
    name = escape(str(run.folder))
    out.print(outcomes_table(outcomes))
    held_out, before = "", outcomes[-1].held_out_before
    if outcomes[-1].held_out is not None:
        held_out = f"The current model has {outcomes[-1].held_out.words}"
        held_out += f", the one before {before.words.replace(before.where, 'on the same rows')}." if before else "."
    figure = _figure(outcomes)
    training = f"{figure} is {TRAINING_DATA}." if figure else ""
    measured = " ".join(filter(None, (training, held_out))) or _not_measured(run)
    out.print(f"Forgotten by: {', '.join(dict.fromkeys(outcome.method for outcome in outcomes))}. {measured}")
    for outcome in outcomes:
        missed = missed_target(outcome.accuracy, outcome.target)
        if missed and outcome.rounds == 0:
            out.print(
                f"{outcome.request}: its model was released at once, below the target of {percent(outcome.target)}; "
                f"sifu status {name} shows the rounds that followed"
            )
        elif missed:
            out.print(f"[yellow]{outcome.request}: {missed}[/]")
    out.print(f"Certificates are in {name}/certificates. Check them with: sifu verify {name}")
