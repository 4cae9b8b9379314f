"""Privacy of training noise over all rounds (docs/store.md, section 4a)."""

from __future__ import annotations

import math

from sifu_verifier.calibration import delta_of, epsilon_of
from sifu_verifier.canonical import Row
from sifu_verifier.run_folder import RunFolder
from sifu_verifier.tolerances import FLOOR


def training_noise(run: RunFolder, request: Row, subjects: list[list[int]]) -> Row:
    """Return the guarantee that training noise gives the subjects of a request over all rounds (section 4a)."""
    z, delta, ratios, counted = run.facts["noise"], request["delta"], [], 0
    for clients in subjects:
        squares = 0.0
        counted += sum(any(c in here for c in clients) for here in run.rounds.values())
        for here in run.rounds.values():
            mine, everyone = (sum(here[c]["samples"] for c in who if c in here) for who in (clients, list(here)))
            if any(c in here for c in clients):
                width = z * math.sqrt(sum(p["samples"] ** 2 for p in here.values())) / everyone
                squares += ((2 * mine / everyone + (len(here) + 8) * 2**-51) / width) ** 2
        ratios.append(math.sqrt(squares))
    mu, once = max(ratios), epsilon_of(1 / z, delta)
    if request["calibration"] == "classical":
        once = math.sqrt(2 * math.log(1.25 / delta)) / z
    composed, reached = epsilon_of(mu, delta), max(delta_of(1 / mu, request["epsilon"]), FLOOR) if mu else 0.0
    return {"clip": run.facts["clip"], "noise": z, "epsilon_one_round": once, "epsilon_composed": composed,
            "delta": reached, "counted": counted}  # fmt: skip
