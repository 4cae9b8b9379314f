"""Random journeys in several processes; each finished journey is a line in a file.

A journey is determined by its number, so a killed process loses only its unfinished journeys: called again with the
same file, the command makes the missing numbers. Files of several machines can be concatenated; a repeated number
counts once.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from claims_against_truth import Findings, audit_journey
from random_journeys import FAMILIES, MASKED
from sifu_paper.provenance import provenance

EVERY_FAMILY = (*FAMILIES, *[MASKED] * 3)
"""Families, weighted by their frequency among a thousand requests."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Line:
    """One journey: its number, its family, its duration in seconds, and its findings."""

    seed: int
    family: str
    seconds: float
    findings: Findings


@dataclass
class Log:
    """All finished journeys, in a file of JSON lines, or only in memory without a file."""

    file: Path | None = None
    sessions: list[dict[str, Any]] = field(default_factory=list)
    """Date, command, commit, hardware and versions of each call."""
    lines: dict[int, Line] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.file is None or not self.file.exists():
            return
        for text in self.file.read_text(encoding="utf-8").splitlines():
            try:
                content = json.loads(text)
            except ValueError:  # a line that a kill truncated
                continue
            if "session" in content:
                self.sessions.append(content["session"])
            else:
                line = Line(**content | {"findings": Findings(**content["findings"])})
                self.lines.setdefault(line.seed, line)

    @property
    def findings(self) -> Findings:
        """Findings of all journeys together."""
        total = Findings()
        for _, line in sorted(self.lines.items()):
            total.add(line.findings)
        return total

    def add(self, stream: TextIO | None, line: Line) -> None:
        """Add one journey."""
        self.lines[line.seed] = line
        _write(stream, asdict(line))

    def summary(self) -> dict[str, Any]:
        """Return the summary to keep: the totals, the numbers of the journeys, and the machines."""
        return {
            "what": "Requests of random journeys held against the truth (benchmarks/random_audits.py)",
            "sessions": self.sessions,
            "seeds": _ranges(sorted(self.lines)),
            "seconds": round(sum(line.seconds for line in self.lines.values()), 1),
            "total": {name: value for name, value in asdict(self.findings).items() if name != "psi_scale"},
        }


def make_journeys(
    log: Log, wanted: int, seed: int, families: Sequence[str], jobs: int, seconds: float, small: bool = False
) -> None:
    """Make journeys from number `seed` on until `wanted` requests are executed or `seconds` have
    passed (0: no limit).
    """
    if log.findings.requests >= wanted:
        return
    began = time.monotonic()
    session = provenance("cpu", ["python", "benchmarks/random_audits.py", *sys.argv[1:]])
    session["commit"] = os.environ.get("COMMIT", session["commit"])  # for a copy without its git history
    log.sessions.append(session)
    for name in THREADS:  # for the child processes
        os.environ[name] = "1"
    tasks = ((number, families, small) for number in missing(log, seed, families))
    with open(log.file, "a", encoding="utf-8") if log.file else nullcontext() as stream:
        if log.file and log.file.stat().st_size and not log.file.read_bytes().endswith(b"\n"):
            _write(stream, None)
        _write(stream, {"session": session})
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            running = [pool.apply_async(one_journey, next(tasks)) for _ in range(jobs + 1)]
            while running and not (seconds and time.monotonic() - began > seconds):
                time.sleep(0.05)
                for task in [task for task in running if task.ready()]:
                    running.remove(task)
                    log.add(stream, task.get())
                    _tell(log, task.get(), wanted)
                    if log.findings.requests < wanted:
                        running.append(pool.apply_async(one_journey, next(tasks)))


def missing(log: Log, seed: int, families: Sequence[str]) -> Iterator[int]:
    """Yield the numbers not made yet; those of masked rounds only if Flower is installed."""
    flower = importlib.util.find_spec("flwr") is not None
    for number in itertools.count(seed):
        if number not in log.lines and (flower or family_of(number, families) != MASKED):
            yield number


def family_of(seed: int, families: Sequence[str]) -> str:
    """Return the family of a journey, which decides how it is trained."""
    return random.Random(f"family {seed}").choice(families)


def one_journey(seed: int, families: Sequence[str], small: bool = False) -> Line:
    """Make one journey from training to its end, in a temporary folder."""
    findings, family = Findings(), family_of(seed, families)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sifu-journey-") as folder:
        try:
            audit_journey(seed, Path(folder), findings, [family], small=small)
        except Exception as error:  # a traceback counts as a finding
            what = f"{type(error).__name__}: {error}"
            row = {"kind": "traceback", "seed": seed, "family": family, "request": "", "what": what}
            findings.violations.append(row)
    return Line(seed, family, round(time.monotonic() - started, 2), findings)


def _write(stream: TextIO | None, content: Any) -> None:
    if stream is not None:
        stream.write("\n" if content is None else json.dumps(content) + "\n")
        stream.flush()


def _tell(log: Log, line: Line, wanted: int) -> None:
    print(
        f"{log.findings.requests:5d} of {wanted} requests; run {line.seed} ({line.family}): {line.findings.requests} "
        f"requests in {line.seconds:.1f} s, {len(line.findings.violations)} violations",
        flush=True,
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Return numbers as ranges.

    >>> _ranges([0, 1, 2, 5, 7, 8])
    '0-2 5 7-8'
    """
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return " ".join("-".join(str(end) for end in pair) for pair in ranges)
