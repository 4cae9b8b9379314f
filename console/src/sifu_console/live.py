"""The current state of a run for live pages: a few rows that name no client."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sifu.api.requests import pending_requests
from sifu.core.held_out_figures import HeldOutFigures
from sifu.core.spec import Spec, StopSpec
from sifu.requests.certification import payload_of_request
from sifu.run.run_view import ACTIVE
from sifu.run.training import expected_rounds
from sifu.store.client_accuracy import read_held_out
from sifu.store.files import is_locked
from sifu.store.projection import RequestRow
from sifu.store.reader import RunReader, joined_remainders
from sifu.store.seen_heads import check_seen
from sifu.store.times import current_time
from sifu.theory.history import count_rounds

MOST_POINTS = 60
"""Maximum number of points of a curve; a longer curve is thinned."""
COUNTED_UP_TO = 2000
"""Maximum number of clients for which a round's participants are counted; counting reads rows of every client."""
FRESH_FOR = 0.9
"""Seconds for which the state of a run in progress stays valid, unless its inbox changes."""


Point = tuple[int, float | None, float, int | None]


@dataclass(frozen=True)
class Live:
    """The current state of a run: its progress, and the requests that wait.

    `rounds` counts the rounds of the current work (training, or retraining for `request`); `limit` and `target` are its
    stop rule, and `expected` is the predicted number of rounds (None without a prediction). `rounds_run` counts all
    rounds of the run. A point of `curve` is a round with its accuracy (None for regression), its loss, and its number
    of participants. `seconds_left` is an estimate from the curve and the speed of the last minute. `last_step` is the
    number of the latest event of any request. `accuracy` is measured on the active clients' training data, `held_out`
    on held-out rows; for regression, `mean_squared_error` replaces `accuracy`. During training, these figures and
    `participants` belong to the last point of `curve`, otherwise to the current model. They are None if they were not
    measured.
    """

    phase: str
    at_work: bool
    request: str | None
    rounds: int
    limit: int
    expected: int | None
    target: float
    accuracy: float | None
    curve: tuple[Point, ...]
    participants: int | None
    clients: int
    forgotten: int
    rounds_run: int
    seconds_left: float | None
    events: int
    last_step: int
    waiting: int
    overdue: int
    held_out: HeldOutFigures | None = None
    mean_squared_error: float | None = None


