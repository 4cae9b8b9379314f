"""A run as its report shows it, in plain frozen values: collected once, then drawn and written without the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sifu.api.status import RequestStatus, RunStatus
from sifu.requests.outcome import Measured
from sifu.store.projection import EvaluationRow, ModelRow
from sifu.theory.arrays import Floats, Integers
from sifu.theory.history import PathNode


@dataclass(frozen=True)
class Branch:
    """The rounds of the training (branch 0) or of one request, as a lane of the history.

    `start` counts the rounds on the path before the branch. `source` is (branch, position) of the model the
    branch continues from, None for a fresh one. Nodes up to `active_until` are on the active history, later ones
    were cut off; -1 when the whole branch was.
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
    """Psi of a request's subjects along the path as it was before the request was carried out.

    `x` counts rounds; `curves` has a row for each subject shown, the largest at the chosen model first.
    `limit` is what the request's own subjects were held to: Psi*, less the reserve.
    """

    request: str
    clients: int
    joint: bool
    x: Integers
    curves: Floats
    largest: str
    psi_star: float
    limit: float
    noise_std: float
    source_x: int
    source_psi: float
    tip_x: int
    noise_edges: tuple[int, ...]
    held_back: str


@dataclass(frozen=True)
class ReportedRequest(RequestStatus):
    """A request with what came of it so far: the model it went back to, the rounds since, what was measured.

    `noise_std` is None before there is noise, and after a purge erased it. `certificate` is the body of the auditor's
    copy, when issued.
    """

    noise_std: float | None
    rollback: tuple[int, int] | None
    rounds: int
    accuracy: float | None
    target: float
    measured: Measured
    certificate: Mapping[str, Any] | None
    signature: str

    @property
    def done(self) -> bool:
        """Carried out, retrained and certified."""
        return self.status == "done"

    @property
    def reached(self) -> bool | None:
        """Whether the target was reached; None without a target, or before that was measured."""
        after = self.measured.remaining_after
        return None if after is None or self.target <= 0 else after.accuracy >= self.target

    @property
    def scratch_rounds(self) -> int | None:
        """The rounds of Scratch, where it was trained for comparison."""
        return self.measured.scratch.rounds if self.measured.scratch else None

    @property
    def scratch_reached(self) -> bool:
        """Whether Scratch reached the target, too."""
        return self.measured.scratch is not None and (self.measured.scratch.reached or self.target <= 0)

    @property
    def compared(self) -> bool:
        """Done, the target reached, and Scratch trained next to it: only then do the rounds compare."""
        return self.done and self.scratch_rounds is not None and self.reached is True


@dataclass(frozen=True)
class AccuracyTrace:
    """Accuracy on the active clients at every evaluated model, by rounds run since the beginning, the cut ones too."""

    x: Integers
    accuracy: Floats
    branch: Integers
    starts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ReportData:
    """Everything a report shows: where the run stands, and what its figures and tables are made of.

    `models` are those on disk, each with its place in the history and what it is for.
    """

    run: str
    status: RunStatus
    training_rounds: int
    rounds_in_all: int
    branches: tuple[Branch, ...]
    requests: tuple[ReportedRequest, ...]
    psi_panels: tuple[PsiPanel, ...]
    trace: AccuracyTrace
    models: tuple[tuple[ModelRow, PathNode, str], ...]
    events: int
    last_event: str
    ledger_head: str
    public_key: str
    squared_error_per_loss: float | None = None
    """The factor from a mean loss to the mean squared error, where real numbers are predicted."""

    @property
    def regression(self) -> bool:
        """Whether real numbers are predicted, so that there is no accuracy."""
        return self.squared_error_per_loss is not None

    @property
    def forgotten_count(self) -> int:
        """Clients whose forgetting is certified, at whatever level but none; not those that stay with fewer records."""
        return sum(
            len(request.clients)
            for request in self.done
            if request.records is None and request.level not in (None, "none")
        )

    @property
    def records_count(self) -> int:
        """Records whose forgetting is certified, of clients that stay."""
        return sum(request.records or 0 for request in self.done if request.level not in (None, "none"))

    def fit(self, evaluation: EvaluationRow | None) -> str:
        """Return how good a model is in an evaluation: its accuracy, or its mean squared error."""
        if evaluation is None:
            return "–"
        if self.squared_error_per_loss is None:
            return f"{100 * evaluation.accuracy:.1f} %"
        return f"{self.squared_error_per_loss * evaluation.loss:.4g}"

    @property
    def done(self) -> tuple[ReportedRequest, ...]:
        """Requests that were carried out and certified."""
        return tuple(request for request in self.requests if request.done)

    @property
    def compared(self) -> tuple[ReportedRequest, ...]:
        """Requests whose rounds can be set against Scratch's."""
        return tuple(request for request in self.requests if request.compared)
