"""Rounds at which accuracy is measured."""

from __future__ import annotations

from sifu.core.round_stream import is_evaluated
from sifu.core.spec import StopSpec


def test_every_few_rounds_and_the_last_one() -> None:
    rule = StopSpec(target=0.9, max_rounds=60, evaluate_every=7)
    assert [rounds for rounds in range(61) if is_evaluated(rule, rounds)] == [0, 7, 14, 21, 28, 35, 42, 49, 56, 60]
