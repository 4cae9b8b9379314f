"""A statement, and what the tables say about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sifu_paper.table import Row

Tables = Mapping[str, Sequence[Row]]
NEAR = 0.10
"""Two accuracies, or two shares of rounds, that differ by at most this are called alike."""


@dataclass(frozen=True)
class Verdict:
    """What was measured; `same` is None where there is nothing to compare with."""

    measured: str
    same: bool | None
    why: str = ""

    @property
    def word(self) -> str:
        """Same or not, as it stands in the table."""
        return "-" if self.same is None else "same" if self.same else "not the same"


@dataclass(frozen=True)
class Statement:
    """A sentence, the experiment it is checked with, and how."""

    says: str
    experiment: str
    check: Callable[[Sequence[Row]], Verdict | None]
    ours: bool = False


def verdicts_of(tables: Tables, statements: Sequence[Statement]) -> list[tuple[Statement, Verdict]]:
    """Every statement with what the tables say about it."""
    result = []
    for statement in statements:
        rows = tables.get(statement.experiment)
        verdict = statement.check(rows) if rows else None
        result.append((statement, verdict or Verdict(f"not measured: run sifu-bench run {statement.experiment}", None)))
    return result
