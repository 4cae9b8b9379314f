"""The whole mutation matrix in several processes: tests/verify/whole_mutation_matrix.py --jobs 4 --log FILE.jsonl

Every change of `mutated_runs.py` on every kind of run, in shares of changes. Each share adds a line to the log when it
ends, and a repeated call makes the missing shares. Prints the combined result; the exit code is 3 if a change was
unnoticed or ended in a traceback. The runs are made in the folder for temporary files (`TMPDIR`).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mutated_runs import RUNS, Mutation, every_mutation, held_against, uncaught
from mutations import Pristine, caught
from shares import Line, Share, cut, options, work_off
from sifu_verifier import verify

CHANGES = 150
"""Number of changes in a share."""


def main() -> int:
    """Make the missing shares and print the combined result."""
    chosen = options(__doc__)
    os.environ["SIFU_HEADS"] = os.devnull  # the record alone must show a change
    with tempfile.TemporaryDirectory(prefix="sifu-changes-") as parent:
        shares, wrong = [], []
        for name, build in RUNS.items():
            folder = build(Path(parent) / name.replace(" ", "-") / "run")
            wrong += [f"{name}: {problem}" for problem in caught(folder, **held_against(folder)) + verify(folder)]
            parts = cut(every_mutation(folder), CHANGES)
            shares += [Share(name, number, len(parts), _trying(folder, part)) for number, part in enumerate(parts)]
        lines = work_off(shares, Path(parent), chosen)
    total: Counter[str] = Counter()
    for name in RUNS:
        own = [line for line in lines if line["matrix"] == name]
        tried = sum((Counter(line.get("tried", {})) for line in own), Counter())
        total += tried
        print(
            f"{name}: {len(own)} of {sum(share.matrix == name for share in shares)} shares, {tried.total()} changes "
            f"{dict(tried)}, {sum(len(line['wrong']) for line in own)} wrong"
        )
    print(f"together: {len(lines)} of {len(shares)} shares, {total.total()} changes {dict(total)}")
    wrong += [problem for line in lines for problem in line["wrong"]]
    print("\n".join(wrong[:40]))
    return 3 if wrong else 0


def _trying(run: Path, mutations: Sequence[Mutation]) -> Callable[[Path], Line]:
    def work(folder: Path) -> Line:
        """Work on a separate copy of the run, with its witness."""
        shutil.copytree(run.parent, folder / "own")
        tried, wrong = uncaught(Pristine(folder / "own" / run.name), list(mutations))
        shutil.rmtree(folder / "own")
        return {"tried": dict(tried), "wrong": wrong}

    return work


if __name__ == "__main__":
    sys.exit(main())
