"""Who takes part in a round: everyone, each client independently, or a sample of fixed size.

Only the first two keep the counterfactual "the same schedule, W absent, its slots not refilled" equal to
the law of training without W (docs/theory.md, section 2.2); `fixed` is allowed and named in the certificate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from sifu.errors import InputError
from sifu.theory.arrays import Integers
from sifu.theory.draws import Places, fraction_limit, scores_below, smallest_scores

ClientIndices = Integers


@dataclass(frozen=True)
class Participation:
    """`all`, `poisson(rate)` or `fixed(count)`."""

    kind: Literal["all", "poisson", "fixed"]
    rate: float = 1.0
    count: int = 0

    @staticmethod
    def parse(text: str) -> Participation:
        """Read `all`, `poisson(0.1)` or `fixed(10)`.

        >>> Participation.parse("poisson(0.25)")
        Participation(kind='poisson', rate=0.25, count=0)
        """
        if text == "all":
            return Participation("all")
        match = re.fullmatch(r"(poisson|fixed)\(\s*([0-9.eE+-]+)\s*\)", text.strip())
        if match:
            try:
                if match[1] == "poisson":
                    rate = float(match[2])
                    if 0.0 < rate <= 1.0:
                        return Participation("poisson", rate=rate)
                elif int(match[2]) >= 1:
                    return Participation("fixed", count=int(match[2]))
            except ValueError:
                pass
        raise InputError(
            f"participation {text!r} is not understood: write all, poisson(RATE) with 0 < RATE <= 1, "
            "or fixed(COUNT) with COUNT >= 1"
        )

    def __str__(self) -> str:
        if self.kind == "poisson":
            return f"poisson({self.rate!r})"
        if self.kind == "fixed":
            return f"fixed({self.count})"
        return "all"

    @property
    def independent(self) -> bool:
        """Whether a client's presence says nothing about the others': the certified default."""
        return self.kind != "fixed"

    def draw(self, active: ClientIndices | Places, key: ArrayLike) -> ClientIndices:
        """The participants of one round, sorted, among the `active` clients (indices among all known ones).

        Client i has score_i under the round's `key` (`sifu.theory.draws`): `poisson` takes clients whose fraction is
        below the rate, `fixed` the `count` smallest scores, ties by index. A client's score depends on no one else, so
        a Poisson draw does not move when another client leaves. A caller that draws among the same clients again and
        again hands them over as `Places`, in increasing order.
        """
        places = active if isinstance(active, Places) else Places.of(np.sort(np.asarray(active, dtype=np.int64)))
        if self.kind == "all":
            return places.index.copy()
        if self.kind == "poisson":
            return places.index[scores_below(key, places, fraction_limit(self.rate))[0]]
        return places.index[smallest_scores(key, places, self.count)]
