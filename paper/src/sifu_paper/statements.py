"""What the paper says and what we add, beside what was measured here.

Each statement is a sentence and a function from a table to a verdict; one whose experiment was not run says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from sifu_paper.added_statements import ADDED_STATEMENTS
from sifu_paper.group_statements import GROUP_STATEMENTS
from sifu_paper.network_statements import NETWORK_STATEMENTS
from sifu_paper.round_statements import BOUND_STATEMENTS, LETTER_STATEMENTS, ROUND_STATEMENTS
from sifu_paper.verdict import Statement, Tables, Verdict, verdicts_of

PAPER_STATEMENTS = (*ROUND_STATEMENTS, *NETWORK_STATEMENTS, *BOUND_STATEMENTS)
OWN_STATEMENTS = (*LETTER_STATEMENTS, *ADDED_STATEMENTS, *GROUP_STATEMENTS)
STATEMENTS = (*PAPER_STATEMENTS, *OWN_STATEMENTS)
"""The paper's statements first, then what we add."""


def verdicts(tables: Tables, statements: Sequence[Statement] = STATEMENTS) -> list[tuple[Statement, Verdict]]:
    """Every statement with what the tables say about it."""
    return verdicts_of(tables, statements)
