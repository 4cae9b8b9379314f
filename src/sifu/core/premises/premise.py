"""One premise of a certificate, and whether it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

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
