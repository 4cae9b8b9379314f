"""Status of a run: clients, rounds, Psi, kept models, requests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from sifu.api.requests import Request, requests_of
from sifu.core.held_out_figures import TRAINING_DATA, HeldOutFigures, missed_target_words
from sifu.core.ledger import finite_or_text
from sifu.core.operator_words import aligned, names_words, psi_words, way_to_go_on
from sifu.core.premises import Status, psi_status
from sifu.core.replies import LATE
from sifu.core.request_terms import Terms
from sifu.core.spec.sections import RIDGE
from sifu.errors import InputError, RunDamagedError
from sifu.plots.style import byte_size, counted
from sifu.requests.lost_requests import lost_words, still_lost
from sifu.run.few_clients import consequences
from sifu.run.group_state import available_group_models, has_groups, members_now
from sifu.run.psi_of_everyone import track_everyone, with_earlier_names
from sifu.run.run_view import ACTIVE, RunView
from sifu.store.checkpoints import unsigned_notes
from sifu.store.client_accuracy import read_held_out
from sifu.store.inbox import INBOX, messages
from sifu.store.kept_heads import check_witnesses
from sifu.store.keys import key_problem
from sifu.store.projection import RejectionRow
from sifu.store.reader import RunReader, clients_now, plain_name, plain_names, remainder_to_join
from sifu.store.seen_heads import check_seen
from sifu.store.times import current_time
from sifu.theory.history import count_rounds
from sifu.theory.rollback import Subject

MOST_TOLD = 10
"""Largest number of refusals and incidents shown; the ledger has them all."""
FEW = 3
"""Number of entries that a list shows without `--all`."""
LATEST_ROUNDS = 200
"""Number of latest rounds with incidents over which late clients are counted."""
ClientState = Literal["active", "waiting", "forgotten"]


@dataclass(frozen=True)
class ClientStatus:
    """Current status of a client: its Psi, and the noise that would hide it at the current model."""

    name: str
    samples: int
    state: ClientState
    psi: float
    sigma_needed_now: float


@dataclass(frozen=True)
class ModelStatus:
    """A model on disk; `depth` is None if it is not on the active history."""

    node: int
    depth: int | None
    kept: bool
    bytes: int


@dataclass(frozen=True)
class GroupStatus:
    """A group that trains separately: its members, the rounds of its stored model, and whether it is finished."""

    group: int
    members: int
    rounds: int
    finished: bool


@dataclass(frozen=True)
class StoredFiles:
    """Files of the statistics of a closed-form head."""

    files: int
    bytes: int


@dataclass(frozen=True)
class BudgetStatus:
    """Budget of clients forgotten by noise: the total, the used part and the rest."""

    clients: tuple[str, ...]
    budget: float
    used: float
    left: float


@dataclass(frozen=True)
class InboxMessage:
    """A message in the inbox; `trouble` says why it cannot be opened."""

    kind: str
    id: str
    trouble: str


@dataclass(frozen=True)
class Refusal:
    """A message or a newcomer that was refused."""

    time: str
    what: str
    reason: str


@dataclass(frozen=True, repr=False)
class RunStatus:
    """Content of `sifu status`.

    `rounds` counts the rounds that led to the current model, and `rounds_run` all rounds ever run, both with separate
    rounds of groups; for a closed-form head they count solves. `psi_star` is the influence that noise of `sigma` hides,
    and `psi_status` says whether the premises of Psi are met, assumed or failed. `accuracy` (None for regression) and
    `loss` are means over the active clients' training samples. `held_out` are the figures on held-out rows, if there
    are any.
    """

    run: str
    phase: str
    rounds: int
    rounds_run: int
    branch: int
    go_on: str
    accuracy: float | None
    mean_squared_error: float | None
    loss: float | None
    target: float
    parameters: int
    model: str
    regularity: str
    local_rate: float | None
    epsilon: float
    delta: float
    sigma: float | None
    psi_star: float | None
    psi_status: Status
    clients: tuple[ClientStatus, ...]
    models: tuple[ModelStatus, ...]
    statistics: StoredFiles
    budgets: tuple[BudgetStatus, ...]
    inbox: tuple[InboxMessage, ...]
    refused: tuple[Refusal, ...]
    incidents: tuple[dict[str, Any], ...]
    late: dict[str, int]
    rejections: tuple[RejectionRow, ...]
    requests: tuple[Request, ...]
    groups: tuple[GroupStatus, ...] = ()
    held_out: HeldOutFigures | None = None
    warnings: tuple[str, ...] = ()
    """Few clients remain, requests were lost, events lack a signature, or nothing can be signed or written."""

    def __repr__(self) -> str:
        return "\n".join(islice(self.lines(), 3))

    @property
    def closed_form(self) -> bool:
        """True if the model is a head that is solved, not trained."""
        return self.model == RIDGE

    def lines(self, everything: bool = False) -> Iterator[str]:
        """Yield the status as text; `everything` includes more clients and all requests."""
        history = f", {self.rounds} of {counted(self.rounds_run, 'round')} run led to the current model"
        yield f"{self.run}: {self.phase}{'' if self.closed_form else history}"
        yield self._figures()
        if self.phase != "ready":
            yield f"The run was interrupted or is still in progress: {self.go_on} continues it."
        elif missed := missed_target_words(self.accuracy, self.target):
            yield missed
        states = Counter(client.state for client in self.clients)
        named = ", ".join(f"{states[state]} {state}" for state in get_args(ClientState) if states[state])
        kind = "a head in closed form" if self.closed_form else f"losses {self.regularity}"
        clients, parameters = counted(len(self.clients), "client"), counted(self.parameters, "parameter")
        yield f"{clients}: {named}; {self.model}, {parameters}; {kind}"
        yield from self.warnings
        if self.closed_form:
            kept = f"{counted(self.statistics.files, 'statistics file')} kept, {byte_size(self.statistics.bytes)}"
            yield f"{kept}; forgetting a client means solving the head again"
        else:
            sizes = [model.bytes for model in self.models if model.kept]
            yield f"{counted(len(sizes), 'model')} kept for rollbacks, {byte_size(sum(sizes))}"
        if self.groups:
            yield "; ".join(self._groups())
        if self.sigma and self.psi_star:
            yield f"Noise of standard deviation {self.sigma:.4g} hides an influence of up to Psi* = {self.psi_star:.4g}"
        if not self.closed_form:  # Psi is not defined for a head in closed form
            yield from self._influence(MOST_TOLD if everything else FEW)
        yield from self._troubles()
        if self.requests:
            hidden = [] if everything else [request for request in self.requests if request.settled][:-FEW]
            yield "\nRequests"
            yield from (line for request in self.requests if request not in hidden for line in request.brief())
            if hidden:
                yield f"{len(hidden)} earlier ones: sifu status --all"
        left = [line.left / line.budget for line in self.budgets if line.budget > 0 and line.used > 0]
        if left and not self.closed_form:
            yield f"\nBudget left of those forgotten with noise ({len(left)}): {min(left):.0%} to {max(left):.0%}"

    def _figures(self) -> str:
        """Return the measured figures with the rows that they were measured on."""
        figures = [] if self.held_out is None else [self.held_out.words]
        if self.mean_squared_error is not None:
            figures.insert(0, f"Mean squared error {self.mean_squared_error:.4g} {TRAINING_DATA}")
        elif self.accuracy is not None:
            figures.insert(0, f"Accuracy {100 * self.accuracy:.1f} % {TRAINING_DATA}")
        return "; ".join(figures) or f"Accuracy or error: not measured; sifu evaluate {self.run} measures it."

    def _groups(self) -> Iterator[str]:
        """Yield what groups can be used for, and which are unfinished or empty."""
        unfinished = [group for group in self.groups if not group.finished]
        use = f"have a finished model that a request can {'use' if self.closed_form else 'merge'}"
        yield f"{len(self.groups)} groups: {len(self.groups) - len(unfinished)} {use}"
        for group in unfinished:
            if group.members:
                yield f"group {group.group} has {group.rounds} of its rounds and {group.members} members"
        if empty := sum(not group.members for group in unfinished):
            yield f"{empty} without members"

    def _influence(self, most: int) -> Iterator[str]:
        """Yield the active clients with the largest Psi."""
        active = sorted((client for client in self.clients if client.state == "active"), key=lambda client: -client.psi)
        if self.groups and active and math.isinf(active[0].psi):
            yield "Influence through a merge is unbounded: no noise can hide it, and method groups needs none."
            return
        heads = ("client", "samples", "Psi", "sigma needed now")
        rows = [
            (client.name, str(client.samples), f"{client.psi:.4g}", f"{client.sigma_needed_now:.4g}")
            for client in active[:most]
        ]
        yield "\nMost influential active clients"
        yield from aligned([heads, *rows], right=[1, 2, 3])
        yield (
            f"{psi_words(self.psi_status)}. Sigma needed now is the noise that hides it for ({self.epsilon:g}, "
            f"{self.delta:g}) without undoing a round; less noise requires a rollback."
        )

    def _troubles(self) -> Iterator[str]:
        """Yield refusals, late clients, incidents, and messages that wait."""
        if self.rejections:
            yield f"\n{len(self.rejections)} replies of clients were refused; the latest ones:"
            for row in self.rejections[-FEW:]:
                yield f"  round {row.round} of branch {row.branch}: {row.client}, {row.reason}"
        if self.refused:
            yield "\nLatest refusals:"
            yield from (f"  {refusal.time} {refusal.what}: {refusal.reason}" for refusal in self.refused[-FEW:])
        if self.late:
            named = ", ".join(f"{name} ({count})" for name, count in list(self.late.items())[:MOST_TOLD])
            yield f"\nToo late in some of the latest rounds: {named}. See server.wait, or sifu clients block."
        if self.incidents:
            yield "\nLatest incidents:"
        for incident in self.incidents[-FEW:]:
            # An incident of an evaluation has no round; one of a whole round has no client.
            placed = incident["round"] or incident["branch"]
            where = f"round {incident['round']} of branch {incident['branch']}, " if placed else ""
            yield f"  {incident['time']} {where}{incident['client'] or 'all'}: {incident['what']}"
        if self.inbox:
            named = names_words([f"{message.kind} {message.id}" for message in self.inbox], MOST_TOLD)
            yield (
                f"\n{len(self.inbox)} in the inbox: {named}. The process that trains ingests them; if none is "
                "running, the next sifu forget or sifu request does."
            )
        for message in self.inbox:
            if message.trouble:
                yield (
                    f"{message.kind} {message.id} cannot be opened ({message.trouble}): it waits in "
                    f"{Path(self.run, INBOX)} until the account that trains may read it."
                )

    def to_mapping(self) -> dict[str, Any]:
        """Return the status as values for JSON; an unbounded Psi becomes the string "inf"."""
        values = asdict(self) | {"requests": [request.to_mapping() for request in self.requests]}
        for client in values["clients"]:
            client.update({key: finite_or_text(client[key]) for key in ("psi", "sigma_needed_now")})
        return values


def status_of(view: RunView) -> RunStatus:
    """Return the status of a run at this instant."""
    reader = view.reader
    privacy = view.spec.privacy
    terms = Terms(("any",), privacy.epsilon, privacy.delta)
    multiplier = terms.multiplier
    psi = with_earlier_names(view, track_everyone(view).total(np.arange(len(view.clients))), view.path.tip).tolist()
    evaluated = (row for row in reader.evaluations() if row.node == reader.tip and row.subset == ACTIVE)
    current = next(evaluated, None)
    noises = [view.path.nodes[depth].noise_std for depth, _ in view.path.noise_depths]
    last_noise = next((noise_std for noise_std in reversed(noises) if 0.0 < noise_std < math.inf), None)
    # A head in closed form takes no noise at a request.
    sigma = None if view.regime.solves else privacy.sigma if privacy.sigma != "auto" else last_noise
    statistics, incidents = reader.statistics(), _incidents(reader)
    measured = view.regularity
    return RunStatus(
        run=str(reader.folder),
        phase=reader.phase,
        rounds=view.rounds_until(view.path.tip),
        rounds_run=count_rounds(reader.nodes()),
        branch=view.path.nodes[-1].branch,
        go_on=way_to_go_on(view.spec, reader.phase),
        accuracy=current.accuracy if current and view.spec.regime.has_accuracy else None,
        mean_squared_error=view.spec.regime.squared_error(current.loss if current else None),
        loss=current.loss if current else None,
        target=view.spec.stop.target,
        parameters=reader.layout.size,
        model=view.spec.model.kind,
        regularity=measured.kind,
        local_rate=view.facts.local_rate,
        epsilon=privacy.epsilon,
        delta=privacy.delta,
        sigma=sigma,
        psi_star=sigma / multiplier if sigma else None,
        psi_status=psi_status(view.facts, measured, max(filter(math.isfinite, psi), default=0.0)),
        clients=tuple(
            ClientStatus(plain_name(reader, k), view.clients[k].samples, _state(view, k), psi[k], psi[k] * multiplier)
            for k in clients_now(reader)
        ),
        models=tuple(
            ModelStatus(node, view.path.depth_of.get(node), row.kept, row.bytes)
            for node, row in reader.models().items()
        ),
        statistics=StoredFiles(len(statistics), sum(row.bytes for row in statistics.values())),
        budgets=tuple(_budget_of(view, subject) for subject in view.earlier_subjects()),
        inbox=tuple(InboxMessage(message.kind, message.id, message.trouble) for message in messages(reader.folder)),
        refused=_refusals(reader),
        incidents=tuple(incidents[-MOST_TOLD:]),
        late=_late(incidents),
        rejections=tuple(reader.rejections()),
        requests=tuple(requests_of(reader, view.requests, current_time())),
        groups=groups_of(view),
        held_out=read_held_out(reader.folder, reader.tip),
        warnings=tuple(_warnings(view)),
    )


def _warnings(view: RunView) -> Iterator[str]:
    """Yield what keeps a run from being used as it is, or will."""
    reader = view.reader
    yield from consequences(view, view.active)
    yield from map(lost_words, still_lost(reader))
    yield from unsigned_notes(reader)
    if problem := key_problem(reader.folder, reader.value("public_key")):
        yield problem
    try:
        check_seen(reader, writing=True)
        check_witnesses(reader)
    except (InputError, RunDamagedError) as error:
        yield f"nothing can be written to this run: {error}"


def _budget_of(view: RunView, subject: Subject) -> BudgetStatus:
    """Return the budget of a subject forgotten earlier."""
    names = plain_names(view.reader, (view.clients[index].name for index in subject.clients))
    return BudgetStatus(names, subject.budget, subject.used, subject.left)


def groups_of(view: RunView) -> tuple[GroupStatus, ...]:
    """Return the status of each group, or an empty tuple if the run has none."""
    if not has_groups(view):
        return ()
    models, wanted = available_group_models(view.reader), view.spec.groups.rounds
    rounds = {group: row.rounds for group, row in models.items()}
    return tuple(
        GroupStatus(group, len(members), rounds.get(group, 0), rounds.get(group, 0) == wanted)
        for group, members in enumerate(members_now(view))
    )


def _state(view: RunView, client: int) -> ClientState:
    between = remainder_to_join(view.reader)
    if client in view.left_out or (between is not None and between.before == client):
        return "waiting"
    return "forgotten" if client in view.forgotten else "active"


def _refusals(reader: RunReader) -> tuple[Refusal, ...]:
    """Return the latest messages and newcomers that were refused, each with the reason."""
    events = reader.latest_events(("letter refused", "client refused"), MOST_TOLD)
    return tuple(
        Refusal(
            time,
            f"{content['kind']} {content['letter']}" if kind == "letter refused" else f"client {content['client']}",
            str(content["reason"]),
        )
        for time, kind, content in events
    )


def _incidents(reader: RunReader) -> list[dict[str, Any]]:
    """Return the latest incidents in rounds on Flower."""
    events = reader.latest_events(("incidents",), LATEST_ROUNDS)
    return [{"time": time} | incident for time, _, content in events for incident in content["incidents"]]


def _late(incidents: list[dict[str, Any]]) -> dict[str, int]:
    """Return the number of rounds in which each client was late, largest first."""
    rounds: dict[str, set[tuple[int, int]]] = {}
    for incident in incidents:
        if incident["what"].startswith(LATE):
            rounds.setdefault(incident["client"], set()).add((incident["branch"], incident["round"]))
    return {name: len(missed) for name, missed in sorted(rounds.items(), key=lambda item: (-len(item[1]), item[0]))}
