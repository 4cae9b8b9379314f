"""Psi: the bound on how far a client moved a model (docs/store.md, section 3)."""

from __future__ import annotations

import math

import numpy as np

from sifu_verifier.run_folder import RunFolder


def psi_along(run: RunFolder, path: list[int], subject: list[int]) -> dict[int, float]:
    """Return Psi(n, W) at every node n of a path."""
    psi, rounding, touched, result = 0.0, 0.0, False, {}
    for node in path:
        row, here = run.nodes[node], run.rounds[node]
        if row["kind"] in ("round", "merge"):
            mine, change, factor = [c for c in here if c in subject], 0.0, 1.0
            samples, drifts = (np.array([here[c][k] for c in mine], float) for k in ("samples", "drift"))
            rest, touched = row["samples"] - int(samples.sum()), touched or bool(mine)
            if mine:
                change = float(samples @ drifts) / rest if rest else row["mean_shift"]
            if rest:
                factor = (row["factor_sum"] - sum(here[c]["samples"] * run.regular[c] for c in mine)) / rest
            # After a purge, erased figures are infinite, and `factor_sum` no longer fits the clients' P.
            psi = math.inf if math.isinf(psi + change) else factor * psi + change
            rounding = max(1.0, row["factor_max"]) * rounding + row["rounding"]
        elif row["kind"] == "noise":
            rounding += row["rounding"]
        result[node] = max(psi + rounding, 2.0**-1000) if touched else 0.0
    return result
