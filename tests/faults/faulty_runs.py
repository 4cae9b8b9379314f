"""Scripted jobs with faults at chosen points: python faulty_runs.py FOLDER JSON

The job: training, four requests, a strict purge; some jobs add clients that join a closed-form head,
rebuilt groups, a witness and a backup. A point is a write, fsync, rename, unlink, truncation or SQLite
statement (COMMIT included) of that job. At each chosen point the process is killed before the point, or the call fails
with ENOSPC or EIO, or half of its bytes are written. After the last point of a command the process is also killed;
elsewhere the disk would be the same as before the next point. Then the disk is verified, the job continues to its end,
and the run is verified and compared with the uninterrupted one.

Everything is imported once; every attempt is a fork. An attempt starts with the disk before the command that contains
the point. Clock and random bytes are the same in every attempt, so that two faults often leave the same bytes; the
continuation from them, with real time and random bytes, is not repeated. Prints one JSON object.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import itertools
import json
import os
import secrets
import shutil
import signal
import sqlite3
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from run_tools import scalars
from scripted_job import backup_of, kept_by_witness, problems_of, problems_outside, steps_of, work
from sifu.errors import SifuError
from sifu.run import group_training, training
from sifu.store import database, keys, writer

FAULTS = ("kill before", "kill after", "ENOSPC", "EIO", "short write")
STOPPED, BROKEN = 75, 1
"""Exit codes of an attempt: an error with a message, and any other error."""
FROZEN = writer.utc_now()
"""Time of every event of an attempt; it is not before the times in the run that the attempt starts with."""


class Point:
    """Counter of the points of a job that triggers the fault at the n-th point."""

    def __init__(self, at: int | None, fault: str) -> None:
        self.count, self.at, self.fault = 0, at, fault
        self.names: list[str] = []

    def around(self, name: str, call: Callable[[], Any], half: Callable[[], Any] | None = None) -> Any:
        """Make the call, or trigger the fault if this is the chosen point."""
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
    """Connection whose modifying statements are points."""

    point: Point

    def execute(self, sql: str, *values: Any) -> Any:
        first = sql.lstrip().split(None, 1)[0].upper()
        if first in ("SELECT", "PRAGMA") and "checkpoint" not in sql:
            return super().execute(sql, *values)
        return self.point.around(f"sql {first}", lambda: super(FaultyConnection, self).execute(sql, *values))

    def executemany(self, sql: str, values: Any) -> Any:
        return self.point.around("sql many", lambda: super(FaultyConnection, self).executemany(sql, values))


class FaultyStream(io.FileIO):
    """File whose writes are points."""

    point: Point

    def write(self, content: Any) -> int:
        content = bytes(content)
        whole = super().write
        return self.point.around("write", lambda: whole(content), lambda: whole(content[: len(content) // 2]))


def install(point: Point) -> None:
    """Install the points in the modules that write."""
    FaultyConnection.point = FaultyStream.point = point
    for name in ("fsync", "replace", "rename", "unlink", "ftruncate", "rmdir", "mkdir"):
        real = getattr(os, name)

        def faulty(*arguments: Any, _name: str = name, _real: Any = real, **named: Any) -> Any:
            return point.around(_name, lambda: _real(*arguments, **named))

        setattr(os, name, faulty)
    connect = sqlite3.connect
    database.sqlite3.connect = lambda *a, **k: connect(*a, **(k | {"factory": FaultyConnection}))  # type: ignore[assignment]
    os.fdopen = lambda descriptor, mode="r", *rest: FaultyStream(descriptor, mode.replace("b", ""))  # type: ignore[assignment,misc]


@dataclass(frozen=True)
class Fault:
    """Fault and its location: the n-th point of a step of the job."""

    step: int
    at: int
    name: str
    fault: str

    def __str__(self) -> str:
        return f"step {self.step}, point {self.at} ({self.name}), {self.fault}"


def attempt(folder: Path, job: dict[str, Any], steps: tuple[int, int | None], point: Point | None = None) -> int:
    """Run steps of the job in a child; return its exit code, negative if a signal ended it."""
    child = os.fork()
    if child == 0:
        code = 0
        try:
            if point is not None:
                make_repeatable()
                install(point)
            work(folder, job, *steps)
        except (SifuError, OSError, sqlite3.OperationalError) as error:
            # The command line turns these into messages; any other error is a bug.
            code = STOPPED if isinstance(error, SifuError | OSError) else BROKEN
            if code == BROKEN or point is None:
                traceback.print_exc()
        except BaseException:
            traceback.print_exc()
            code = BROKEN
        sys.stderr.flush()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def make_repeatable() -> None:
    """Use the same clock, keys and random bytes in every attempt, so that equal faults leave equal bytes."""
    numbers = itertools.count()

    def drawn(count: int | None = None) -> bytes:
        return hashlib.shake_256(b"crash matrix %d" % next(numbers)).digest(32 if count is None else count)

    secrets.token_bytes = drawn
    secrets.token_hex = lambda count=None: drawn(count).hex()
    keys.new_key = lambda: Ed25519PrivateKey.from_private_bytes(drawn(32))
    writer.utc_now = lambda: FROZEN


def forget_heads(folder: Path) -> None:
    """Start without a memory of heads, in this process and its children, because every attempt makes another run in the
    same place.
    """
    known = folder.with_name(f"{folder.name}.heads")
    known.unlink(missing_ok=True)
    os.environ["SIFU_HEADS"] = str(known)


def names_of_points(folder: Path, job: dict[str, Any], step: int) -> list[str]:
    """Return the names of the points of a step, in order."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        point = Point(None, "")
        forget_heads(folder)
        make_repeatable()
        install(point)
        work(folder, job, step, step + 1)
        with open(writing, "w") as stream:
            stream.write(json.dumps(point.names))
        os._exit(0)
    os.close(writing)
    with open(reading) as stream:
        names: list[str] = json.loads(stream.read())
    os.waitpid(child, 0)
    return names


