"""Immutable data of a report, from which its figures and page are made without access to the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sifu.api.requests import Request
from sifu.api.status import RunStatus
from sifu.core.certificate_words import Certificate
from sifu.core.request_terms import Terms
from sifu.theory.arrays import Floats, Integers


@dataclass(frozen=True)
class Branch:
    """The rounds of the training (branch 0) or of one request, as a lane of the history.

    `start` counts the rounds on the path before the branch. `source` is (branch, position) of the model the
    branch continues from, or None for a fresh one. Nodes up to `active_until` are on the active history; later nodes
    were rolled back. `active_until` is -1 if the whole branch was rolled back.
    """

    branch: int
    label: str
    start: int
    rounds: int
    source: tuple[int, int] | None
    noise_std: float
    active_until: int


@dataclass(frozen=True)
class PsiPanel:
    """Psi of a request's subjects along the path just before the request was executed.

    `x` counts rounds. `curves` has one row per shown subject, sorted by Psi at the chosen model, largest first.
    """

    request: str
    x: Integers
    curves: Floats
    largest: str
    psi_star: float
    noise_std: float
    source_x: int
    source_psi: float
    tip_x: int
    noise_edges: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ReportedRequest(Request):
    """A request with its results so far: its source model, the rounds since, and the measurements.

    `noise_std` is None before noise is added. `fits` has the accuracy or error on the forgotten and on the remaining
    clients, before and after (`Measured`), as text. `reached` is None without a target or a measurement. `certificate`
    is the auditor's, once it is issued.
    """

    terms: Terms
    noise_std: float | None
    rollback: tuple[int, int] | None
    rounds: int
    fits: Mapping[str, str]
    reached: bool | None
    certificate: Certificate | None

    @property
    def done(self) -> bool:
        """True if the request was executed, retrained and certified."""
        return self.status == "done"


@dataclass(frozen=True)
class AccuracyTrace:
    """Accuracy on the active clients at every evaluated model, by rounds run, including models rolled back later."""

    x: Integers
    accuracy: Floats
    branch: Integers
    starts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ReportData:
    """All data of a report: the state of the run, and the values of its figures and tables."""

    run: str
    status: RunStatus
    training_rounds: int
    rounds_in_all: int
    branches: tuple[Branch, ...]
    requests: tuple[ReportedRequest, ...]
    psi_panels: tuple[PsiPanel, ...]
    trace: AccuracyTrace
    events: int
    last_event: str
    ledger_head: str
    public_key: str
    regression: bool
    """True if the run predicts real numbers, so that there is no accuracy."""

    @property
    def forgotten_count(self) -> int:
        """Number of clients forgotten above level `none`; clients that lost only records do not count."""
        return sum(
            len(request.clients)
            for request in self.done
            if request.records is None and request.level not in (None, "none")
        )

    @property
    def records_count(self) -> int:
        """Number of records forgotten above level `none`, from clients that stay."""
        return sum(request.records or 0 for request in self.done if request.level not in (None, "none"))

    @property
    def done(self) -> tuple[ReportedRequest, ...]:
        """Requests that were executed and certified."""
        return tuple(request for request in self.requests if request.done)
