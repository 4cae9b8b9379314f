"""All runs under some folders, and the requests that wait in them."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from sifu.errors import InputError, SifuError
from sifu.requests.approvals import PendingRequest
from sifu.requests.approvals import pending_requests as pending_in
from sifu.store.clock import clock_problem, utc_now
from sifu.store.database import DATABASE
from sifu.store.known_keys import check_known_key
from sifu.store.reader import RunReader

DEEPEST = 4
"""How many folders below the one named runs are looked for; links are not followed."""


def find_runs(*folders: str | Path) -> list[Path]:
    """The run folders among `folders` and below them, each once, in the order of their names."""
    runs: dict[Path, Path] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder: name run folders, or folders that hold some")
        below = sorted(_below(folder, DEEPEST))
        runs |= {run.resolve(): run for run in below if run.resolve() not in runs}
    return list(runs.values())


def _below(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / DATABASE).is_file():
        yield folder  # a run holds no other run
        return
    if depth == 0:
        return
    try:
        with os.scandir(folder) as entries:
            inner = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return  # a folder that this account may not look into
    for path in inner:
        yield from _below(Path(path), depth - 1)


def pending_requests(*folders: str | Path) -> list[PendingRequest]:
    """The pending requests of all runs in `folders`, overdue ones first, then by deadline."""
    runs = find_runs(*folders)
    if not runs:
        raise InputError(f"there is no run in {', '.join(map(str, folders))}: a run folder holds a file {DATABASE}")
    return in_order_of_deadlines(request for run in runs for request in pending_of(run))


def in_order_of_deadlines(requests: Iterable[PendingRequest]) -> list[PendingRequest]:
    """The earliest deadline first, so what is overdue comes first."""
    return sorted(requests, key=lambda request: (request.deadline, request.run, request.request))


def pending_of(run: str | Path) -> list[PendingRequest]:
    """The requests that wait in one run."""
    with RunReader(Path(run)) as reader:
        check_known_key(reader)
        return pending_in(reader, datetime.datetime.now(datetime.UTC))


def clock_problem_of(run: str | Path) -> str | None:
    """A sentence if the clock contradicts the run's last event; none where the run cannot be read."""
    try:
        with RunReader(Path(run)) as reader:
            return clock_problem(
                str(reader.query("SELECT time FROM events ORDER BY seq DESC LIMIT 1")[0][0]), utc_now()
            )
    except (SifuError, OSError, ValueError, IndexError):
        return None


def overdue_of(run: str | Path) -> list[PendingRequest]:
    """The requests of a run that are overdue; none where the run cannot be read, which others report."""
    try:
        return [request for request in pending_of(run) if request.overdue]
    except (SifuError, OSError):
        return []