def copy_all(source: Path, target: Path) -> None:
    """Copy a run folder with its files outside."""
    if source.exists():
        shutil.copytree(source, target)
    for place in (kept_by_witness, backup_of):
        if place(source).exists():
            shutil.copy2(place(source), place(target))


def remove_all(folder: Path) -> None:
    """Remove a run folder with its files outside."""
    shutil.rmtree(folder, ignore_errors=True)
    kept_by_witness(folder).unlink(missing_ok=True)
    backup_of(folder).unlink(missing_ok=True)


def state_on_disk(folder: Path) -> str:
    """Return a digest of all bytes that a fault left.

    It excludes the process id in `lock`, the index of SQLite's log, which the next process rebuilds, and the random
    salts in the log with the checksums over them.
    """
    digest = hashlib.sha256()
    paths = [*sorted(folder.rglob("*")), kept_by_witness(folder), backup_of(folder), *folder.parent.glob(".tmp-*")]
    for path in paths:
        if path.name == "run.db-shm" or not (path.is_file() or path.is_dir()):
            continue
        content = path.read_bytes() if path.is_file() and path.name != "lock" else b""
        if path.name == "run.db-wal":
            content = _without_salts(content)
        name = path.relative_to(folder) if path.is_relative_to(folder) else path.suffix
        digest.update(f"{name} {path.stat().st_mode} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _without_salts(log: bytes) -> bytes:
    """Remove everything that depends on salts from a SQLite log.

    See https://www.sqlite.org/fileformat2.html#walformat: a header of 32 bytes, and a header of 24 bytes before every
    page.
    """
    if len(log) < 32:
        return log
    size = 24 + int.from_bytes(log[8:12], "big")
    frames = [log[place : place + size] for place in range(32, len(log), size)]
    current = [frame[:8] + frame[24:] if frame[8:16] == log[16:24] else b"of an earlier log" for frame in frames]
    return log[:16] + b"".join(current)


def differences(path: Path, uninterrupted: Path) -> list[str]:
    """Return the differences between a run and the uninterrupted one, and its own problems."""
    wrong = []
    expected, recorded = scalars(uninterrupted), scalars(path)
    wrong += [f"table {table} differs" for table, rows in expected.items() if recorded[table] != rows]
    wrong += problems_outside(path)
    left = [entry.name for entry in (*path.rglob(".*"), *path.glob("scrub"), *path.glob("operator.key.new-*"))]
    return wrong + [f"{name} was left" for name in left]


def at_once(folder: Path) -> list[str]:
    """Return the problems before the job continues, except those about an unfinished permanent erasure."""
    if not (folder / "run.db").exists():
        return []
    return [f"at once: {problem}" for problem in problems_of(folder) if "permanent" not in problem]


class Matrix:
    """Job, the disk before each of its steps, and all faults tried on it."""

    def __init__(self, base: Path, job: dict[str, Any]) -> None:
        self.base, self.job = base, job
        self.commit_at_times()
        self.uninterrupted = base / "uninterrupted"
        self.points: list[list[str]] = []
        for step in range(len(steps_of(job))):
            copy_all(self.uninterrupted, self.before(step))
            work(self.uninterrupted, job, step, step + 1)  # this also imports everything
            copy_all(self.before(step), base / "counted")
            self.points.append(names_of_points(base / "counted", job, step))
            remove_all(base / "counted")
        self.wrong = [f"uninterrupted: {problem}" for problem in differences(self.uninterrupted, self.uninterrupted)]
        self.faults = [
            Fault(step, at, name, fault)
            for step, names in enumerate(self.points)
            for at, name in enumerate(names, start=1)
            for fault in FAULTS
            if (fault != "short write" or name == "write") and (fault != "kill after" or at == len(names))
        ]

    def commit_at_times(self) -> None:
        """Commit after every round, or once at the end."""
        training.COMMIT_SECONDS = group_training.COMMIT_SECONDS = 1e9 if self.job.get("one_commit") else 0.0

    def before(self, step: int) -> Path:
        """Return the folder with the disk before a step."""
        return self.base / f"before-{step}"

    def attempt_all(self, chosen: Iterable[Fault], parent: Path | None = None) -> dict[str, Any]:
        """Try these faults in a separate folder; return their counts and what went wrong."""
        self.commit_at_times()
        done: dict[str, int] = {}
        wrong: list[str] = []
        gone_on: set[tuple[int, str]] = set()
        parent = parent or self.base / "attempts"
        parent.mkdir(exist_ok=True)
        folder = parent / "run"
        for fault in chosen:
            done[fault.fault] = done.get(fault.fault, 0) + 1
            copy_all(self.before(fault.step), folder)
            forget_heads(folder)
            problems = self._problems(folder, fault, gone_on)
            remove_all(folder)
            wrong += [f"{fault}: {problem}" for problem in problems]
            if problems:
                print(wrong[-len(problems) :], file=sys.stderr, flush=True)
        return {
            "points": sum(map(len, self.points)),
            "kinds": sorted({name for names in self.points for name in names}),
            "faults": done,
            "states": len(gone_on),
            "wrong": wrong,
        }

    def _problems(self, folder: Path, fault: Fault, gone_on: set[tuple[int, str]]) -> list[str]:
        """Return the problems after a fault, before and after the job continues."""
        point = Point(fault.at, fault.fault)
        problems = []
        if attempt(folder, self.job, (fault.step, fault.step + 1), point) == BROKEN:
            problems.append("it crashed without a sentence")
        state = (fault.step, state_on_disk(folder))
        if state in gone_on:
            return problems
        gone_on.add(state)
        problems += at_once(folder)
        again = attempt(folder, self.job, (fault.step, None))
        return problems + (differences(folder, self.uninterrupted) if again == 0 else [f"it did not go on ({again})"])


def main() -> None:
    base, job = Path(sys.argv[1]), json.loads(sys.argv[2])
    matrix = Matrix(base, job)
    result = matrix.attempt_all(matrix.faults[:: job["every"]])
    print(json.dumps(result | {"wrong": matrix.wrong + result["wrong"]}))


if __name__ == "__main__":
    main()
