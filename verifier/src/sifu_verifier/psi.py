"""Psi: the bound on how far a client moved a model (docs/store.md, section 3)."""

from __future__ import annotations

import math

import numpy as np

from sifu_verifier.rates import rate_since
from sifu_verifier.run_folder import RunFolder

EDGE = 1e-12  # smallest margin by which a condition must hold (section 3)


def psi_along(run: RunFolder, path: list[int], subject: list[int]) -> dict[int, float]:
    """Return Psi(n, W) at every node n of a path."""
    g, psi, rounding, touched, result = run.facts["server_rate"], 0.0, 0.0, False, {}
    for node in path:
        row, here = run.nodes[node], run.rounds[node]
        if row["kind"] in ("round", "merge"):
            mine, change, factor = [c for c in here if c in subject], 0.0, 1.0
            samples, drifts = (np.array([here[c][k] for c in mine], float) for k in ("samples", "drift"))
            rest, touched = row["samples"] - int(samples.sum()), touched or bool(mine)
            if mine and rest == 0:
                change = g * row["mean_shift"]
            elif mine:
                change = g * float(samples @ drifts) / rest
            if rest:
                of = run.regular[rate_since(run, node)]
                less_p, less_a = (sum(here[c]["samples"] * of[c][k] for c in mine) for k in (0, 1))
                factor = abs(1 - g) + g * (row["factor_sum"] - less_p) / rest
                averaged = g * (row["averagedness_sum"] - less_a) / rest <= 1 - EDGE
                if g > 1 and row["factor_max"] <= 1 and averaged:
                    factor = min(factor, 1.0)
            # After a purge, erased figures are infinite, and `factor_sum` no longer fits the clients' P.
            psi = math.inf if math.isinf(psi + change) else factor * psi + change
            still = row["factor_max"] <= 1 and (g <= 1 or g * row["averagedness_max"] <= 1)
            growth = 1.0 if still else max(1.0, abs(1 - g) + g * row["factor_max"])
            rounding = growth * rounding + row["rounding"]
        elif row["kind"] == "noise":
            rounding += row["rounding"]
        result[node] = max(psi + rounding, 2.0**-1000) if touched else 0.0
    return result
