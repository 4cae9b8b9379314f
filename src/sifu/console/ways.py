"""Every way to forget the clients of a request side by side: what each would cost and what it is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from sifu.api import Run
from sifu.choices import TermsGiven
from sifu.core.method_info import METHOD_INFOS
from sifu.core.protection import attacker_rate
from sifu.core.wording import attacker_words
from sifu.errors import SifuError


@dataclass(frozen=True)
class Way:
    """A method and its plan; `refused` says why it cannot be used."""

    method: str
    summary: str
    level: str = "none"
    words: str = ""
    sigma: float | None = None
    back_to: int | None = None
    rounds: int | None = None
    interval: tuple[int, int] | None = None
    scratch_rounds: int | None = None
    refused: str = ""


def ways_to_forget(run: Run, clients: Sequence[str], terms: TermsGiven) -> list[Way]:
    """The plan of each method for these clients; those that are refused come last."""
    ways = []
    for name, info in METHOD_INFOS.items():
        try:
            plan = run.plan(clients, **cast("TermsGiven", {**terms, "method": name}))
        except SifuError as error:
            ways.append(Way(name, info.summary, refused=str(error)))
            continue
        rate = attacker_rate(plan.level, plan.multiplier)
        ways.append(
            Way(
                method=name,
                summary=info.summary,
                level=plan.level,
                words=attacker_words(plan.level, rate, plan.terms.scope),
                sigma=plan.noise_std,
                back_to=plan.source_rounds,
                rounds=plan.predicted_rounds,
                interval=plan.predicted_interval,
                scratch_rounds=plan.scratch_rounds,
            )
        )
    return sorted(ways, key=lambda way: bool(way.refused))
