"""Program that trains and forgets while it is killed repeatedly: python killed_runs.py FOLDER JSON

It imports everything once and then forks a child for every attempt, so that a kill costs milliseconds. A child
is killed with SIGKILL either after a random time or at the n-th of the calls that touch the disk (fsync,
rename, unlink, every SQL statement), before or after it. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripted_job import work
from sifu.run import group_training, training

TOUCHING_THE_DISK = {"fsync", "replace", "rename", "unlink", "execute", "executemany", "executescript"}
"""Functions of `os` and methods of an SQLite connection."""

MOST_ATTEMPTS = 400


class Countdown:
    """Counter of the calls that touch the disk, which kills the process at the n-th."""

    def __init__(self, kill_at: int | None) -> None:
        self.count, self.kill_at = 0, kill_at

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if (
            event in ("c_call", "c_return")
            and getattr(argument, "__name__", "") in TOUCHING_THE_DISK
            and (argument.__module__ == "posix" or isinstance(argument.__self__, sqlite3.Connection))
        ):
            self.count += 1
            if self.count == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)


def attempt(folder: Path, job: dict[str, Any], kill_at: int | None = None, after: float | None = None) -> bool:
    """Run the job in a child that is killed on the way; return whether it finished."""
    child = os.fork()
    if child == 0:
        try:
            if kill_at is not None:
                sys.setprofile(Countdown(kill_at))
            work(folder, job)
            sys.setprofile(None)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit(f"an attempt on {folder} failed instead of going on")
    return os.WIFEXITED(status)


def measure(folder: Path, job: dict[str, Any]) -> tuple[int, float]:
    """Measure an uninterrupted run: the number of calls that touch the disk, and the time it takes."""
    counter, started = Countdown(None), time.monotonic()
    sys.setprofile(counter)
    work(folder, job)
    sys.setprofile(None)
    return counter.count, time.monotonic() - started


def main() -> None:
    base, job = Path(sys.argv[1]), json.loads(sys.argv[2])
    training.COMMIT_SECONDS = group_training.COMMIT_SECONDS = job.get("commit_seconds", 0.0)
    work(base / "uninterrupted", job)  # this also imports everything
    calls, seconds = measure(base / "counted", job)
    chosen = random.Random(job["seed"])
    kills = 0
    for number in range(job["runs"]):
        folder = base / f"killed-{number}"
        wanted = job["kills_a_run"]
        for _ in range(MOST_ATTEMPTS):
            if wanted <= 0:
                done = attempt(folder, job)
            elif chosen.random() < 0.5 or wanted == job["kills_a_run"]:  # the first kill depends on no clock
                done = attempt(folder, job, kill_at=chosen.randint(1, max(1, calls // wanted)))
            else:
                done = attempt(folder, job, after=chosen.uniform(0.0, seconds / wanted))
            wanted -= 1
            if done:
                break
            kills += 1
        else:
            raise SystemExit("too many attempts")
    # One run each that is killed at a given call, at regular intervals.
    last = min(calls, job.get("last_call", calls))
    for call in range(job.get("first_call", 1), last + 1, job["every_call"]) if job["every_call"] else ():
        folder = base / f"call-{call}"
        kills += not attempt(folder, job, kill_at=call)
        attempt(folder, job)
    print(json.dumps({"kills": kills, "calls": calls, "seconds": seconds}))


if __name__ == "__main__":
    main()
