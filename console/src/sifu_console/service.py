"""The console's service: the runs under some folders, and the operations that span them.

The pages and the JSON API identify the visitor and then call the service and its runs (`served_run`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from sifu.api import find_runs
from sifu.errors import SifuError
from sifu.store.files import private_folder
from sifu_console.jobs import Jobs
from sifu_console.request_lines import RequestLine
from sifu_console.served_run import ServedRun, UnknownError
from sifu_console.tokens import Token

RESCAN_SECONDS = 3.0
"""Interval between two searches for new run folders, in seconds."""
log = logging.getLogger(__name__)


class ConsoleService:
    """All runs under the console's folders, and the operations that span them."""

    def __init__(self, folders: Sequence[Path], state: Path) -> None:
        self.folders = tuple(folders)
        private_folder(state, parents=True)
        self.jobs = Jobs(state)
        self._runs: dict[str, ServedRun] = {}
        self._looked = -RESCAN_SECONDS
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def every_run(self) -> dict[str, ServedRun]:
        """Return all runs by key; search the folders for new runs at most every `RESCAN_SECONDS` seconds."""
        with self._lock:
            if time.monotonic() - self._looked >= RESCAN_SECONDS:
                self._looked = time.monotonic()
                here = {run.folder: run for run in self._runs.values()}
                runs: list[ServedRun] = []
                for folder in find_runs(*self.folders):
                    try:
                        runs.append(here.get(folder) or ServedRun(folder, self.jobs))
                    except SifuError as error:  # unsupported version, unfinished run or changed key
                        if str(error) not in self._told:
                            log.warning("%s is not shown: %s", folder, error)
                        self._told.add(str(error))
                self._runs = {run.key: run for run in runs}
            return dict(self._runs)

    def runs(self, who: Token) -> list[ServedRun]:
        """Return the runs that a visitor may see, sorted by name."""
        who.demand("see own")
        return sorted(self.every_run().values(), key=lambda run: run.name)

    def find(self, who: Token, key: str) -> ServedRun:
        """Return a run by its key."""
        who.demand("see own")
        run = self.every_run().get(key)
        if run is None:
            raise UnknownError("there is no such run here")
        return run

    def lines(self, who: Token) -> list[RequestLine]:
        """Return the requests of all runs that a person may see.

        Open requests come first, by deadline. Settled requests follow, latest first.
        """
        lines: list[RequestLine] = []
        for run in self.runs(who):
            with suppress(SifuError):  # an unreadable run is reported in the list of runs
                lines += run.lines(who)
        return sorted(lines, key=RequestLine.urgency)

    def trail(
        self, who: Token, only: ServedRun | None, kind: str, page: int, size: int
    ) -> tuple[list[dict[str, Any]], int]:
        """Return one page of the events of one run or of all runs, latest first, and the total number of events.

        Args:
            who: Token of the visitor.
            only: The run, or None for all runs.
            kind: Prefix of the event kinds to include, or all if empty.
            page: Number of the page, from 1.
            size: Events per page.
        """
        who.demand("examine")
        events: list[dict[str, Any]] = []
        count = 0
        for run in self.runs(who) if only is None else [only]:
            with suppress(SifuError) if only is None else nullcontext():
                of_run, number = run.trail(who, kind, size * page)
                events, count = events + of_run, count + number
        events.sort(key=lambda event: (event["time"], event["seq"]), reverse=True)
        return events[size * (page - 1) : size * page], count
