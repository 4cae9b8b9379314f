"""Long-running jobs of the console. Each job is a `sifu` command in a separate process.

Pages stay responsive, and stopping the console does not stop a job: the command continues, and the run's ledger
records its work. The output of a job goes to private files, which are removed once they are read.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sifu.errors import RunBusyError
from sifu.store.files import private_folder, write_atomically
from sifu.store.times import utc_now

JobKind = Literal["carry out", "verify", "report"]
JobState = Literal["running", "done", "failed"]
MOST_JOBS = 50
"""Maximum number of finished jobs to remember, over all runs."""


@dataclass(frozen=True)
class Job:
    """A command on a run, in progress or finished."""

    id: str
    kind: JobKind
    run: str
    actor: str
    started: float
    request: str | None = None
    state: JobState = "running"
    message: str = ""


class Jobs:
    """The jobs that this console started, with their results."""

    def __init__(self, state: Path) -> None:
        self._folder, self._verifications = state / "jobs", state / "verifications.json"
        self._jobs: dict[str, Job] = {}
        self._lock = threading.Lock()

    def of_run(self, run: str) -> list[Job]:
        """Return the jobs of a run, latest first."""
        with self._lock:
            return [job for job in reversed(self._jobs.values()) if job.run == run]

    def start(self, kind: JobKind, run: str, arguments: Sequence[str], actor: str, request: str | None = None) -> Job:
        """Start `sifu ARGUMENTS`; refuse if a job of the same kind already runs on the same run."""
        job = Job(secrets.token_hex(6), kind, run, actor, time.time(), request)
        with self._lock:
            if (run, kind, "running") in {(other.run, other.kind, other.state) for other in self._jobs.values()}:
                raise RunBusyError(f"another job of this run is in progress ({kind}): wait until it ends")
            finished = [other.id for other in self._jobs.values() if other.state != "running"]
            for old in finished[: max(0, len(self._jobs) - MOST_JOBS)]:
                del self._jobs[old]
            self._jobs[job.id] = job
        private_folder(self._folder, parents=True)
        out, err = (self._folder / f"{job.id}.{name}" for name in ("out", "err"))
        with _private(out) as printed, _private(err) as told:
            process = subprocess.Popen(
                [sys.executable, "-m", "sifu.cli.main", *arguments, "--format", "json"],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=told,
                env=os.environ | {"SIFU_ACTOR": actor},
                start_new_session=True,  # Ctrl-C in the console must not stop the job
            )
        threading.Thread(target=self._wait, args=(job, process, out, err), daemon=True).start()
        return job

    def _wait(self, job: Job, process: subprocess.Popen[bytes], out: Path, err: Path) -> None:
        code = process.wait()
        answer = _object(_written(out))
        told = _written(err).decode(errors="replace").strip().splitlines()
        sentence = str(answer.get("error") or (told[-1].removeprefix("sifu: ") if told and code else ""))
        for path in (out, err):
            path.unlink(missing_ok=True)
        # A verification that found problems still succeeded as a job.
        good = code == 0 or (job.kind == "verify" and "holds" in answer)
        ended = replace(job, state="done" if good else "failed", message=sentence[:1000])
        with self._lock:
            self._jobs[job.id] = ended
            if job.kind == "verify" and "holds" in answer:
                lists = {name: answer.get(name, []) for name in ("notes", "problems")}
                verification = {"time": utc_now(), "holds": answer["holds"] is True} | lists
                verification["problems"] = lists["problems"][:50]
                content = self.verifications() | {job.run: verification}
                write_atomically(self._verifications, json.dumps(content, indent=1).encode())

    def verifications(self) -> dict[str, dict[str, Any]]:
        """Return the last verification of each run that this console verified, by key."""
        return _object(_written(self._verifications))


def _private(path: Path) -> Any:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb")


def _written(path: Path) -> bytes:
    """Return the content of a file, or nothing if it was removed or never written."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _object(content: bytes) -> dict[str, Any]:
    """Return a JSON object, or an empty one if the content is something else."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
