"""Parameter combinations for tests: a few cover every choice of three options, the others are `long`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def covering(*options: Sequence[Any]) -> list[Any]:
    """Return all combinations of the options as parameters; mark all `long` except a few that cover every choice of
    three.
    """
    combinations = list(itertools.product(*(range(len(values)) for values in options)))
    left = {combination: set(itertools.combinations(enumerate(combination), 3)) for combination in combinations}
    quick = set()
    while any(left.values()):
        best = max(combinations, key=lambda combination: len(left[combination]))
        quick.add(best)
        held = left[best].copy()
        for choices in left.values():
            choices -= held
    return [
        pytest.param(
            *(values[place] for values, place in zip(options, combination, strict=True)),
            marks=() if combination in quick else pytest.mark.long,
        )
        for combination in combinations
    ]
