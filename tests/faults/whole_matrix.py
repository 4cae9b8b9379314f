"""The whole crash matrix in several processes: python tests/faults/whole_matrix.py --jobs 4 --log FILE.jsonl

Every fault at every point of the jobs of `test_crash_matrix.py`, in shares of consecutive faults. Each share adds
a line to the log when it ends, and a repeated call makes the missing shares. Prints the combined result; the exit code
is 3 if a fault lost something. The runs are made in the folder for temporary files (`TMPDIR`).
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from faulty_runs import Fault, Matrix
from test_crash_matrix import JOB, JOBS

from shares import Line, Share, cut, options, work_off

FAULTS = 48
"""Number of faults in a share, which takes half a minute or less."""


def main() -> int:
    """Make the missing shares and print the combined result."""
    chosen = options(__doc__)
    with tempfile.TemporaryDirectory(prefix="sifu-faults-") as parent:
        matrices = {}
        jobs = {"sifu": JOB} | {name: JOB | job for name, (_, job) in JOBS.items()}
        for number, (name, job) in enumerate(jobs.items()):
            folder = Path(parent) / str(number)
            folder.mkdir()
            matrices[name] = Matrix(folder, job)
        shares = [
            Share(name, number, len(parts), _trying(matrix, part))
            for name, matrix in matrices.items()
            for parts in [cut(matrix.faults, FAULTS)]
            for number, part in enumerate(parts)
        ]
        lines = work_off(shares, Path(parent), chosen)
        for name, matrix in matrices.items():
            own = [line for line in lines if line["matrix"] == name]
            faults = sum((Counter(line.get("faults", {})) for line in own), Counter())
            print(
                f"{name}: {len(own)} of {sum(share.matrix == name for share in shares)} shares, "
                f"{sum(map(len, matrix.points))} points, {faults.total()} faults {dict(faults)}, "
                f"{sum(line.get('states', 0) for line in own)} states gone on from, "
                f"{sum(len(line['wrong']) for line in own)} wrong"
            )
        problems = [problem for matrix in matrices.values() for problem in matrix.wrong]
    problems += [problem for line in lines for problem in line["wrong"]]
    print("\n".join(problems[:20]))
    return 3 if problems else 0


def _trying(matrix: Matrix, faults: Sequence[Fault]) -> Callable[[Path], Line]:
    return lambda folder: matrix.attempt_all(faults, folder)


if __name__ == "__main__":
    sys.exit(main())
