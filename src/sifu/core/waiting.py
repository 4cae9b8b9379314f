"""When a round closes: after all answers, after a share or a number of them, or after some seconds (`server.wait`).

A round that closes after enough answers leaves out slower clients, so one client decides whose answers
count; certificates name that as assumed. A round that closes after a fixed time asks each client for its own answer
in time, and decides nothing for the others.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from sifu.errors import InputError

ALL = "all"
LATE = "late: "
"""How an incident of a client that answered too late begins."""


@dataclass(frozen=True)
class Wait:
    """What a round waits for: a `share` of those asked, a `count` of answers, or `seconds`; the first that is given."""

    share: float | None = None
    count: int | None = None
    seconds: float | None = None

    @staticmethod
    def parse(text: str) -> Wait:
        """From the spec.

        >>> Wait.parse("all"), Wait.parse("80%").share, Wait.parse("4").count, Wait.parse("30s").seconds
        (Wait(share=None, count=None, seconds=None), 0.8, 4, 30.0)
        """
        written = text.strip()
        if written == ALL:
            return Wait()
        matched = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(%|s)?", written)
        if matched:
            number, unit = float(matched[1]), matched[2]
            if unit == "%" and 0 < number <= 100:
                return Wait(share=number / 100)
            if unit == "s" and number > 0:
                return Wait(seconds=number)
            if unit is None and number.is_integer() and number >= 1:
                return Wait(count=int(number))
        raise InputError(
            f"server.wait must be all, a share such as 80%, a number of answers such as 4, or a time such as 30s, "
            f"found {text!r}"
        )

    @property
    def closes_early(self) -> bool:
        """Whether a round can close while some clients have time left."""
        return self.share is not None or self.count is not None

    def enough(self, asked: int) -> int:
        """How many answers close a round in which `asked` clients were asked.

        >>> Wait.parse("80%").enough(5), Wait.parse("4").enough(3), Wait.parse("30s").enough(5)
        (4, 3, 5)
        """
        if self.share is not None:
            return min(asked, math.ceil(self.share * asked - 1e-9))
        return asked if self.count is None else min(asked, self.count)
