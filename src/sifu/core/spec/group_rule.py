"""How many groups, and how long apart, where the spec does not say: a rule that needs no client's data.

The number of clients, who takes part and the largest number of rounds are public before training, so the premise that
grouping and rounds apart depend on nobody's data stays met (docs/theory.md, section 15.2).

Two things pull at R. Rounds apart are worth nearly as much as common ones, so R should come near the rounds to the
target. Groups that have fitted their own data merge into a plateau, so it should not go far beyond. Neither is known
beforehand; 100 rounds in which everyone takes part lie between the two in what was tried (`EVIDENCE`), and where a
share p takes part in a round, 100 / sqrt(p). S = 10 keeps nine tenths after one leaver; groups of fewer than five
clients learn too little by themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sifu.core.spec.run_spec import Spec
from sifu.core.spec.sections import GroupsSpec
from sifu.theory.participation import Participation

USUAL_GROUPS, LEAST_MEMBERS = 10, 5
ROUNDS_APART = 100
LARGEST_SHARE = 0.75
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
    Tried("FashionMNIST iid", 1.0, 10, 80, 80, 2, 8),
    Tried("FashionMNIST iid", 0.2, 10, 160, 145, 24, 10),
    Tried("FashionMNIST one class", 1.0, 10, 120, 105, 26, 22),
    Tried("CIFAR-10 iid", 1.0, 10, 75, 190, 102, None),
    Tried("CIFAR-10 iid", 1.0, 10, 110, 190, 62, None),
    Tried("CIFAR-10 iid", 1.0, 10, 150, 190, 46, 46),
    Tried("CIFAR-10 Dirichlet 0.3", 1.0, 10, 150, 170, 48, 26),
    Tried("CIFAR-10 iid", 0.2, 5, 200, 310, 150, 312),
    Tried("CIFAR-10 iid", 0.2, 5, 400, 315, 124, None),
)
"""One run each of a first sketch on the paper's networks, 100 clients of 100 images: where the rule starts from."""


def number_of_groups(clients: int) -> int:
    """S for so many clients.

    >>> [number_of_groups(clients) for clients in (4, 20, 50, 1000)]
    [2, 4, 10, 10]
    """
    return max(2, min(USUAL_GROUPS, clients // LEAST_MEMBERS))


def rounds_apart(max_rounds: int, taking_part: float) -> int:
    """R where a share of the clients takes part in a round, and training stops after `max_rounds`.

    >>> rounds_apart(2000, 1.0), rounds_apart(2000, 0.2), rounds_apart(40, 1.0)
    (100, 224, 30)
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
        count=groups.count or number_of_groups(clients),
        rounds=groups.rounds or rounds_apart(spec.stop.max_rounds, rate),
    )
    return replace(spec, groups=filled)
