"""The row of the README's table of methods that applies to a spec, decided before training."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from sifu.core.premises import PREPROCESSING
from sifu.core.spec import LINEAR_KINDS, Spec
from sifu.core.spec.sections import IMAGE_FEATURES
from sifu.errors import SifuWarning
from sifu.run.clients_and_engine import clients_from_spec, preprocessing_of
from sifu.theory.calibration import exact_multiplier

SEVERAL = 5.0
"""Multiple of s sqrt(d) from which so many clients make noise worthwhile (docs/theory.md, section 13)."""


@dataclass(frozen=True)
class SpecPlan:
    """Way in which a spec forgets: the row of the README's table, the reason, and remarks on the data."""

    row: str
    reason: str
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the plan as text."""
        return [f"Use {self.row}: {self.reason}.", *(f"Note: {note}." for note in self.notes)]


def plan_spec(spec: Spec) -> SpecPlan:
    """Return the row that applies to a spec; its data are read, and nothing is trained."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SifuWarning)
        clients = clients_from_spec(spec)
    notes = [str(warning.message) for warning in caught if issubclass(warning.category, SifuWarning)]
    return SpecPlan(*_row_of(spec, clients), (*notes, *_shortened(spec, clients)))


def _row_of(spec: Spec, clients: tuple[Any, ...]) -> tuple[str, str]:
    if spec.regime.solves:
        level = (
            "exact"
            if preprocessing_of(spec) in PREPROCESSING
            else 'conditional until you can declare data.preprocessing = "fixed"'
        )
        if spec.features.kind in IMAGE_FEATURES:
            return (
                "a head in closed form on deep features",
                f"the spec solves a head on a public network: no round, {level}",
            )
        return "a head in closed form on other features", f"the spec solves a head: no round, {level}"
    count, groups = len(clients), "groups (groups.count and groups.rounds), else scratch"
    if spec.model.kind not in LINEAR_KINDS:
        return groups, f"{spec.model.kind} is not a linear model: noise would have to drown all of its parameters"
    labels = max(int(np.max(client.y, initial=0)) for client in clients) + 1
    outputs = (spec.model.outputs or labels) if spec.model.kind == "softmax" else 1
    parameters = outputs * (int(np.prod(clients[0].x.shape[1:])) + 1)
    law = exact_multiplier(spec.privacy.epsilon, spec.privacy.delta) * math.sqrt(parameters)
    said = f"{count} clients are {count / law:.2g} times s sqrt(d) = {law:.3g}, for d = {parameters} parameters"
    if count >= SEVERAL * law:
        return "method sifu: a few rounds with noise", f"{said}: at least {SEVERAL:g}, so noise is small"
    return groups, f"{said}: below {SEVERAL:g}, so noise would undo most of the training"


def _shortened(spec: Spec, clients: tuple[Any, ...]) -> tuple[str, ...]:
    """Return a remark if `features.norm` shortens rows, which happens to the plain inputs of a closed-form head."""
    if not spec.regime.solves or spec.features.kind != "none":
        return ()
    rows = np.concatenate([client.x.reshape(len(client.x), -1) for client in clients])
    lengths = np.linalg.norm(rows / (255.0 if rows.dtype == np.uint8 else 1.0), axis=1)
    share = float(np.mean(lengths > spec.features.norm))
    return (f"features.norm = {spec.features.norm:g} shortens {share:.1%} of the rows",) if share else ()
