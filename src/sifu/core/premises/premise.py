"""One premise of a certificate, whether it holds, and the level that follows (docs/theory.md, section 12.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sifu.choices import Level
from sifu.core.premises.sentences import sentence

Status = Literal["met", "trusted", "assumed", "failed"]


@dataclass(frozen=True)
class Premise:
    """One premise: its name, whether it holds, and what its sentence is made of (`sentences.SENTENCES`).

    `case` tells sentences of one name apart; it is the status where that says enough. `values` are the figures in the
    sentence. `confidential` ones may depend on clients' data and are in the auditor's copy only. Certificates hold all
    of these and no sentence: a better wording changes no certificate.

    >>> Premise("calibration", "failed", values={"epsilon": 3.0}).statement
    'Classical calibration is proven for epsilon < 1 only; it was used at epsilon = 3.'
    """

    name: str
    status: Status
    case: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    confidential: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "case", self.case or self.status)

    @property
    def statement(self) -> str:
        """The sentence, by today's wording."""
        return sentence(self.name, self.case, self.values)

    @property
    def detail(self) -> str:
        """The confidential figures in words."""
        return ", ".join(f"{name.replace('_', ' ')} {value!r}" for name, value in self.confidential.items())

    def in_words(self) -> dict[str, str]:
        """For people: name, status, sentence and figures."""
        return {"name": self.name, "status": self.status, "statement": self.statement, "detail": self.detail}


FRESH_START = (
    "preprocessing", "features", "hyper-parameters", "method", "identity", "grouping", "rounds apart", "initial model",
    "noise size", "engine", "layout",
)  # fmt: skip
"""The premises that matter even for a fresh model: what came before training, what it starts from, whether the method
proves anything at all, and whether a client is who it says it is."""

BITS = ("layout",)
"""The premises that matter only where no noise hides the last bits: bounds on rounding hold for any layout."""

ON_THE_PATH = ("counterfactual", "replies", "schedule", "record")
"""The premises that matter for a model that was trained before, even if the client has no part in it: without the
client other rounds might have counted."""


def premises_that_count(premises: Sequence[Premise], *, exact: bool, fresh: bool) -> list[Premise]:
    """The premises that a level rests on: all but those on bits, unless no forgotten client has a part in the model."""
    if not exact:
        return [premise for premise in premises if premise.name not in BITS]
    names = FRESH_START if fresh else FRESH_START + ON_THE_PATH
    return [premise for premise in premises if premise.name in names]


def level_of(premises: Sequence[Premise], *, exact: bool, fresh: bool = False) -> Level:
    """The level that the premises allow.

    `exact` says that no forgotten client has a part in the model training continues from. `fresh` says that it is a new
    initial model; one that was trained before also rests on which rounds counted (docs/theory.md, section 12.2).
    """
    statuses = {premise.status for premise in premises_that_count(premises, exact=exact, fresh=fresh)}
    if "failed" in statuses:
        return "none"
    if "assumed" in statuses:
        return "conditional"
    return "exact" if exact else "proven"
