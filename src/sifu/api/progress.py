"""Progress of a run's current work, read from few rows of its record, for pages that look again every few seconds."""

from __future__ import annotations

from dataclasses import dataclass

from sifu.api.requests import pending_requests
from sifu.core.held_out_figures import HeldOutFigures
from sifu.core.spec import Spec
from sifu.run.run_view import ACTIVE
from sifu.store.client_accuracy import read_held_out
from sifu.store.files import is_locked
from sifu.store.reader import RunReader, joined_remainders
from sifu.store.times import current_time
from sifu.theory.history import count_rounds

MOST_POINTS = 60
"""Maximum number of points of a curve; a longer curve is thinned."""
Point = tuple[int, float | None, float]


@dataclass(frozen=True)
class Progress:
    """Progress of a run's current work, and the requests that wait; it names no client.

    `at_work` tells whether a process writes to the run. `rounds` counts the rounds of the current work (training,
    or retraining for `request`); `limit` and `target` are its stop rule. `rounds_run` counts all rounds of the run.
    A point of `curve` is a round with its accuracy (None for regression) and its loss. `accuracy` is measured on
    the active clients' training data, `held_out` on held-out rows; for regression, `mean_squared_error` replaces
    `accuracy`. During training, these figures belong to the last point of `curve`, otherwise to the current model.
    They are None if they were not measured.
    """

    phase: str
    at_work: bool
    request: str | None
    rounds: int
    limit: int
    target: float
    accuracy: float | None
    mean_squared_error: float | None
    held_out: HeldOutFigures | None
    curve: tuple[Point, ...]
    clients: int
    forgotten: int
    rounds_run: int
    events: int
    waiting: int
    overdue: int


def progress_of(reader: RunReader) -> Progress:
    """Return the progress of a run at this instant."""
    spec, tip, requests = Spec.from_mapping(reader.spec), reader.tip, reader.requests()
    ((branch, position),) = reader.query("SELECT branch, position FROM nodes WHERE node = ?", (tip,))
    if spec.groups.count and reader.phase == "training" and position == 0:  # groups still train separately
        ((position,),) = reader.query("SELECT COALESCE(MAX(position), 0) FROM nodes WHERE kind = 'group'")
    running = next((row for row in requests if row.status == "running"), None)
    evaluations = reader.query(
        "SELECT n.node, n.position, e.accuracy, e.loss FROM evaluations e JOIN nodes n ON n.node = e.node "
        "WHERE e.subset = ? AND n.branch = ? AND n.kind != 'group' ORDER BY n.node",
        (ACTIVE, branch),
    )
    classifies = spec.regime.has_accuracy
    points: list[Point] = [
        (int(at), float(accuracy) if classifies else None, float(loss)) for _, at, accuracy, loss in evaluations
    ]
    is_current = bool(points) and (evaluations[-1][0] == tip or reader.phase != "ready")
    _, accuracy, loss = points[-1] if is_current else (0, None, None)
    again = len(joined_remainders(reader))  # a client that rejoined is counted under both indices
    pending = pending_requests(reader, current_time())
    ((clients,),) = reader.query("SELECT COUNT(*) FROM clients")
    return Progress(
        phase=reader.phase,
        at_work=is_locked(reader.folder),
        request=running.request if running else None,
        rounds=int(position),
        limit=spec.stop.max_rounds,
        target=spec.stop.target,
        accuracy=accuracy,
        mean_squared_error=spec.regime.squared_error(loss),
        held_out=read_held_out(reader.folder, tip),
        curve=tuple(points[:: -max(1, -(-len(points) // MOST_POINTS))][::-1]),
        clients=int(clients) - again,
        forgotten=len({client for subject in reader.subjects() for client in subject.clients}) - again,
        rounds_run=count_rounds(reader.nodes()),
        events=reader.last_event()[0],
        waiting=len(pending),
        overdue=sum(request.overdue for request in pending),
    )