class LiveView:
    """Reader of a run's current state; it reads again only after a change, and measures the speed of the rounds.

    A run in progress changes all the time, so all visitors within the same second share one read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._state: tuple[Any, Any, Live] | None = None
        self._looked = -FRESH_FOR
        self._seen: deque[tuple[float, int, int]] = deque(maxlen=120)

    def read(self) -> Live:
        """Return the current state of the run."""
        at_work = is_locked(self.folder)
        today = current_time().date()
        inbox = tuple(sorted(entry.name for entry in (self.folder / "inbox").glob("*.json")))
        around = (at_work, today, inbox)
        now = time.monotonic()
        if self._state is not None and self._state[0] == around and at_work and now - self._looked < FRESH_FOR:
            return self._state[2]
        with RunReader(self.folder) as reader, reader.snapshot():
            check_seen(reader)
            head = reader.value("head")
            if self._state is None or self._state[:2] != (around, head):
                self._state = (around, head, self._read(reader, at_work))
        self._looked = now
        return self._state[2]

    def look_again(self) -> None:
        """Make the next call of `read` read the run again, because this console wrote to it."""
        self._looked = -FRESH_FOR

    def _read(self, reader: RunReader, at_work: bool) -> Live:
        spec = Spec.from_mapping(reader.spec)
        tip = reader.tip
        ((branch, position),) = reader.query("SELECT branch, position FROM nodes WHERE node = ?", (tip,))
        separate = spec.groups.count and reader.phase == "training" and position == 0
        if separate:
            ((position,),) = reader.query("SELECT COALESCE(MAX(position), 0) FROM nodes WHERE kind = 'group'")
        requests = reader.requests()
        running = next((row for row in requests if row.status == "running"), None)
        seq, _ = reader.last_event()
        ((clients,),) = reader.query("SELECT COUNT(*) FROM clients")
        evaluations = reader.query(
            "SELECT n.node, n.position, e.accuracy, e.loss FROM evaluations e JOIN nodes n ON n.node = e.node "
            "WHERE e.subset = ? AND n.branch = ? AND n.kind != 'group' ORDER BY n.node",
            (ACTIVE, branch),
        )
        curve = _curve(reader, evaluations, spec.regime.has_accuracy, int(clients) <= COUNTED_UP_TO)
        seen = [(int(at), float(accuracy)) for _, at, accuracy, _ in evaluations] if spec.regime.has_accuracy else []
        expected = _expected(reader, running, int(position), seen, spec.stop)
        # A client that rejoined is counted under both indices.
        again = len(joined_remainders(reader))
        pending = pending_requests(reader, current_time())
        is_current = bool(curve) and (evaluations[-1][0] == tip or reader.phase != "ready")
        measured = curve[-1] if is_current else None
        ((step,),) = reader.query("SELECT COALESCE(MAX(seq), 0) FROM events WHERE kind LIKE 'request %'")
        return Live(
            phase=reader.phase,
            at_work=at_work,
            request=running.request if running else None,
            rounds=int(position),
            limit=spec.stop.max_rounds,
            expected=expected,
            target=spec.stop.target,
            accuracy=measured[1] if measured else None,
            curve=curve,
            participants=measured[3] if measured else None,
            clients=int(clients) - again,
            forgotten=len({client for subject in reader.subjects() for client in subject.clients}) - again,
            rounds_run=count_rounds(reader.nodes()),
            seconds_left=self._seconds_left(int(branch), int(position), expected) if at_work else None,
            events=seq,
            last_step=int(step),
            waiting=len(pending),
            overdue=sum(request.overdue for request in pending),
            held_out=read_held_out(reader.folder, tip),
            mean_squared_error=spec.regime.squared_error(measured[2] if measured else None),
        )

    def _seconds_left(self, branch: int, rounds: int, expected: int | None) -> float | None:
        """Estimate the remaining seconds from the rounds of the last minute that belong to the current work."""
        now = time.monotonic()
        if self._seen and (self._seen[-1][1] != branch or self._seen[-1][2] > rounds):
            self._seen.clear()
        self._seen.append((now, branch, rounds))
        while now - self._seen[0][0] > 60.0:
            self._seen.popleft()
        then, _, before = self._seen[0]
        if expected is None or rounds <= before or now - then < 1.0:
            return None
        return max(0, expected - rounds) * (now - then) / (rounds - before)


def _expected(
    reader: RunReader, running: RequestRow | None, rounds: int, seen: list[tuple[int, float]], stop: StopSpec
) -> int | None:
    """Return the expected number of rounds of the current work, or None if it cannot be predicted.

    Without a target the number is fixed. Otherwise it is predicted from the learning curve or from the plan.
    """
    if stop.target <= 0:
        return stop.max_rounds
    by_curve = expected_rounds(seen, rounds, stop.target, stop.max_rounds)
    if by_curve < stop.max_rounds or running is None:
        return by_curve if by_curve < stop.max_rounds else None
    ways = (payload_of_request(reader, running.request, "rolled back").get("auto") or {}).get("ways", [])
    planned = next((way["rounds"] for way in ways if way["method"] == running.method), None)
    return None if planned is None else max(rounds + 1, math.ceil(planned))


def _curve(reader: RunReader, evaluations: list[Any], accuracies: bool, counted: bool) -> tuple[Point, ...]:
    """Return at most `MOST_POINTS` evenly spaced points, including the last one."""
    step = max(1, -(-len(evaluations) // MOST_POINTS))
    rows = evaluations[::-1][::step][::-1]
    count: dict[int, int] = {}
    if rows and counted:  # the table is ordered by client
        nodes = ", ".join(str(int(node)) for node, *_ in rows)
        count = dict(
            reader.query(
                "SELECT p.node, COUNT(*) FROM clients c CROSS JOIN participation p ON p.client = c.client "
                f"AND p.node IN ({nodes}) GROUP BY p.node"
            )
        )
    return tuple(
        (int(at), float(accuracy) if accuracies else None, float(loss), count.get(node))
        for node, at, accuracy, loss in rows
    )
