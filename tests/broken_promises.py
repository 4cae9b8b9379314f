"""Operators who break one promise of their certificates each: the negative controls of `claims_against_truth`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import sifu.methods.base as noised
import sifu.methods.groups as groups_method
import sifu.requests.certification as certification
import sifu.requests.roll_back as roll_back
import sifu.run.clients_view as clients_view
from claims_against_truth import Findings
from sifu.core.layout import Vector
from sifu.core.request_terms import Terms
from sifu.core.round import NormalSource, add_noise
from sifu.store.projection import GroupModelRow
from sifu.theory.closed_form import Statistics
from sifu.theory.closed_form.sums import RunningSum


@dataclass(frozen=True)
class Control:
    """One cheat, the runs in which it matters, and the kind of statement that must be found untrue."""

    what: str
    families: tuple[str, ...]
    kind: str
    cheat: Callable[[], AbstractContextManager[Any]] = nullcontext
    psi_scale: float = 1.0

    def findings(self) -> Findings:
        """Return empty findings for this control."""
        return Findings(psi_scale=self.psi_scale)

    def is_caught(self, findings: Findings) -> bool:
        """Return whether the statement was found untrue."""
        return any(violation["kind"] == self.kind for violation in findings.violations)


@contextmanager
def half_the_noise() -> Iterator[None]:
    """Record sigma, but add noise of sigma/2."""

    def less(model: Vector, noise_std: float, normals: NormalSource) -> Vector:
        return add_noise(model, noise_std / 2.0, normals)

    with mock.patch.object(noised, "add_noise", less):
        yield


@contextmanager
def hit_groups_left_in() -> Iterator[None]:
    """Merge every finished group, also those that held the client."""

    def all_parts(models: Mapping[int, GroupModelRow], rounds: int, clients: object) -> tuple[GroupModelRow, ...]:
        return tuple(row for _, row in sorted(models.items()) if row.rounds == rounds)

    with mock.patch.object(groups_method, "parts_without", all_parts):
        yield


@contextmanager
def statistics_left_in() -> Iterator[None]:
    """Subtract only a client's counts from the sum, so that the products of its samples remain."""

    def counts_only(self: RunningSum, part: Statistics) -> None:
        self._samples -= part.samples

    with mock.patch.object(RunningSum, "subtract", counts_only):
        yield


@contextmanager
def levels_by_wish() -> Iterator[None]:
    """State the best possible level in certificates, regardless of their premises."""

    def best(premises: object, *, exact: bool, fresh: bool = False) -> str:
        return "exact" if exact else "proven"

    with mock.patch.object(certification, "level_of", best):
        yield


@contextmanager
def names_as_different_clients() -> Iterator[None]:
    """Count a client that lost records as a new client."""
    with mock.patch.object(clients_view, "chain_of", lambda reader, client: (client,)):
        yield


@contextmanager
def models_kept() -> Iterator[None]:
    """Erase no model that a forgotten client influenced."""
    with mock.patch.object(roll_back, "nodes_to_erase", return_value=set()):
        yield


@contextmanager
def budgets_of_less_noise() -> Iterator[None]:
    """Let half of the noise hide a client that its budget asks for."""
    asked = Terms.multiplier.fget
    with mock.patch.object(Terms, "multiplier", property(lambda terms: asked(terms) / 2.0)):  # type: ignore[misc]
        yield


CONTROLS = {
    "psi": Control("Psi is half of what it is", ("linear",), "psi", psi_scale=0.5),
    "charges": Control("charges are a quarter of what they are", ("linear",), "charge", psi_scale=0.5),
    "noise": Control("half of the noise is added", ("linear",), "replay", half_the_noise),
    "hit group": Control("a hit group is left in the merge", ("groups",), "exact", hit_groups_left_in),
    "statistics": Control("statistics are left in the sum", ("closed form",), "exact", statistics_left_in),
    "names": Control("what is left of a client is a new client", ("linear",), "uncovered", names_as_different_clients),
    "names, exact": Control("the same, and exact", ("linear",), "exact", names_as_different_clients),
    "erasure": Control("models are kept that had to be erased", ("linear",), "verify", models_kept),
    "budget": Control("half of the noise that a budget asks for", ("linear",), "delta", budgets_of_less_noise),
    "levels": Control("levels are stated by wish", ("linear", "network"), "level", levels_by_wish),
}
