"""Disk space that an experiment needs while it runs: announced before it starts; too little space is refused.

A run keeps at most `keep.models` models. All trainings of a data set exist when its requests begin, and every running
request has its own run folder, whose models are links to those of its training; models of later rounds take
more space. A folder is deleted when its last row is written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sifu import NoSpaceError, Spec
from sifu.plots.style import byte_size
from sifu.theory.participation import Participation
from sifu_paper.work import Trajectory

ModelBytes = Callable[[Spec], int]
"""Function that returns the bytes of one model of a spec; for a closed-form head, of one client's statistics."""


@dataclass(frozen=True)
class Room:
    """Peak bytes of kept models, and of clients' updates (FedEraser, FedAccum) at the round limit."""

    models: int = 0
    updates: int = 0

    def __add__(self, other: Room) -> Room:
        return Room(self.models + other.models, self.updates + other.updates)


def run_room(spec: Spec, model_bytes: ModelBytes) -> Room:
    """Return the largest disk space of one run; a closed-form head keeps every client's statistics
    instead of models.
    """
    if spec.regime.solves:
        return Room(spec.data.clients * model_bytes(spec))
    if spec.features.kind != "none":
        return Room()  # a small head, whose size is known only once all features are computed
    size, every = model_bytes(spec), spec.round_extras.updates_every
    kept_rounds = -(-spec.stop.max_rounds // every) if every else 0
    return Room((spec.keep.models + spec.groups.count) * size, kept_rounds * _participants(spec) * size)


def part_room(trajectories: Sequence[Trajectory], at_once: int, model_bytes: ModelBytes) -> Room:
    """Return the disk space of all trajectories of one data set, with `at_once` of them at a time."""
    trainings = list(dict.fromkeys(trajectory.training for trajectory in trajectories))
    kept = sum((run_room(training.spec, model_bytes) for training in trainings), Room())
    copies = sorted((run_room(trajectory.spec, model_bytes).models for trajectory in trajectories), reverse=True)
    return kept + Room(sum(copies[:at_once]))


def room_of(parts: Iterable[Sequence[Trajectory]], jobs: int, at_once: int, model_bytes: ModelBytes) -> Room:
    """Return the largest disk space of the parts, with `jobs` at a time; each part has one data set."""
    rooms = [part_room(part, at_once, model_bytes) for part in parts]
    models = sorted((room.models for room in rooms), reverse=True)[:jobs]
    updates = sorted((room.updates for room in rooms), reverse=True)[:jobs]
    return Room(sum(models), sum(updates))


def check_room(room: Room, out: Path, runs: Path) -> str:
    """Return a sentence on the needed and the available space; refuse too little space for the models.

    Updates are counted at the limit of rounds, which few trainings approach, so too little space for them only gives a
    warning.
    """
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free + _size_of(runs)
    needed = f"{byte_size(room.models)} of models"
    if room.updates:
        needed += f", and {byte_size(room.updates)} of clients' updates if training goes to its limit,"
    sentence = f"Run folders take at most {needed} at a time in {out}, where {byte_size(free)} are free."
    if free < room.models:
        raise NoSpaceError(
            f"{sentence} Nothing was started: free some, put --out on another disk, or run less at once (--lanes, "
            "--jobs, fewer --seeds, --datasets or --methods in a command; their rows go to the same --out)"
        )
    if free < room.models + room.updates:
        sentence += " A full disk stops what hits it; the same command continues it once there is room."
    return sentence


def _participants(spec: Spec) -> int:
    participation, clients = Participation.parse(spec.server.participation), spec.data.clients
    if participation.kind == "fixed":
        return min(participation.count, clients)
    return clients if participation.kind == "all" else round(participation.rate * clients)


def _size_of(folder: Path) -> int:
    """Return the bytes of the files below a folder; linked files count once."""
    sizes: dict[int, int] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.stat(os.path.join(place, name))
            except FileNotFoundError:
                continue
            sizes[status.st_ino] = status.st_size
    return sum(sizes.values())
