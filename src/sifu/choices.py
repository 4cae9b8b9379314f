"""Choices that users make: literal types, and the terms of a request.

This module imports nothing else of sifu, so that the command line starts fast. The packages `core` and `theory` share
its types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, get_args, get_type_hints

Retention = Literal["paper", "strict"]
"""Treatment of models from before the rollback: `paper` keeps them, `strict` erases them."""
Level = Literal["exact", "proven", "conditional", "none"]
"""Levels of a certificate, strongest first."""
LEVELS: tuple[Level, ...] = ("none", "conditional", "proven", "exact")
"""Levels of a certificate, weakest first; a higher index is a stronger level."""
Decision = Literal["verified", "approved", "refused", "withdrawn"]
"""Decisions on a waiting request."""
Approval = Literal["none", "one", "two"]
"""Number of people who must approve a request before it is executed."""
Decided = Literal["recorded", "unchanged", "posted"]
"""Result of a decision: recorded now, already in the ledger, or posted to the inbox of a run in use elsewhere."""
Device = Literal["auto", "cpu", "cuda"]
"""Device that computes rounds."""
MeasuredOn = Literal["training", "held-out"]
"""Rows that a model is evaluated on."""
SigmaChoice = float | Literal["auto"]
"""Noise of a request: a number, or auto to choose it from recorded scalars."""


class Term(NamedTuple):
    """Description of a request's term in the command line, the console and its API."""

    help: str
    default: str | None = None
    """Default shown in the help if it does not come from the spec."""
    words: Mapping[str, str] = {}
    """Displayed phrases, by stored value; a value without a phrase is shown unchanged."""


class TermsGiven(TypedDict, total=False):
    """Terms a caller may give in addition to the clients; missing terms, or None, are taken from the run's spec.

    To add a term, add a line here and a field to `Terms`: options, the form, the API, the ledger and the stored
    row are derived from these two.
    """

    epsilon: Annotated[float | None, Term("Budget; 1 is strong, 10 is weak.")]
    delta: Annotated[float | None, Term("Budget; 0.01 or smaller is usual.")]
    sigma: Annotated[SigmaChoice | None, Term("Noise: auto, or a number.")]
    method: Annotated[
        str | None,
        Term(
            "closed_form, groups, scratch, sifu or auto: an exact one, unless another needs less than half its rounds.",
            default="auto",
        ),
    ]
    level: Annotated[Level | None, Term("Minimum level; anything weaker is refused.", default="conditional")]
    retention: Annotated[
        Retention | None,
        Term(
            "paper keeps models from before the rollback, strict erases them.",
            words={"paper": "earlier models are kept", "strict": "earlier models are erased"},
        ),
    ]
    before_after: Annotated[
        str | None,
        Term("EPSILON,DELTA that must hold for observers of all releases (release.noise)."),
    ]
    records: Annotated[
        Sequence[int | str] | None,
        Term("Forget only these records of one client: identities (the column data.id), or row numbers from 0."),
    ]


class TermOnOffer(NamedTuple):
    """Term that a form or the command line offers: its type, without None, and its description."""

    kind: Any
    about: Term

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed values, or an empty tuple for a number, free text or a list."""
        words = get_args(self.kind) if self.kind is not SigmaChoice else ()
        return words if all(isinstance(word, str) for word in words) else ()


def terms_on_offer() -> dict[str, TermOnOffer]:
    """Return every term that can be given, by name.

    >>> terms_on_offer()["retention"].choices, terms_on_offer()["delta"].kind
    (('paper', 'strict'), <class 'float'>)
    """
    offered = {}
    for name, hint in get_type_hints(TermsGiven, include_extras=True).items():
        optional, about = get_args(hint)
        kinds = [kind for kind in get_args(optional) if kind is not type(None)]
        offered[name] = TermOnOffer(kinds[0] if len(kinds) == 1 else SigmaChoice, about)
    return offered
