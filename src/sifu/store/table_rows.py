"""What a row of each small table says: requests, subjects, charges, models, evaluations, comparisons, rejections."""

from __future__ import annotations

from dataclasses import dataclass

from sifu.core.request_terms import RequestTerms


@dataclass(frozen=True)
class RequestRow:
    """A row of `requests`; `method` is what was asked for (`terms.method`) until the request is carried out by one."""

    request: str
    status: str
    terms: RequestTerms
    method: str
    deadline_days: int
    received: str
    request_order: int | None
    carried_out: str | None
    multiplier: float | None
    noise_std: float | None
    source_node: int | None
    wanted_node: int | None
    noise_node: int | None
    final_node: int | None
    level: str | None
    finished: str | None

    @property
    def clients(self) -> tuple[str, ...]:
        """The names of those to forget."""
        return self.terms.clients

    @property
    def records(self) -> tuple[int, ...]:
        """The rows to forget of the one client; empty where clients are forgotten whole."""
        return self.terms.records

    @property
    def waits(self) -> bool:
        """Whether it is still to be carried out; its clients are not asked any more."""
        return self.status in ("received", "verified", "planned")


@dataclass(frozen=True)
class SubjectRow:
    """A row of `subjects`: clients that a request forgets together, by number."""

    subject: int
    request: str
    clients: tuple[int, ...]


@dataclass(frozen=True)
class ModelRow:
    """A row of `models`: a file that exists. `kept` ones can be rolled back to; the tip is always there."""

    node: int
    kept: bool
    bytes: int
    digest: str
    nonce: str
    psi_max: float


@dataclass(frozen=True)
class GroupModelRow:
    """A row of `group_models`: a group's model after so many rounds apart.

    `members` are everyone who was in the group in any of these rounds, `samples` the sum of theirs.
    """

    node: int
    grp: int
    rounds: int
    samples: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class MergeRow:
    """A row of `merges`: one of the group models that the model of a node was made of."""

    node: int
    grp: int
    source_node: int
    samples: int


@dataclass(frozen=True)
class EvaluationRow:
    """A row of `evaluations`."""

    node: int
    subset: str
    samples: int
    accuracy: float
    loss: float


@dataclass(frozen=True)
class ChargeRow:
    """A row of `charges`."""

    noise_node: int
    subject: int
    psi: str
    charge: float


@dataclass(frozen=True)
class ComparisonRow:
    """A row of `comparisons`: what another method needed for the same request."""

    request: str
    method: str
    rounds: int
    reached: bool
    accuracy: float
    forgotten_accuracy: float | None


@dataclass(frozen=True)
class RejectionRow:
    """A row of `rejections`: a client's reply that was refused, and why."""

    branch: int
    round: int
    number: int
    client: str
    reason: str
    left_out: bool
