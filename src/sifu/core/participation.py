"""Who takes part in a round: everyone, each client independently, or a sample of fixed size.

Only the first two keep the counterfactual "the same schedule, W absent, its slots not refilled" equal to
the law of training without W (DESIGN section 3); `fixed` is allowed and named in the certificate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sifu.core.errors import InputError

ClientIndices = NDArray[np.int64]


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

    def draw(self, active: ClientIndices, client_count: int, generator: np.random.Generator) -> ClientIndices:
        """The participants of one round, sorted, among the `active` clients of `client_count` known ones.

        A Poisson draw flips a coin for every known client, active or not, so that a client's coin does not
        move when another one leaves.
        """
        active = np.sort(np.asarray(active, dtype=np.int64))
        if self.kind == "all":
            return active
        if self.kind == "poisson":
            return active[generator.random(client_count)[active] < self.rate]
        size = min(self.count, active.size)
        return np.sort(generator.choice(active, size=size, replace=False))
