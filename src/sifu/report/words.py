"""What happened, in words a reader without statistics understands; never more than is recorded."""

from __future__ import annotations

import math
from collections import Counter

from sifu.plots.rounds import fewer
from sifu.plots.run_data import ReportData, Request
from sifu.plots.style import counted

LEVEL_WORDS = {
    "exact": "Exact: the model training went on from had never been touched by these clients' data.",
    "proven": "Proven: every premise of the theorem is met; what clients report about themselves is trusted.",
    "conditional": "Conditional: the guarantee holds if what is marked as assumed is true.",
    "none": "No guarantee: at least one premise does not hold.",
}
STRONG_UP_TO, MODERATE_UP_TO = 0.05, 0.30


def verdict(data: ReportData) -> str:
    """The whole run in a sentence or two."""
    done = data.done
    parts = [_done_words(done)] if done else []
    compared = data.compared
    if compared:
        rounds = sum(one.rounds for one in compared)
        scratch = sum(one.scratch_rounds or 0 for one in compared)
        instead = "at least " if not all(one.scratch_reached for one in compared) else ""
        scope = "" if len(compared) == len(done) else f" (for {len(compared):,} of the {len(done):,})"
        parts.append(f"{counted(rounds, 'round')} instead of {instead}{scratch:,}{scope}")
    text = "; ".join(parts) + "." if parts else ""
    running = sum(1 for one in data.requests if one.status == "running")
    waiting = sum(1 for one in data.requests if one.status in ("received", "verified", "planned"))
    if running:
        text += " A request is being carried out and is not certified yet."
    if waiting:
        text += f" {counted(waiting, 'request')} {'waits' if waiting == 1 else 'wait'} to be carried out."
    missed = sum(1 for one in done if one.reached is False)
    if missed:
        text += f" After {counted(missed, 'request')} the model did not get back to its target accuracy."
    if not data.requests:
        text = "No client has asked to be forgotten."
        if data.phase == "training":
            text += f" Training has not finished: {counted(data.training_rounds, 'round')} so far."
        else:
            text += f" The model was trained for {counted(data.training_rounds, 'round')}."
    return text.strip()


def _done_words(done: tuple[Request, ...]) -> str:
    levels = Counter(one.level or "none" for one in done)
    certified = sum(len(one.clients) for one in done if (one.level or "none") != "none")
    removed = sum(len(one.clients) for one in done) - certified
    who = []
    if certified:
        who.append(f"{counted(certified, 'client')} forgotten")
    if removed:
        who.append(f"{counted(removed, 'client')} removed without any guarantee")
    first = f"{counted(len(done), 'request')}, {' and '.join(who)}"
    named = {level: levels[level] for level in ("exact", "proven", "conditional") if levels[level]}
    if not named:
        return first
    if len(levels) == 1:
        level = next(iter(named))
        return f"{first}, {'' if len(done) == 1 else 'all '}certified as {level}"
    each = [f"{number:,} certified as {level}" for level, number in named.items()]
    return f"{first}: {', '.join(each)}" + (f", {levels['none']:,} not certified" if levels["none"] else "")


def strength(attacker: float) -> str:
    """One word for a budget, from what an attacker could do."""
    if attacker <= STRONG_UP_TO:
        return "strong"
    return "moderate" if attacker <= MODERATE_UP_TO else "weak"


def promise(one: Request) -> str:
    """What was promised to whom."""
    if one.level == "none":
        return (
            "Nothing is promised. The clients no longer take part in training, but the premises of the proof do not "
            "hold, so nobody can say how much of them the model still shows."
        )
    if one.level == "exact":
        return (
            "The models released from this request on are those of training without the "
            f"{'clients' if len(one.clients) > 1 else 'client'}: there is nothing of "
            f"{'theirs' if len(one.clients) > 1 else 'its data'} in them to find."
        )
    seen = "every model released after this request" if one.scope == "all" else "the latest released model"
    whom = "the group as a whole" if one.unit == "joint" else "each of these clients by itself"
    if len(one.clients) == 1:
        whom = "the client"
    return (
        f"To {whom}: whoever sees {seen}, but not what came before, learns no more about whether the data was ever "
        f"there than the budget ε = {one.epsilon:g}, δ = {one.delta:g} allows."
    )


def attacker_words(one: Request) -> str:
    """What a budget lets an attacker do."""
    if one.level == "none":
        return ""
    if one.level == "exact":
        return "An attacker can do no better than guess."
    most = math.ceil(100 * one.attacker - 1e-9)  # a bound must not be rounded down
    assumed = "If the assumptions below hold: an" if one.level == "conditional" else "In practice: an"
    return (
        f"{assumed} attacker who allows themselves to be wrong about 1 in 100 clients that never took part "
        f"could recognise at most {most} in 100 of those that did (guessing blindly: 1 in 100; no protection: up "
        f"to 100). This is a {strength(one.attacker)} promise."
    )


def status_words(one: Request) -> str:
    """Where a request stands that is not done."""
    if one.status == "running":
        return (
            f"This request is being carried out: {counted(one.rounds, 'round')} since noise was added. "
            "Nothing is certified yet."
        )
    if one.status in ("refused", "withdrawn"):
        return f"This request was {one.status}: nothing was done for it, and its clients may take part."
    return (
        "This request is in the ledger and waits to be carried out. Its clients no longer take part, but nothing has "
        "been forgotten yet."
    )


def rounds_words(one: Request) -> str:
    """Rounds taken, against Scratch's where they are known."""
    if one.scratch_rounds is None:
        return f"{one.rounds:,}"
    if one.reached is False:
        return f"{one.rounds:,} (target not reached)"
    if not one.compared:
        return f"{one.rounds:,}"
    return f"{one.rounds:,} ({fewer(one.rounds, one.scratch_rounds, at_least=not one.scratch_reached)})"


def percent(value: float | None) -> str:
    """A fraction as a percentage, a dash when it is not known."""
    return "–" if value is None else f"{100 * value:.1f} %"


def moment(time: str) -> str:
    """A recorded time for people.

    >>> moment("2026-11-15T02:40:49Z")
    '2026-11-15 02:40 UTC'
    """
    return f"{time[:10]} {time[11:16]} UTC" if len(time) == 20 and time.endswith("Z") else time


def size(count: int) -> str:
    """Bytes for people.

    >>> size(900), size(5200), size(31_000_000)
    ('900 B', '5.2 kB', '31.0 MB')
    """
    if count < 1000:
        return f"{count} B"
    power = min(4, (len(str(count)) - 1) // 3)
    return f"{count / 1000**power:.1f} {('kB', 'MB', 'GB', 'TB')[power - 1]}"
