"""Descriptions of a run and its certificates in plain language; they claim no more than is recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sifu.core.operator_words import names_words
from sifu.plots.style import counted
from sifu.report.run_data import ReportData, ReportedRequest


def templates(package: str, folder: str = "", spaces: str = "") -> Environment:
    """Return a template environment that escapes everything and replaces unprintable characters except `spaces`."""

    def printable(value: object) -> object:
        if isinstance(value, Markup):  # the value is already safe
            return value
        return "".join(letter if letter.isprintable() or letter in spaces else "\ufffd" for letter in str(value))

    return Environment(
        loader=PackageLoader(package, folder),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def verdict(data: ReportData) -> str:
    """Return a summary of the run in a sentence or two."""
    done = data.done
    text = f"{_done_words(done)}." if done else ""
    running = sum(1 for request in data.requests if request.status == "running")
    waiting = sum(request.waits for request in data.requests)
    if running:
        text += " A request is being executed and is not certified yet."
    if waiting:
        text += f" {counted(waiting, 'request')} {'waits' if waiting == 1 else 'wait'} to be executed."
    missed = sum(1 for request in done if request.reached is False)
    if missed:
        text += f" After {counted(missed, 'request')} the model did not get back to its target accuracy."
    if not data.requests:
        text = "No client has asked to be forgotten."
        if data.status.phase == "training":
            text += f" Training has not finished: {counted(data.training_rounds, 'round')} so far."
        elif data.status.closed_form:
            text += " The head was solved in closed form."
        else:
            text += f" The model was trained for {counted(data.training_rounds, 'round')}."
    if data.status.groups:
        count, finished = len(data.status.groups), sum(group.finished for group in data.status.groups)
        text += f" Clients trained separately in {count:,} groups at first; a request can merge {finished:,} of them."
    return text.strip()


def _done_words(done: tuple[ReportedRequest, ...]) -> str:
    levels = Counter(request.level or "none" for request in done)
    removed = [request for request in done if (request.level or "none") == "none"]
    certified = [request for request in done if (request.level or "none") != "none"]
    groups = ((certified, "forgotten"), (removed, "removed without any guarantee"))
    who = " and ".join(f"{_subjects(requests)} {words}" for requests, words in groups if requests)
    first = f"{counted(len(done), 'request')}, {who}"
    named = {level: levels[level] for level in ("exact", "proven", "conditional") if levels[level]}
    if not named:
        return first
    if len(levels) == 1:
        level = next(iter(named))
        return f"{first}, {'' if len(done) == 1 else 'all '}certified as {level}"
    each = [f"{number:,} certified as {level}" for level, number in named.items()]
    return f"{first}: {', '.join(each)}" + (f", {levels['none']:,} not certified" if levels["none"] else "")


def _subjects(requests: Sequence[ReportedRequest]) -> str:
    """Return the numbers of clients forgotten entirely, and of records forgotten from clients that stay."""
    clients = sum(len(request.clients) for request in requests if request.records is None)
    records = sum(request.records or 0 for request in requests)
    parts = [counted(count, word) for count, word in ((clients, "client"), (records, "record")) if count]
    return " and ".join(parts)


def status_words(request: ReportedRequest) -> str:
    """Return a description of the status of an unfinished request."""
    if request.status == "running":
        return (
            f"This request is being executed: {counted(request.rounds, 'round')} since it started. Nothing is "
            "certified yet."
        )
    if request.status in ("refused", "withdrawn"):
        return f"This request was {request.status}: nothing was done for it, and its clients may take part."
    return "This request is in the ledger and waits to be executed. Nothing has been forgotten yet."


def percent(value: float | None) -> str:
    """Return a fraction as a percentage, or a dash if unknown."""
    return "–" if value is None else f"{100 * value:.1f} %"


def moment(time: str) -> str:
    """Return a recorded time in a readable format.

    >>> moment("2026-11-15T02:40:49Z")
    '2026-11-15 02:40 UTC'
    """
    return f"{time[:10]} {time[11:16]} UTC" if len(time) == 20 and time.endswith("Z") else time


def subject_row(subject: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a row for clients that share a subject in a certificate: their names and figures."""
    figures = (number(subject.get(key)) for key in ("psi", "charge", "budget"))
    return names_words(subject.get("clients", []), 4), *figures


def number(value: object, digits: int = 6) -> str:
    """Return a number with `digits` significant digits, a string unchanged, or a dash if unknown."""
    return f"{value:.{digits}g}" if isinstance(value, int | float) else str("–" if value is None else value)
