"""What a run does at this moment, cheap enough to be asked every second: a few rows, and nothing of any client."""

from __future__ import annotations

import datetime
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sifu.core.spec import Spec, StopSpec
from sifu.record.evaluations import ACTIVE
from sifu.record.progress import expected_rounds
from sifu.requests.deadlines import pending_requests
from sifu.store.lock import is_locked
from sifu.store.reader import RunReader

MOST_POINTS = 120
"""Points of the curve that are sent; a longer one is thinned."""
COUNTED_UP_TO = 5000
"""With more clients, participants of a round are not counted: the table is ordered by client."""


@dataclass(frozen=True)
class Live:
    """A run now: how far it is with what, and what waits.

    `rounds` are those of the work at hand (training, or the retraining of `request`), `limit` and `target` its stop
    rule. `seconds_left` is a guess from the curve and the speed of the last minute, `last_step` the latest
    event in the life of a request.
    """

    phase: str
    at_work: bool
    request: str | None
    rounds: int
    limit: int
    target: float
    accuracy: float | None
    curve: tuple[tuple[int, float], ...]
    participants: int | None
    clients: int
    seconds_left: float | None
    events: int
    last_event: str
    last_step: int
    waiting: int
    overdue: int

    def to_mapping(self) -> dict[str, Any]:
        """As plain values, ready for JSON."""
        return asdict(self)


class LiveView:
    """Reads a run again only when something was written to it, and remembers how fast its rounds come."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._state: tuple[Any, Live] | None = None
        self._seen: deque[tuple[float, int, int]] = deque(maxlen=120)

    def read(self) -> Live:
        """The run now."""
        at_work = is_locked(self.folder)
        today = datetime.datetime.now(datetime.UTC).date()
        with RunReader(self.folder) as reader, reader.snapshot():
            inbox = [entry.name for entry in (self.folder / "inbox").glob("*.json")]
            state = (reader.value("head"), at_work, today, tuple(sorted(inbox)))
            if self._state is None or self._state[0] != state:
                self._state = (state, self._read(reader, at_work))
        return self._state[1]

    def _read(self, reader: RunReader, at_work: bool) -> Live:
        spec = Spec.from_mapping(reader.spec)
        tip = reader.tip
        ((branch, position),) = reader.query("SELECT branch, position FROM nodes WHERE node = ?", (tip,))
        apart = spec.groups.count and reader.phase == "training" and position == 0
        if apart:
            ((position,),) = reader.query("SELECT COALESCE(MAX(position), 0) FROM nodes WHERE kind = 'group'")
        running = next((row for row in reader.requests() if row.status == "running"), None)
        stop = running.terms.stop(spec.stop) if running else spec.stop
        curve = reader.query(
            "SELECT n.position, e.accuracy FROM evaluations e JOIN nodes n ON n.node = e.node "
            "WHERE e.subset = ? AND n.branch = ? AND n.kind != 'group' ORDER BY n.node",
            (ACTIVE, branch),
        )
        points = [(int(at), float(accuracy)) for at, accuracy in curve]
        ((clients,),) = reader.query("SELECT COUNT(*) FROM clients")
        pending = pending_requests(reader, datetime.datetime.now(datetime.UTC))
        seq, _ = reader.last_event()
        ((step,),) = reader.query("SELECT COALESCE(MAX(seq), 0) FROM events WHERE kind LIKE 'request %'")
        ((last,),) = reader.query("SELECT time FROM events WHERE seq = ?", (seq,))
        return Live(
            phase=reader.phase,
            at_work=at_work,
            request=running.request if running else None,
            rounds=int(position),
            limit=stop.max_rounds,
            target=stop.target,
            accuracy=points[-1][1] if points else None,
            curve=tuple(_thinned(points)),
            participants=self._participants(reader, tip, int(clients)),
            clients=int(clients),
            seconds_left=self._seconds_left(int(branch), int(position), points, stop) if at_work else None,
            events=seq,
            last_event=str(last),
            last_step=int(step),
            waiting=len(pending),
            overdue=sum(request.overdue for request in pending),
        )

    def _participants(self, reader: RunReader, node: int, clients: int) -> int | None:
        if clients > COUNTED_UP_TO:
            return None
        ((count,),) = reader.query(
            "SELECT COUNT(*) FROM clients c WHERE EXISTS "
            "(SELECT 1 FROM participation p WHERE p.client = c.client AND p.node = ?)",
            (node,),
        )
        return int(count)

    def _seconds_left(self, branch: int, rounds: int, points: list[tuple[int, float]], stop: StopSpec) -> float | None:
        """From the rounds seen over the last minute, if they are of the work at hand."""
        now = time.monotonic()
        if self._seen and (self._seen[-1][1] != branch or self._seen[-1][2] > rounds):
            self._seen.clear()
        self._seen.append((now, branch, rounds))
        while now - self._seen[0][0] > 60.0:
            self._seen.popleft()
        then, _, before = self._seen[0]
        if rounds <= before or now - then < 1.0:
            return None
        expected = expected_rounds(points, rounds, stop.target, stop.max_rounds)
        return max(0, expected - rounds) * (now - then) / (rounds - before)


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Evenly spaced points, the last one among them."""
    step = max(1, -(-len(points) // MOST_POINTS))
    return points[::-1][::step][::-1]
