"""A program that runs one scripted job with a fault at a chosen point of it: python faulty_runs.py FOLDER JSON

The job: train, three requests, a joint one, a strict purge; as it says, also clients that join a closed-form head,
groups that are built again, a witness, timestamps and a backup. A point is a write, fsync, rename, unlink, truncation
or SQLite statement (COMMIT included) of that job. At each chosen point the process is killed before it (and after the
last one: after any other is before the next, the disk is the same), or the call fails with ENOSPC or EIO, or half of
its bytes are written. Then the job is run again until it ends, verified, and compared with the uninterrupted one.
Everything is imported once; every attempt is a fork. Prints one JSON object.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import signal
import sqlite3
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from run_tools import files_of, scalars
from scripted_job import backup_of, kept_by_witness, prepare, problems_outside, witnesses_of, work
from sifu.api import verify_run
from sifu.errors import SifuError
from sifu.record import group_training, training
from sifu.store import database

FAULTS = ("kill before", "kill after", "ENOSPC", "EIO", "short write")
STOPPED, BROKEN = 75, 1
"""Exit codes of an attempt: an error that was told in a sentence, and one that was not."""


class Point:
    """Counts the points of a job, and does the fault at the n-th."""

    def __init__(self, at: int | None, fault: str) -> None:
        self.count, self.at, self.fault = 0, at, fault
        self.names: list[str] = []

    def around(self, name: str, call: Callable[[], Any], half: Callable[[], Any] | None = None) -> Any:
        """Do the call, with the fault if this is its point."""
        self.count += 1
        self.names.append(name)
        if self.count != self.at:
            return call()
        if self.fault == "kill before":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "kill after":
            with contextlib.suppress(Exception):
                call()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "short write" and half is not None:
            half()
        code = errno.EIO if self.fault == "EIO" else errno.ENOSPC
        if name.startswith("sql"):
            words = "disk I/O error" if self.fault == "EIO" else "database or disk is full"
            raise sqlite3.OperationalError(words)
        raise OSError(code, os.strerror(code))


class FaultyConnection(sqlite3.Connection):
    """A connection whose statements that change something are points."""

    point: Point

    def execute(self, sql: str, *values: Any) -> Any:
        first = sql.lstrip().split(None, 1)[0].upper()
        if first in ("SELECT", "PRAGMA") and "checkpoint" not in sql:
            return super().execute(sql, *values)
        return self.point.around(f"sql {first}", lambda: super(FaultyConnection, self).execute(sql, *values))

    def executemany(self, sql: str, values: Any) -> Any:
        return self.point.around("sql many", lambda: super(FaultyConnection, self).executemany(sql, values))


class FaultyStream(io.FileIO):
    """A file whose writes are points."""

    point: Point

    def write(self, content: Any) -> int:
        content = bytes(content)
        whole = super().write
        return self.point.around("write", lambda: whole(content), lambda: whole(content[: len(content) // 2]))


def install(point: Point) -> None:
    """Put the points in."""
    FaultyConnection.point = FaultyStream.point = point
    for name in ("fsync", "replace", "rename", "unlink", "ftruncate", "rmdir", "mkdir"):
        real = getattr(os, name)

        def faulty(*arguments: Any, _name: str = name, _real: Any = real, **named: Any) -> Any:
            return point.around(_name, lambda: _real(*arguments, **named))

        setattr(os, name, faulty)
    connect = sqlite3.connect
    database.sqlite3.connect = lambda *a, **k: connect(*a, **(k | {"factory": FaultyConnection}))  # type: ignore[assignment]
    os.fdopen = lambda descriptor, mode="r", *rest: FaultyStream(descriptor, mode.replace("b", ""))  # type: ignore[assignment,misc]


def attempt(folder: Path, job: dict[str, Any], at: int | None = None, fault: str = "") -> int:
    """Run the job in a child; its exit code, negative if a signal ended it."""
    child = os.fork()
    if child == 0:
        code = 0
        try:
            if at is not None:
                install(Point(at, fault))
            work(folder, job)
        except (SifuError, OSError, sqlite3.OperationalError) as error:
            # What the command line makes a sentence of; anything else is a bug.
            code = STOPPED if isinstance(error, SifuError | OSError) else BROKEN
            if code == BROKEN or at is None:
                traceback.print_exc()
        except BaseException:
            traceback.print_exc()
            code = BROKEN
        sys.stderr.flush()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def count_points(folder: Path, job: dict[str, Any]) -> list[str]:
    """What the points of the job are, in order."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        point = Point(None, "")
        install(point)
        work(folder, job)
        with open(writing, "w") as stream:
            stream.write(json.dumps(point.names))
        os._exit(0)
    os.close(writing)
    with open(reading) as stream:
        names: list[str] = json.loads(stream.read())
    os.waitpid(child, 0)
    return names


