"""How many groups, and how many rounds apart: a rule that looks at no client's data (docs/theory.md, section 15.1).

Learned from the experiment `groups` (docs/experiments.md): CIFAR-10 and FashionMNIST networks from random weights, 100
clients of 100 images, five seeds. A round apart is worth nearly a common one, so the longer the groups train apart the
less a request costs; a third of the rounds must be left in common, or the first training falls behind. A group learns
poorly where it has few participants a round: with four of them five groups healed in 8 to 31 % of Scratch's rounds,
with two of them ten groups needed up to 52 %, and two of five seeds never got there.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

SHARE_APART = Fraction(2, 3)
"""Of the rounds that are planned, those apart."""
FEWEST_PARTICIPANTS = 4
"""Participants of a group's round, on average, below which groups were seen to learn poorly."""
MOST_GROUPS = 10
"""More groups cost storage and gained nothing: twenty took 1.1 times the rounds of ten for one leaver."""
FULL_SHARES = (0.14, 0.30)
"""One leaver's rounds as a share of Scratch's, over four tasks (medians of five seeds), when everyone takes part."""
SAMPLED_SHARES = (0.07, 0.37)
"""The same when a fifth takes part, five groups, and 62 to 83 % of the rounds are apart."""


@dataclass(frozen=True)
class GroupRule:
    """What the rule takes, and between which shares of Scratch's rounds one leaver was seen to cost."""

    groups: int
    rounds: int
    lowest_share: float
    highest_share: float


def group_rule(participants: float, planned_rounds: int, everyone: bool) -> GroupRule | None:
    """Groups for a training of `planned_rounds` rounds with so many `participants` a round; None where they do not pay.

    `participants` is the expected number in a round, all clients if `everyone` takes part. S is as many groups as leave
    each `FEWEST_PARTICIPANTS` of them, ten at most; R is two thirds of the planned rounds. Fewer than two such groups,
    or fewer than three rounds, and there is nothing to merge: train without groups.

    >>> group_rule(100, 240, everyone=True)
    GroupRule(groups=10, rounds=160, lowest_share=0.14, highest_share=0.3)
    >>> group_rule(20, 240, everyone=False).groups, group_rule(5, 480, everyone=False)
    (5, None)
    """
    groups = min(MOST_GROUPS, int(participants // FEWEST_PARTICIPANTS))
    rounds = int(planned_rounds * SHARE_APART)
    if groups < 2 or rounds < 2:
        return None
    lowest, highest = FULL_SHARES if everyone else SAMPLED_SHARES
    return GroupRule(groups, rounds, lowest, highest)
