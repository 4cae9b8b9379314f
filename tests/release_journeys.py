"""Random journeys of a closed-form head; every release is compared with a fresh run of the clients that it should
contain.

Requests for clients and records are filed, approved, refused, withdrawn and executed in any order; clients join, and
the run is purged, or backed up and restored. A few sets determine the content of a release: everyone who joined,
without the forgotten, without clients that an approved request names, and without records whose request was approved.
The head must equal that of a fresh run on exactly these data, to the last bit.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import sifu
from sifu.data import ClientData
from sifu.errors import SifuError

APPROVALS = ("none", "one")
SPEC: dict[str, Any] = {
    "data": {"preprocessing": "fixed"},
    "model": {"kind": "ridge", "outputs": 3},
    "features": {"norm": 8.0},
    "ridge": {"regularisation": 0.01},
}


@dataclass
class Pending:
    """Request that waits."""

    client: str
    rows: frozenset[int]
    approved: bool


@dataclass
class ReleaseJourney:
    """Run, and the sets that determine who should be in its releases."""

    folder: Path
    dice: random.Random
    everyone: list[ClientData]
    spec: dict[str, Any]
    joined: int
    gone: set[str] = field(default_factory=set)
    removed: dict[str, set[int]] = field(default_factory=dict)
    pending: dict[str, Pending] = field(default_factory=dict)
    filed: int = 0
    decided: int = 0
    compared: int = 0

    @property
    def run(self) -> sifu.Run:
        """Run opened with all clients that have joined."""
        return sifu.open_run(self.folder, clients=self.everyone[: self.joined])

    def free(self) -> list[ClientData]:
        """Return the clients without a request."""
        named = self.gone | {request.client for request in self.pending.values()}
        return [client for client in self.everyone[: self.joined] if client.name not in named]

    def should_be_in(self) -> list[ClientData]:
        """Return the clients that should be in the next release, each with its remaining rows."""
        out = self.gone | {row.client for row in self.pending.values() if row.approved and not row.rows}
        left = []
        for client in self.everyone[: self.joined]:
            if client.name not in out:
                stays = np.setdiff1d(np.arange(client.samples), sorted(self.removed.get(client.name, ())))
                left.append(ClientData(client.name, client.x[stays], client.y[stays]))
        return left

    def executed(self, request: str) -> None:
        """Move an executed request from the pending ones into the sets."""
        done = self.pending.pop(request)
        if done.rows:
            self.removed.setdefault(done.client, set()).update(done.rows)
        else:
            self.gone.add(done.client)

    def settle_records(self) -> None:
        """Record that approved requests for records were executed before a release."""
        for request in [name for name, row in self.pending.items() if row.rows and row.approved]:
            self.executed(request)

    def compare(self) -> None:
        """Compare the released head with the head of a fresh run."""
        fresh = sifu.train(self.spec, run=self.folder.with_name(f"fresh{self.compared}"), clients=self.should_be_in())
        self.compared += 1
        if head_of(self.run) != head_of(fresh):
            names = [client.name for client in self.should_be_in()]
            raise AssertionError(f"the release differs from a fresh run of {names}; pending: {self.pending}")


def head_of(run: sifu.Run) -> bytes:
    """Return the released model, bit for bit."""
    with run.reader() as reader:
        return bytes(reader.load_model(reader.tip).tobytes())


def start(seed: int, folder: Path) -> ReleaseJourney:
    """Train the run of a journey."""
    dice, generator = random.Random(f"releases {seed}"), np.random.default_rng(seed)
    everyone = []
    for number in range(12):
        y = generator.integers(0, 3, int(generator.integers(4, 9)))
        everyone.append(ClientData(f"c{number}", generator.normal(size=(y.size, 4)) + np.eye(4)[y], y))
    spec = SPEC | {
        "requests": {"approval": dice.choice(APPROVALS)},
        "keep": {"statistics": dice.choice(["clients", "sum"])},
    }
    sifu.train(spec, run=folder / "run", clients=everyone[:8])
    return ReleaseJourney(folder / "run", dice, everyone, spec, 8)


def file_request(journey: ReleaseJourney) -> None:
    """File a request for a client or for some of its records."""
    free = journey.free()
    if len(free) < 4:
        return
    client, dice = journey.dice.choice(free), journey.dice
    left = sorted(set(range(client.samples)) - journey.removed.get(client.name, set()))
    rows = dice.sample(left, dice.randint(1, len(left) - 1)) if dice.random() < 0.5 and len(left) > 1 else []
    name = f"r{journey.filed}"
    try:
        journey.run.request([client.name], name, actor="Zoe", **({"records": rows} if rows else {}))
    except SifuError:
        return
    journey.filed += 1
    journey.pending[name] = Pending(client.name, frozenset(rows), journey.spec["requests"]["approval"] == "none")


def approve(journey: ReleaseJourney) -> None:
    """Approve one of the unapproved requests."""
    lacking = sorted(name for name, row in journey.pending.items() if not row.approved)
    if lacking:
        name = journey.dice.choice(lacking)
        journey.run.decide(name, "approved", actor="Ann")
        journey.pending[name].approved = True


def settle(journey: ReleaseJourney) -> None:
    """Refuse or withdraw a request, approved or not."""
    if journey.pending:
        name = journey.dice.choice(sorted(journey.pending))
        journey.run.decide(name, journey.dice.choice(["refused", "withdrawn"]), "no", actor="Bob")
        del journey.pending[name]
        journey.decided += 1


def execute(journey: ReleaseJourney) -> None:
    """Execute one approved request."""
    ready = sorted(name for name, row in journey.pending.items() if row.approved)
    if ready:
        name = journey.dice.choice(ready)
        journey.run.forget(request=name)
        journey.settle_records()
        if name in journey.pending:
            journey.executed(name)
        journey.compare()


def release(journey: ReleaseJourney) -> None:
    """Bring the released model up to date."""
    journey.run.update()
    journey.settle_records()
    journey.compare()


def join(journey: ReleaseJourney) -> None:
    """Let a newcomer join."""
    if journey.joined < len(journey.everyone):
        journey.joined += 1
        journey.run.join()
        journey.settle_records()
        journey.run.update()  # release again, because a client may have come back without waiting for a newcomer
        journey.compare()


def look_after(journey: ReleaseJourney) -> None:
    """Purge the run, or continue from a backup of it."""
    if journey.dice.random() < 0.5:
        journey.run.purge()
        return
    file = journey.folder.with_name(f"{journey.folder.name}.zip")
    journey.run.backup(file)
    journey.folder = journey.folder.with_name(f"{journey.folder.name}-again")
    sifu.restore(file, journey.folder)


STEPS = (*[file_request] * 5, *[approve] * 3, *[settle] * 2, *[execute] * 3, *[release] * 2, join, look_after)


def release_journey(seed: int, folder: Path, steps: int = 24) -> ReleaseJourney:
    """Take a run through random steps and compare every release; the run must verify at the end."""
    journey = start(seed, folder)
    for _ in range(steps):
        journey.dice.choice(STEPS)(journey)
    problems = journey.run.verify().problems
    if problems:
        raise AssertionError(f"the run does not verify: {problems[0]}")
    return journey