def differences(path: Path, uninterrupted: Path) -> list[str]:
    """In what a run differs from the one nothing happened to; what is wrong with it by itself."""
    wrong = []
    expected, recorded = scalars(uninterrupted), scalars(path)
    wrong += [f"table {table} differs" for table, rows in expected.items() if recorded[table] != rows]
    if stored(path) != stored(uninterrupted):
        wrong.append("the models, updates or statistics differ")
    wrong += problems_outside(path)
    left = [entry.name for entry in (*path.rglob(".*"), *path.glob("scrub"), *path.glob("operator.key.new-*"))]
    return wrong + [f"{name} was left" for name in left]


def at_once(folder: Path) -> list[str]:
    """What is wrong before anything goes on: nothing, except a permanent erasure that is not finished."""
    if not (folder / "run.db").exists():
        return []
    problems = verify_run(folder, witnesses=witnesses_of(folder)).problems
    return [f"at once: {problem}" for problem in problems if "permanent" not in problem]


def stored(folder: Path) -> dict[str, str]:
    """Digests of the models, updates and statistics on disk."""
    return {
        name: digest
        for name, digest in files_of(folder).items()
        if name.startswith(("models", "updates", "statistics"))
    }


def main() -> None:
    base, job = Path(sys.argv[1]), json.loads(sys.argv[2])
    training.COMMIT_SECONDS = group_training.COMMIT_SECONDS = 1e9 if job.get("one_commit") else 0.0
    prepare(base, job)
    work(base / "uninterrupted", job)  # which also imports everything
    wrong = [
        f"uninterrupted: {difference}" for difference in differences(base / "uninterrupted", base / "uninterrupted")
    ]
    names = count_points(base / "counted", job)
    done: dict[str, int] = {}
    number = 0
    for at in range(1, len(names) + 1):
        for fault in FAULTS:
            if (fault == "short write" and names[at - 1] != "write") or (fault == "kill after" and at < len(names)):
                continue
            number += 1
            if number % job["every"] != job.get("share", 0):
                continue
            folder, problems = base / f"{at}-{fault.replace(' ', '-')}", []
            if attempt(folder, job, at, fault) == BROKEN:
                problems.append("it crashed without a sentence")
            problems += at_once(folder)
            again = attempt(folder, job)
            problems += differences(folder, base / "uninterrupted") if again == 0 else [f"it did not go on ({again})"]
            done[fault] = done.get(fault, 0) + 1
            if problems:
                wrong += [f"point {at} ({names[at - 1]}), {fault}: {problem}" for problem in problems]
                print(wrong[-len(problems) :], file=sys.stderr, flush=True)
            else:
                shutil.rmtree(folder)
                kept_by_witness(folder).unlink(missing_ok=True)
                backup_of(folder).unlink(missing_ok=True)
            if number % 50 == 0:
                print(f"{number} faults, point {at} of {len(names)}", file=sys.stderr, flush=True)
    print(json.dumps({"points": len(names), "kinds": sorted(set(names)), "faults": done, "wrong": wrong}))


if __name__ == "__main__":
    main()
