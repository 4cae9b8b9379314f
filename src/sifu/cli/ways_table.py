"""What `sifu plan` shows without `--method`: every way to forget, side by side, and which one `auto` takes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.markup import escape

from sifu.cli.output import level_text, names_text, number, out, table
from sifu.core.wording import forgotten_words
from sifu.planning.plan import Plan, Way


def ways_values(plan: Plan) -> dict[str, Any]:
    """Every way and the choice, as plain values."""
    return {
        "ways": [asdict(way) | {"allowed": not way.refused} for way in plan.ways],
        "chosen": plan.terms.method,
        "least_level": plan.auto.least_level if plan.auto else None,
        "why": plan.auto.reason if plan.auto else None,
    }


def _attacker(way: Way) -> str:
    """What an attacker gains: at level exact nothing beyond guessing."""
    if way.attacker_rate is None:
        return "no bound"
    return "guessing" if way.level == "exact" else f"{100.0 * way.attacker_rate:.3g} %"


def print_ways(plan: Plan, everything: bool) -> None:
    """The table for people; nothing where a method was named."""
    if plan.auto is None:
        return
    records = len(plan.terms.records or ())
    whom = forgotten_words([names_text(plan.terms.clients)], records or None)
    out.print(f"Ways to forget {whom}, certified ones first:")
    allowed = [way for way in plan.ways if not way.refused]
    shown = table("way", "level", "-rounds", "-sent", "-time", "-attacker", "cost to earlier requests")
    for way in allowed:
        shown.add_row(
            way.method + (" *" if way.method == plan.terms.method else ""),
            level_text(way.level),
            _rounds(way),
            "-" if way.bytes_sent is None else size_text(way.bytes_sent),
            "-" if way.seconds is None else seconds_text(way.seconds),
            _attacker(way),
            f"{way.earlier_charged}, up to {way.largest_charge:.0%}" if way.earlier_charged else "nothing",
        )
    out.print(shown)
    out.print("attacker: how often one allowed 1 % false alarms can be right; guessing is right about 1 %", style="dim")
    refused_ways = [way.method for way in plan.ways if way.refused]
    if everything:
        _print_more(plan, allowed)
    elif refused_ways:
        out.print(f"Not possible here: {', '.join(refused_ways)}", style="dim")
    out.print(f"auto takes {escape(plan.auto.reason)}.\n")


def _print_more(plan: Plan, allowed: list[Way]) -> None:
    """What is kept after each way, and why others are not possible."""
    never = [way.method for way in allowed if not way.may_be_chosen]
    if never:
        out.print(f"auto never takes {', '.join(never)}: a control, or no use of the sigma asked for", style="dim")
    for kept in dict.fromkeys(way.kept for way in allowed):
        who = ", ".join(way.method for way in allowed if way.kept == kept)
        out.print(f"Kept after {who}: {escape(kept)}")
    for way in allowed:
        if way.rebuild_client_rounds:
            out.print(f"{way.method}: building hit groups again takes {way.rebuild_client_rounds} client-rounds more")
    # Several methods may be refused for the same reason, in which each names itself.
    reasons: dict[str, list[Way]] = {}
    for way in plan.ways:
        if way.refused:
            reasons.setdefault(way.refused.replace(way.method, "it"), []).append(way)
    for refused in reasons.values():
        names = ", ".join(way.method for way in refused)
        out.print(f"Not here: {names}. {escape(refused[0].refused)}", style="dim")


def _rounds(way: Way) -> str:
    if way.predicted_rounds is None:
        return "-" if way.rounds is None else f"about {number(way.rounds, 3)}"
    low, high = way.predicted_interval or (way.predicted_rounds,) * 2
    return f"{way.predicted_rounds}" + (f" ({low}-{high})" if high > low else "")


def size_text(size: float) -> str:
    """Bytes for people.

    >>> size_text(5.2e6), size_text(900), size_text(2.5e9)
    ('5.2 MB', '900 B', '2.5 GB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} B"


def seconds_text(seconds: float) -> str:
    """A time for people.

    >>> seconds_text(0.2), seconds_text(75.0), seconds_text(7200.0)
    ('0.2 s', '75 s', '2 h')
    """
    if seconds < 120.0:
        return f"{seconds:.2g} s"
    return f"{seconds / 60.0:.2g} min" if seconds < 7200.0 else f"{seconds / 3600.0:.2g} h"
