"""Every way to forget, side by side, and the rule by which `--method auto` takes one (docs/theory.md, section 9.7).

The rule has two steps. Of the ways that are exact one is named by what the run is made of, never by a prediction: a
head in closed form is solved again, groups that are left are merged, and a fresh model comes last. If `exact` was asked
for, that one is taken, so nothing of the client's data has a say in the choice. Otherwise it is held against the ways
that are not exact, by predicted rounds: the fewest win, and on a tie the stronger guarantee. What a certificate of
those promises holds for the plan that was carried out, the method included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sifu.choices import LEVELS, Level
from sifu.core.method_info import METHOD_INFOS
from sifu.core.request_terms import AUTO, RequestTerms

EXACT_ORDER = ("closed_form", "groups", "sifu", "last", "dp", "scratch")
"""Ways that are exact, by what they keep of what was learned: no client's data decides between them."""


@dataclass(frozen=True)
class Way:
    """One way to forget: what it would promise and cost, or why this run does not allow it (`refused`).

    `rounds` is what `auto` compares: the predicted rounds to the target, or, where the first training reached none,
    those to come back to where it ended. `client_rounds` counts the participants of all rounds, `rebuild_client_rounds`
    those of building hit groups again; `bytes_sent` is the traffic of both, `seconds` the time of the rounds as fast as
    those of the run were. `attacker_rate` is what an attacker allowed 1 % false alarms can spot at most (0.01 is a
    blind guess, None: no bound). `kept` says what stays with the operator, `bytes_kept` how much is kept now for
    requests to come. `earlier_charged` of those forgotten earlier lose budget, at most `largest_charge` of it.
    `may_be_chosen` is False for ways that do not honour the request's sigma and for controls of experiments.
    """

    method: str
    summary: str
    refused: str = ""
    level: Level = "none"
    rounds: float | None = None
    predicted_rounds: int | None = None
    predicted_interval: tuple[int, int] | None = None
    noise_std: float = 0.0
    client_rounds: float | None = None
    rebuild_client_rounds: int = 0
    bytes_sent: float | None = None
    seconds: float | None = None
    attacker_rate: float | None = None
    kept: str = ""
    bytes_kept: int = 0
    earlier_charged: int = 0
    largest_charge: float = 0.0
    may_be_chosen: bool = True
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Compared:
    """What the ledger records of a way that `auto` could take: all that the choice rests on."""

    method: str
    level: Level
    rounds: float | None


@dataclass(frozen=True)
class AutoChoice:
    """Which way `auto` took, at which least level, and what it was held against."""

    method: str
    least_level: Level
    compared: tuple[Compared, ...]
    reason: str

    def to_mapping(self) -> dict[str, object]:
        """As the ledger records it."""
        ways = [{"method": way.method, "level": way.level, "rounds": way.rounds} for way in self.compared]
        return {"least_level": self.least_level, "ways": ways}


def least_level(terms: RequestTerms, floor: Level | None = None) -> Level:
    """The least level that is accepted: `floor`, or what is usual for the method, and what the request asks for.

    >>> least_level(RequestTerms(("a",), 10.0, 0.01)), least_level(RequestTerms(("a",), 10.0, 0.01, level="exact"))
    ('conditional', 'exact')
    >>> least_level(RequestTerms(("a",), 10.0, 0.01, method="fine_tuning"))
    'none'
    """
    proves = terms.method == AUTO or METHOD_INFOS[terms.method].certifies
    usual: Level = floor or terms.level or ("conditional" if proves else "none")
    return max(usual, terms.level or "none", key=LEVELS.index)


def choose_way(compared: Sequence[Compared], least: Level) -> str | None:
    """The method `auto` takes among these, None where none reaches the least level.

    >>> ways = [Compared("sifu", "proven", 9.0), Compared("scratch", "exact", 90.0)]
    >>> choose_way(ways, "conditional"), choose_way(ways, "exact")
    ('sifu', 'scratch')
    >>> choose_way([Compared("sifu", "proven", 90.0), Compared("scratch", "exact", 90.0)], "conditional")
    'scratch'
    """
    enough = [way for way in compared if LEVELS.index(way.level) >= LEVELS.index(least)]
    exact = sorted((way for way in enough if way.level == "exact"), key=lambda way: _place(way.method))[:1]
    candidates = exact if least == "exact" else [*exact, *(way for way in enough if way.level != "exact")]
    if not candidates:
        return None

    return min(candidates, key=lambda way: (_cost(way), -LEVELS.index(way.level), _place(way.method))).method


def strongest_way(compared: Sequence[Compared]) -> str:
    """The way with the strongest guarantee: what is planned, and refused, where none reaches the level asked for."""
    return min(compared, key=lambda way: (-LEVELS.index(way.level), _cost(way), _place(way.method))).method


def _cost(way: Compared) -> float:
    return math.inf if way.rounds is None else way.rounds


def _place(method: str) -> int:
    """Where a method stands in `EXACT_ORDER`; a user's own after all others."""
    return EXACT_ORDER.index(method) if method in EXACT_ORDER else len(EXACT_ORDER)


def reason_of(method: str, compared: Sequence[Compared], least: Level) -> str:
    """Why a way was taken, in a sentence."""
    taken = next(way for way in compared if way.method == method)
    if LEVELS.index(taken.level) < LEVELS.index(least):
        return f"{method}, the strongest there is: no way reaches level {least}, so a request would be refused"
    if least == "exact":
        return f"{method}: exact was asked for, and of the ways that are exact this one keeps most of what was learned"
    others = [way for way in compared if way.method != method and LEVELS.index(way.level) >= LEVELS.index(least)]
    if not others:
        return f"{method}: the only way that reaches level {least}"
    rounds = "an unknown number of" if taken.rounds is None else f"{taken.rounds:.3g}"
    return (
        f"{method}: the fewest predicted rounds ({rounds}) among the ways of level {least} or better, and on a tie the "
        "stronger guarantee"
    )
