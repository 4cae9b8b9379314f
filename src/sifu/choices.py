"""What a user can choose: words, and the terms of a request.

This module imports nothing, so that the command line answers at once; spec and mathematics share its words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, get_args, get_type_hints

Unit = Literal["client", "joint"]
"""Whether a request covers each of its clients alone, or all of them together."""
Scope = Literal["all", "latest"]
"""Whether a budget covers every later release, or the latest one only."""
Calibration = Literal["exact", "classical"]
"""How noise follows from a budget (docs/theory.md, sections 7.1 and 7.2)."""
Retention = Literal["paper", "strict"]
"""Whether models from before the rollback are kept, or erased with the rest."""
Release = Literal["healed", "now"]
"""Whether a request is done when its model has come to its target, or with the model it starts from; rounds follow."""
Level = Literal["exact", "proven", "conditional", "none"]
"""What a certificate is worth, strongest first."""
LEVELS: tuple[Level, ...] = ("none", "conditional", "proven", "exact")
"""The same, weakest first: a level's place says how strong it is."""
Decision = Literal["verified", "approved", "refused", "withdrawn"]
"""What can be decided on a request that waits."""
Approval = Literal["none", "one", "two"]
"""How many people must approve a request before it is executed."""
Decided = Literal["recorded", "unchanged", "posted"]
"""What became of a decision: in the ledger, there already, or in the inbox of a run that another process writes to."""
Device = Literal["auto", "cpu", "cuda"]
"""Where rounds are computed."""
Precision = Literal["float32", "tf32", "tf32x3", "bfloat16"]
"""How networks compute on a GPU."""
MeasuredOn = Literal["training", "held-out"]
"""Rows that a model is evaluated on."""
SigmaChoice = float | Literal["auto"]
"""The noise of a request: a number, or auto to choose it from recorded scalars."""


class Term(NamedTuple):
    """What the command line, the console and its API say of a term of a request."""

    help: str
    default: str | None = None
    """In the help, where it is not the spec's."""


class TermsGiven(TypedDict, total=False):
    """The terms a caller may give in addition to the clients; what is left out, or None, comes from the run's spec.

    A new term is a line here and a field of `RequestTerms`: options, the form, the API, the ledger and the stored row
    all follow from these two.
    """

    epsilon: Annotated[float | None, Term("Budget; 1 is strong, 10 is weak.")]
    delta: Annotated[float | None, Term("Budget; 0.01 or smaller is usual.")]
    sigma: Annotated[SigmaChoice | None, Term("Noise: auto, or a number.")]
    unit: Annotated[Unit | None, Term("client covers each separately, joint all together.")]
    scope: Annotated[Scope | None, Term("all covers every later release, latest the last only.")]
    method: Annotated[
        str | None,
        Term(
            "auto takes the fewest predicted rounds at the level asked for; sifu methods lists the others.",
            default="auto",
        ),
    ]
    level: Annotated[Level | None, Term("Refuse anything weaker.", default="conditional")]
    calibration: Annotated[Calibration | None, Term("How noise follows from the budget.")]
    retention: Annotated[Retention | None, Term("paper keeps models from before the rollback, strict erases them.")]
    reserve: Annotated[float | None, Term("Fraction of the budget kept back for later requests.")]
    max_rounds: Annotated[int | None, Term("Stop retraining after this many rounds; 0 is the spec's limit.")]
    release: Annotated[
        Release | None, Term("healed waits for the target; now releases the starting model, then heals.")
    ]
    target: Annotated[float | None, Term("Accuracy to stop at, 0 for none; by default the spec's.")]
    before_after: Annotated[
        str | None,
        Term("EPSILON,DELTA: refuse unless observers who kept earlier releases are held to it (release.noise)."),
    ]
    records: Annotated[
        Sequence[int | str] | None,
        Term("Forget only these records of one client: identities (the column data.id), or row numbers from 0."),
    ]


class TermOnOffer(NamedTuple):
    """A term as a form or command line offers it: its type, without None, and its description."""

    kind: Any
    about: Term

    @property
    def choices(self) -> tuple[str, ...]:
        """The words to choose from; empty where it is a number, a free text or a list."""
        words = get_args(self.kind) if self.kind is not SigmaChoice else ()
        return words if all(isinstance(word, str) for word in words) else ()


def terms_on_offer() -> dict[str, TermOnOffer]:
    """Every term that can be given, by name.

    >>> terms_on_offer()["unit"].choices, terms_on_offer()["reserve"].kind
    (('client', 'joint'), <class 'float'>)
    """
    offered = {}
    for name, hint in get_type_hints(TermsGiven, include_extras=True).items():
        optional, about = get_args(hint)
        kinds = [kind for kind in get_args(optional) if kind is not type(None)]
        offered[name] = TermOnOffer(kinds[0] if len(kinds) == 1 else SigmaChoice, about)
    return offered
