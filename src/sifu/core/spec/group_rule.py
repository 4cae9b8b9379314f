"""How many groups, and how long apart, where the spec does not say: a rule that needs no client's data.

The number of clients, who takes part and the largest number of rounds are public before training, so the premise that
grouping and rounds apart depend on nobody's data stays met (docs/theory.md, section 15.2).

Two things pull at R. A round apart is worth nearly a common one, so a request costs the less the longer groups train
apart: on CIFAR-10 iid 48, 35 and 20 % of Scratch's rounds after R = 75, 110 and 150 of 240. But the first training
needs common rounds, too: with 80 of 480 left it ended two to five points of test accuracy below plain training. So R is
at most two thirds of the rounds that training may take. Nor is more than 150 rounds in which everyone takes part known
to help; where a share p takes part, 150 / sqrt(p). S = 10 keeps nine tenths after one leaver, and twenty groups were no
better. A group needs a few participants a round: where a fifth takes part, five groups of twenty healed in 8 to 36 %
of Scratch's rounds, ten groups of ten in 25 to 52 %, and two of five seeds of one task never got there (`EVIDENCE`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Tried:
    """Rounds to within one point of where Scratch ends: Scratch's own, and after one and five leavers (None: never)."""

    task: str
    taking_part: float
    groups: int
    rounds_apart: int
    scratch: int
    one_leaver: int
    five_leavers: int | None


EVIDENCE = (
    Tried("FashionMNIST iid", 1.0, 10, 80, 94, 14, 14),
    Tried("FashionMNIST Dirichlet 0.3", 1.0, 10, 80, 102, 30, 26),
    Tried("FashionMNIST one class", 1.0, 10, 120, 118, 28, 34),
    Tried("CIFAR-10 iid", 1.0, 10, 150, 224, 44, 38),
    Tried("CIFAR-10 Dirichlet 0.3", 1.0, 10, 150, 214, 60, 54),
    Tried("FashionMNIST iid", 0.2, 5, 160, 156, 12, 16),
    Tried("FashionMNIST Dirichlet 0.3", 0.2, 5, 160, 136, 32, 32),
    Tried("CIFAR-10 iid", 0.2, 5, 300, 412, 120, 156),
    Tried("CIFAR-10 Dirichlet 0.3", 0.2, 5, 300, 356, 120, 128),
)
"""Medians over five seeds of the experiment `groups` (docs/results), 100 clients of 100 images, near the rule."""


def number_of_groups(clients: int, taking_part: float = 1.0) -> int:
    """S for so many clients, of whom a share takes part in a round.

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
