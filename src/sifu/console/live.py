"""What a run does at this moment, cheap enough to be asked every second: a few rows, and nothing of any client."""

from __future__ import annotations

import datetime
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sifu.core.held_out import HeldOutFigures
from sifu.core.spec import Spec, StopSpec
from sifu.record.run_view import ACTIVE
from sifu.record.training import expected_rounds
from sifu.requests.deadlines import pending_requests
from sifu.store.client_accuracy import read_held_out
from sifu.store.known_keys import check_known_key
from sifu.store.lock import is_locked
from sifu.store.reader import RunReader

MOST_POINTS = 120
"""Points of the curve that are sent; a longer one is thinned."""
COUNTED_UP_TO = 5000
"""With more clients, participants of a round are not counted: the table is ordered by client."""
FRESH_FOR = 0.9
"""Seconds for which what was read of a run at work is good enough, unless its inbox changed."""


@dataclass(frozen=True)
class Live:
    """A run now: how far it is with what, and what waits.

    `rounds` are those of the work at hand (training, or the retraining of `request`), `limit` and `target` its stop
    rule, `rounds_run` all that the run ever did. `seconds_left` is a guess from the curve and the speed of the last
    minute, `last_step` the latest event in the life of a request. `accuracy` is on the active clients' training data,
    `held_out` on held-out rows.
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
    forgotten: int
    rounds_run: int
    seconds_left: float | None
    events: int
    last_event: str
    last_step: int
    waiting: int
    overdue: int
    held_out: HeldOutFigures | None = None

    def to_mapping(self) -> dict[str, Any]:
        """As plain values, ready for JSON."""
        return asdict(self)


@dataclass
class _ReadSoFar:
    """What is read once: history only grows, so each look reads what came since the last one."""

    run: str = ""
    branch: int = -1
    points: list[tuple[int, float]] = field(default_factory=list)
    last_point: int = -1
    last_node: int = -1
    rounds_run: int = 0
    last_event: int = 0
    last_step: int = 0


class LiveView:
    """Reads a run again only when something was written to it, and remembers how fast its rounds come.

    A run at work writes all the time: then a look is shared by everybody who asks within the same second.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._state: tuple[Any, Any, Live] | None = None
        self._looked = -FRESH_FOR
        self._so_far = _ReadSoFar()
        self._seen: deque[tuple[float, int, int]] = deque(maxlen=120)

    def read(self) -> Live:
        """The run now."""
        at_work = is_locked(self.folder)
        today = datetime.datetime.now(datetime.UTC).date()
        inbox = tuple(sorted(entry.name for entry in (self.folder / "inbox").glob("*.json")))
        around = (at_work, today, inbox)
        now = time.monotonic()
        if self._state is not None and self._state[0] == around and at_work and now - self._looked < FRESH_FOR:
            return self._state[2]
        with RunReader(self.folder) as reader, reader.snapshot():
            check_known_key(reader)
            head = reader.value("head")
            if self._state is None or self._state[:2] != (around, head):
                self._state = (around, head, self._read(reader, at_work))
        self._looked = now
        return self._state[2]

    def look_again(self) -> None:
        """Read the run at the next look, however fresh the last one is: we wrote to it."""
        self._looked = -FRESH_FOR

    def _read(self, reader: RunReader, at_work: bool) -> Live:
        spec = Spec.from_mapping(reader.spec)
        tip = reader.tip
        ((branch, position),) = reader.query("SELECT branch, position FROM nodes WHERE node = ?", (tip,))
        apart = spec.groups.count and reader.phase == "training" and position == 0
        if apart:
            ((position,),) = reader.query("SELECT COALESCE(MAX(position), 0) FROM nodes WHERE kind = 'group'")
        requests = reader.requests()
        running = next((row for row in requests if row.status == "running"), None)
        stop = running.terms.stop(spec.stop) if running else spec.stop
        seq, _ = reader.last_event()
        so_far = self._read_on(reader, int(branch), seq)
        ((clients,),) = reader.query("SELECT COUNT(*) FROM clients")
        pending = pending_requests(reader, datetime.datetime.now(datetime.UTC))
        ((last,),) = reader.query("SELECT time FROM events WHERE seq = ?", (seq,))
        return Live(
            phase=reader.phase,
            at_work=at_work,
            request=running.request if running else None,
            rounds=int(position),
            limit=stop.max_rounds,
            target=stop.target,
            accuracy=so_far.points[-1][1] if so_far.points else None,
            curve=tuple(_thinned(so_far.points)),
            participants=self._participants(reader, tip, int(clients)),
            clients=int(clients),
            forgotten=len({client for subject in reader.subjects() for client in subject.clients}),
            rounds_run=so_far.rounds_run,
            seconds_left=self._seconds_left(int(branch), int(position), so_far.points, stop) if at_work else None,
            events=seq,
            last_event=str(last),
            last_step=so_far.last_step,
            waiting=len(pending),
            overdue=sum(request.overdue for request in pending),
            held_out=read_held_out(reader.folder, tip),
        )

    def _read_on(self, reader: RunReader, branch: int, seq: int) -> _ReadSoFar:
        """What came since the last look; everything where the folder holds another run or an older copy."""
        run, so_far = reader.value("run"), self._so_far
        if run != so_far.run or seq < so_far.last_event:
            so_far = self._so_far = _ReadSoFar(run)
        if branch != so_far.branch:
            so_far.branch, so_far.points, so_far.last_point = branch, [], -1
        rows = reader.query(
            "SELECT n.node, n.position, e.accuracy FROM evaluations e JOIN nodes n ON n.node = e.node "
            "WHERE e.node > ? AND e.subset = ? AND n.branch = ? AND n.kind != 'group' ORDER BY n.node",
            (so_far.last_point, ACTIVE, branch),
        )
        so_far.points += [(int(at), float(accuracy)) for _, at, accuracy in rows]
        so_far.last_point = int(rows[-1][0]) if rows else so_far.last_point
        ((rounds, node),) = reader.query(
            "SELECT COUNT(CASE WHEN kind = 'round' THEN 1 END), MAX(node) FROM nodes WHERE node > ?",
            (so_far.last_node,),
        )
        so_far.rounds_run, so_far.last_node = so_far.rounds_run + int(rounds), int(node or so_far.last_node)
        ((step,),) = reader.query(
            "SELECT MAX(seq) FROM events WHERE seq > ? AND kind LIKE 'request %'", (so_far.last_event,)
        )
        so_far.last_step, so_far.last_event = int(step or so_far.last_step), seq
        return so_far

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
