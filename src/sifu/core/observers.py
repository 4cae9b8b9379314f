"""Statements on the protection against two observers of a run's releases.

The first observer sees only releases from a request on, and a certificate covers this observer. The second observer
also kept earlier releases. Comparing a release from before the request with a later one can reveal the deleted data.
Plans, certificates, reports, the evidence, audits and the console print these statements and no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NOT_PROTECTED = "not protected"
"""Statement for an observer against whom no protection is proven."""
SEEN = "the models released from this request on"
"""Models that the first observer sees."""
EXACT_LIMIT = "what the plan itself reveals (which model training resumed from, how long it took) is not covered"
KEPT_EARLIER = "An observer who also kept an earlier release"


@dataclass(frozen=True)
class BeforeAfter:
    """Guarantee against an observer of all releases, including those before the request."""

    epsilon: float
    delta: float

    @property
    def words(self) -> str:
        """Guarantee as a phrase.

        >>> BeforeAfter(1.0, 1e-05).words
        '(epsilon, delta) = (1, 1e-05)'
        """
        return f"(epsilon, delta) = ({self.epsilon:g}, {self.delta:g})"


@dataclass(frozen=True)
class Observers:
    """Statements on what each of the two observers can learn about the forgotten clients.

    Attributes:
        later_only: Statement about the observer who sees only the releases from this request on.
        kept_earlier: Statement about the observer who also kept earlier releases.
        before_after: Guarantee against the second observer, or None if there is no protection.
    """

    later_only: str
    kept_earlier: str
    before_after: BeforeAfter | None = None

    @property
    def sentences(self) -> tuple[str, str]:
        """Both statements, the covered observer first."""
        return self.later_only, self.kept_earlier


def observers_of(
    level: str, rate: float | None, before_after: BeforeAfter | None = None, *, untouched: bool = False
) -> Observers:
    """Return the statements about both observers, given the level of a request.

    Args:
        level: Level of the plan or certificate.
        rate: Bound on an attacker's true-positive rate at 1 % false alarms, or None if there is none.
        before_after: Guarantee against an observer who kept earlier releases, if there is one.
        untouched: True if the client did not influence the model that training continued from.

    >>> observers_of("exact", 0.01).kept_earlier
    'An observer who also kept an earlier release: not protected. Comparing the two can reveal the deleted data.'
    >>> observers_of("proven", 0.702).later_only[:96]
    'An observer who sees only the models released from this request on, with a 1 % false-alarm rate,'
    """
    if before_after is None:
        kept = f"{KEPT_EARLIER}: {NOT_PROTECTED}. Comparing the two can reveal the deleted data."
    else:
        kept = f"{KEPT_EARLIER}: {before_after.words} over all releases."
    observer = "If the assumptions hold, an observer" if level == "conditional" else "An observer"
    if rate is None or level == "none":
        later = f"An observer who sees only {SEEN}: {NOT_PROTECTED}. Nothing bounds what it can tell."
    elif level == "exact" or untouched:
        later = f"{observer} who sees only {SEEN} can do no better than guess; {EXACT_LIMIT}."
    else:
        detects = f"detects at most {percent(rate)} of forgotten clients"
        later = f"{observer} who sees only {SEEN}, with a 1 % false-alarm rate, {detects}."
    return Observers(later, kept, before_after)


def observers_in(body: Mapping[str, Any]) -> Observers:
    """Return the statements about both observers for a certificate, in its public or its auditor's form."""
    stated = body.get("before_after")
    guarantee = None if stated is None else BeforeAfter(float(stated["epsilon"]), float(stated["delta"]))
    rate, untouched = body["attacker_true_positive_rate_at_1_percent"], bool(body.get("untouched"))
    return observers_of(body["level"], rate, guarantee, untouched=untouched)


def percent(rate: float) -> str:
    """Return an attacker's rate as a percentage, in the format used everywhere.

    >>> percent(0.702), percent(0.01), percent(0.0375)
    ('70.2 %', '1 %', '3.75 %')
    """
    return f"{100.0 * rate:.4g} %"
