"""How many groups, and how long apart, where the spec does not say: a rule that needs no client's data.

The number of clients, who takes part and the largest number of rounds are public before training, so the premise that
grouping and rounds apart depend on no one's data stays met (docs/theory.md, section 15.2).

Two things pull at R. A round apart is worth nearly a common one, so a request costs the less the longer groups train
apart: on CIFAR-10 iid 14, 7 and 7 % of Scratch's rounds after R = 150, 180 and 210 of 240. But the first training needs
common rounds, too: where a fifth takes part it ended 0.9, 1.7 and 2.2 points of test accuracy below plain training on
CIFAR-10 iid after R = 320, 360 and 400 of 480. So R is at most two thirds of the rounds that training may take, and not
more than 150 rounds in which everyone takes part; where a share p takes part, 150 / sqrt(p). S = 10 keeps nine tenths
after one leaver, and twenty groups were no better. A group needs a few participants a round: where a fifth takes part,
ten groups of ten took twice the rounds of five groups of twenty; where one in twenty does, five groups took up to
two and a half times those of two. And it must see enough of the task on its own: with a hundred classes and a thousand
images per group nothing was saved (`paper/results/groups.csv`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

from sifu.core.spec.run_spec import Spec
from sifu.core.spec.sections import GroupsSpec
from sifu.theory.participation import Participation

USUAL_GROUPS, LEAST_MEMBERS = 10, 5
LEAST_PARTICIPANTS = 4
"""Of a group's round, on average."""
ROUNDS_APART = 150
LARGEST_SHARE = Fraction(2, 3)
"""Of stop.max_rounds: common rounds must have room."""
TRIED, REACHED = 16, 15
"""Tasks that the rule was tried on (`paper/results/groups.csv`), and how many of them a request came to an end on."""
USUAL_COST, COSTS = 0.1693, (8 / 240, 100 / 120)
"""Rounds of one leaver's request over Scratch's: the median over all tasks, the least and the most of those."""


def number_of_groups(clients: int, taking_part: float = 1.0) -> int:
    """S for this many clients, of whom a share takes part in a round.

    >>> [number_of_groups(clients) for clients in (4, 20, 50, 1000)], number_of_groups(100, 0.2)
    ([2, 4, 10, 10], 5)
    """
    return max(2, min(USUAL_GROUPS, clients // LEAST_MEMBERS, int(clients * taking_part) // LEAST_PARTICIPANTS))


def rounds_apart(max_rounds: int, taking_part: float) -> int:
    """R where a share of the clients takes part in a round, and training stops after `max_rounds`.

    >>> rounds_apart(2000, 1.0), rounds_apart(2000, 0.2), rounds_apart(40, 1.0)
    (150, 335, 26)
    """
    return max(1, min(round(ROUNDS_APART / math.sqrt(taking_part)), int(LARGEST_SHARE * max_rounds)))


def with_groups_by_rule(spec: Spec, clients: int) -> Spec:
    """The spec with the number of groups and their rounds apart filled in, where only one of them is given."""
    groups: GroupsSpec = spec.groups
    if groups.count == 0 and groups.rounds == 0:
        return spec
    rate = Participation.parse(spec.server.participation).rate
    filled = replace(
        groups,
        count=groups.count or number_of_groups(clients, rate),
        rounds=groups.rounds or rounds_apart(spec.stop.max_rounds, rate),
    )
    return replace(spec, groups=filled)
