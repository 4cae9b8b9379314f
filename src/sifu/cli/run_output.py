"""Output of `sifu status` and `sifu train`: tables that fit 80 columns, or the same data as JSON."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import Any, get_args

from rich.markup import escape

from sifu.api import Run, RunStatus
from sifu.api.status import ClientState
from sifu.cli.output import Answer, number, out, percent, table
from sifu.core.held_out_figures import TRAINING_DATA, missed_target_words
from sifu.core.operator_words import FLOWER, LOOP, psi_words, way_to_go_on
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
        partial(_print_requests, status, everything),
        *shown,
    )


def _print_standing(run: Run, status: RunStatus) -> None:
    rounds = f"{status.rounds} round{'' if status.rounds == 1 else 's'}"
    history = "" if status.closed_form else f", {rounds} on the active history ({status.rounds_run} run in all)"
    out.print(f"[bold]{escape(status.run)}[/]: {status.phase}{history}")
    out.print(_how_good(run, status))
    missed = missed_target_words(status.accuracy, status.target)
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


def _print_requests(status: RunStatus, everything: bool) -> None:
    if status.requests:
        hidden = [] if everything else [request for request in status.requests if request.settled][:-FEW]
        out.print("\n[bold]Requests[/]")
        for line in (line for request in status.requests if request not in hidden for line in request.brief()):
            out.print(line, markup=False, soft_wrap=True)
        if hidden:
            out.print(f"{len(hidden)} earlier ones: sifu status --all")
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
    return "; ".join(filter(None, (training, held_out))) or not_measured(run)


def not_measured(run: Run) -> str:
    """Return a hint with the command that measures a model."""
    figure = "Accuracy" if run.spec.regime.has_accuracy else "Mean squared error"
    return f"{figure}: not measured; sifu evaluate {escape(str(run.folder))} measures it."
