"""Search for runs under folders, and the pending requests of the runs found."""

from __future__ import annotations

import os
from pathlib import Path

from sifu.api.requests import Request
from sifu.api.requests import pending_requests as pending_in
from sifu.errors import InputError
from sifu.store.database import DATABASE
from sifu.store.reader import RunReader
from sifu.store.seen_heads import check_seen
from sifu.store.times import current_time

DEEPEST = 4
"""Largest depth below a given folder at which runs are searched; links are not followed."""


def find_runs(*folders: str | Path) -> list[Path]:
    """Return the run folders among `folders` and below them, each once, sorted within each given folder."""
    runs: dict[Path, Path] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder: give run folders, or folders that contain them")
        below = []
        for path, inner, _ in os.walk(folder):  # folders that this account cannot read are skipped
            here = Path(path)
            if (here / DATABASE).is_file():
                below.append(here)
            if (here / DATABASE).is_file() or len(here.relative_to(folder).parts) >= DEEPEST:
                inner.clear()  # a run holds no other run
        for run in sorted(below):
            runs.setdefault(run.resolve(), run)
    return list(runs.values())


def pending_requests(*folders: str | Path) -> list[Request]:
    """Return the pending requests of all runs in `folders`, by deadline."""
    runs = find_runs(*folders)
    if not runs:
        raise InputError(f"there is no run in {', '.join(map(str, folders))}: a run folder holds a file {DATABASE}")
    pending = []
    for run in runs:
        with RunReader(run) as reader:
            check_seen(reader)
            pending += pending_in(reader, current_time())
    return sorted(pending, key=lambda request: (request.deadline, request.run, request.request))
