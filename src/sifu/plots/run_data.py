"""A run as its report shows it, in plain frozen values: collected once, then drawn and written without the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sifu.core.wording import HeldOutFigures
from sifu.theory.arrays import Floats, Integers


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
    subjects: int
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
class Request:
    """A request with what came of it so far. `certificate` is the body of the auditor's copy, when issued."""

    request: str
    status: str
    clients: tuple[str, ...]
    method: str
    epsilon: float
    delta: float
    unit: str
    scope: str
    received: str
    level: str | None
    sigma: float | None
    attacker: float
    rollback: tuple[int, int] | None
    rounds: int
    accuracy: float | None
    reached: bool | None
    scratch_rounds: int | None
    scratch_reached: bool
    scratch_forgotten: float | None
    forgotten_samples: int | None
    forgotten_before: float | None
    forgotten_after: float | None
    remaining_before: float | None
    remaining_after: float | None
    certificate: Mapping[str, Any] | None
    signature: str

    @property
    def done(self) -> bool:
        """Carried out, retrained and certified."""
        return self.status == "done"

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
class KeptModel:
    """A model file that exists."""

    node: int
    branch: int
    position: int
    on_path: bool
    current: bool
    bytes: int
    psi_max: float


@dataclass(frozen=True)
class ReportData:
    """Everything a report shows; `groups` is how many groups there are, and how many have a finished model.

    `accuracy` is on the active clients' training data, `held_out` on held-out rows.
    """

    run: str
    folder: str
    phase: str
    model_kind: str
    parameters: int
    client_count: int
    active_count: int
    training_rounds: int
    rounds_in_all: int
    target: float
    accuracy: float | None
    branches: tuple[Branch, ...]
    requests: tuple[Request, ...]
    psi_panels: tuple[PsiPanel, ...]
    trace: AccuracyTrace
    models: tuple[KeptModel, ...]
    events: int
    last_event: str
    ledger_head: str
    public_key: str
    groups: tuple[int, int] | None = None
    held_out: HeldOutFigures | None = None

    @property
    def forgotten_count(self) -> int:
        """Clients whose forgetting is certified, at whatever level but none."""
        return sum(len(request.clients) for request in self.done if request.level not in (None, "none"))

    @property
    def done(self) -> tuple[Request, ...]:
        """Requests that were carried out and certified."""
        return tuple(request for request in self.requests if request.done)

    @property
    def compared(self) -> tuple[Request, ...]:
        """Requests whose rounds can be set against Scratch's."""
        return tuple(request for request in self.requests if request.compared)
