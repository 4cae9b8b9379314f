"""The whole crash matrix in several processes: python tests/faults/whole_matrix.py --jobs 4 --log FILE.jsonl

Every fault at every point of the four jobs of `test_crash_matrix.py`, cut into shares. Each share is a line of the log
as soon as it ends, and the next call makes those that are missing. Prints what they say together; exit code 3 if a
fault lost something.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from test_crash_matrix import CLOSED_FORM, GROUPS, JOB, OUTSIDE, PROGRAM

SHARES = 120
"""A share is every 120th fault: a minute or less."""
MATRICES = {"sifu": JOB, "closed form": JOB | CLOSED_FORM, "groups": JOB | GROUPS}
if shutil.which("openssl"):
    MATRICES["witness, timestamps, backup"] = JOB | OUTSIDE


class Share:
    """One share of one matrix, running in a process of its own."""

    def __init__(self, matrix: str, share: int) -> None:
        self.matrix, self.share, self.began = matrix, share, time.monotonic()
        self._folder = tempfile.TemporaryDirectory(prefix="sifu-faults-")
        self._output = Path(self._folder.name) / "output.json"
        job = MATRICES[matrix] | {"every": SHARES, "share": share}
        with self._output.open("w") as output, (Path(self._folder.name) / "errors").open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(PROGRAM), self._folder.name, json.dumps(job)],
                stdout=output,
                stderr=errors,
                env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def line(self) -> dict[str, Any] | None:
        """What came of it; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        line = {"matrix": self.matrix, "share": self.share, "seconds": round(time.monotonic() - self.began, 1)}
        if code:
            errors = (Path(self._folder.name) / "errors").read_text()[-2000:]
            return line | {"points": 0, "faults": {}, "wrong": [f"the program ended with {code}: {errors}"]}
        return line | json.loads(self._output.read_text())

    def stop(self) -> None:
        """End it and everything it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._folder.cleanup()


def main() -> int:
    """Make what is missing, and say what all of it says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="so many processes")
    parser.add_argument("--seconds", type=float, default=0.0, help="end after so many seconds")
    parser.add_argument("--log", type=Path, required=True, help="a file of JSON lines to add to, and to go on from")
    options = parser.parse_args()
    lines = [json.loads(text) for text in options.log.read_text().splitlines()] if options.log.exists() else []
    done = {(line["matrix"], line["share"]) for line in lines}
    waiting = [(matrix, share) for matrix in MATRICES for share in range(SHARES) if (matrix, share) not in done]
    running: list[Share] = []
    began = time.monotonic()
    try:
        while (waiting or running) and not (options.seconds and time.monotonic() - began > options.seconds):
            while waiting and len(running) < options.jobs:
                running.append(Share(*waiting.pop(0)))
            time.sleep(0.1)
            for share in list(running):
                line = share.line()
                if line is not None:
                    running.remove(share)
                    share.stop()
                    lines.append(line)
                    with options.log.open("a") as stream:
                        stream.write(json.dumps(line) + "\n")
    finally:
        for share in running:
            share.stop()
    for matrix in MATRICES:
        own = [line for line in lines if line["matrix"] == matrix]
        faults = sum((Counter(line["faults"]) for line in own), Counter())
        points = max((line["points"] for line in own), default=0)
        wrong = sum(len(line["wrong"]) for line in own)
        print(
            f"{matrix}: {len(own)} of {SHARES} shares, {points} points, {faults.total()} faults {dict(faults)}, "
            f"{wrong} wrong"
        )
    problems = [problem for line in lines for problem in line["wrong"]]
    print("\n".join(problems[:20]))
    return 3 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
