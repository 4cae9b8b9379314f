"""Parameter combinations for tests: a few cover every choice of three options, more are `long`, the rest `slow`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def covering(*options: Sequence[Any]) -> list[Any]:
    """Return all combinations of the options as parameters.

    A few that cover every choice of three options have no mark. Those that cover every choice of four with them are
    `long`, all others `slow`.
    """
    combinations = list(itertools.product(*(range(len(values)) for values in options)))
    quick = _with_every_choice(combinations, 3, set())
    long = _with_every_choice(combinations, 4, quick)
    return [
        pytest.param(
            *(values[place] for values, place in zip(options, combination, strict=True)),
            marks=() if combination in quick else pytest.mark.long if combination in long else pytest.mark.slow,
        )
        for combination in combinations
    ]


def _with_every_choice(
    combinations: Sequence[tuple[int, ...]], size: int, chosen: set[tuple[int, ...]]
) -> set[tuple[int, ...]]:
    """Add combinations to those `chosen` until every choice of `size` options occurs; greedily, in a fixed order."""
    held = {choice for combination in chosen for choice in itertools.combinations(enumerate(combination), size)}
    left = {
        combination: set(itertools.combinations(enumerate(combination), size)) - held for combination in combinations
    }
    found = set(chosen)
    while any(left.values()):
        best = max(combinations, key=lambda combination: len(left[combination]))
        found.add(best)
        held = left[best].copy()
        for choices in left.values():
            choices -= held
    return found
