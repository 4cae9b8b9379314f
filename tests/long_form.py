"""Long forms of suites: trials in slices, a log that is appended to and continued, one total from all logs of a commit.

python tests/SUITE.py --log FILE [--slice I/N] [--most N] [--seconds S] [--also FILE ...]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

WRONG = "wrong"
"""First word of the outcome of a trial that failed."""


def work_off(
    suite: str,
    trials: Sequence[str],
    attempt: Callable[[str], str],
    description: str | None,
    arguments: Sequence[str] | None = None,
) -> int:
    """Make the trials of a slice that no log has, and print the total of all logs.

    Args:
        suite: Name of the suite in the log.
        trials: Names of all trials, in an order that is always the same.
        attempt: Function that makes a trial and returns its outcome, a word and perhaps more after a colon.
        description: Help of the program.
        arguments: Arguments of the program, unless they are those of this process.

    Returns:
        Exit code: 3 if a trial failed.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slice", default="1/1", help="I/N: every N-th trial, beginning with the I-th")
    parser.add_argument("--log", type=Path, required=True, help="file of JSON lines to extend and continue")
    parser.add_argument("--also", type=Path, nargs="*", default=[], help="logs of other slices, for the total")
    parser.add_argument("--most", type=int, default=len(trials), help="only this many of all trials, the first ones")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no trial after this many seconds")
    chosen = parser.parse_args(arguments)
    trials = trials[: chosen.most]
    part, parts = map(int, chosen.slice.split("/"))
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True
    ).stdout.strip()
    done: dict[str, str] = {}
    for file in (chosen.log, *chosen.also):
        for text in file.read_text().splitlines() if file.exists() else ():
            line = json.loads(text)
            if (line["suite"], line["commit"]) == (suite, commit):
                done[line["trial"]] = line["outcome"]
    began = time.monotonic()
    with chosen.log.open("a") as stream:
        for trial in trials[part - 1 :: parts]:
            if trial in done or time.monotonic() - began > chosen.seconds:
                continue
            start = time.monotonic()
            done[trial] = attempt(trial)
            line = {"suite": suite, "commit": commit, "trial": trial, "outcome": done[trial]}
            stream.write(json.dumps(line | {"seconds": round(time.monotonic() - start, 2)}) + "\n")
            stream.flush()
    counts = Counter(outcome.partition(":")[0] for outcome in done.values())
    wrong = [f"{trial}: {outcome}" for trial, outcome in done.items() if outcome.startswith(WRONG)]
    print("\n".join(wrong[:40]))
    left = sum(trial not in done for trial in trials)
    print(f"{suite} at {commit}: {len(done)} trials, {dict(counts)}, {left} of {len(trials)} left")
    return 3 if wrong else 0
