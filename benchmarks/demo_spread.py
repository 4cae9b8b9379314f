"""Spread of the demo's gain over noise draws and seeds; the demo draws fresh noise every time, and its seed was chosen.

    python benchmarks/demo_spread.py --seeds 2 3 4 5 6 7 --runs 40

Trains the demo's federation once for each seed, then executes the demo's three requests many times on copies of that
run, and prints the ratio of Scratch's rounds to theirs: worst, median, best.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import sifu
from sifu.cli.demo import DEMO, REQUESTS


def gains(seed: int, runs: int, folder: Path) -> list[float]:
    """Return the ratios of Scratch's rounds to those of the three requests, for `runs` fresh draws of the noise."""
    trained = sifu.train(replace(DEMO, seed=seed), run=folder / f"seed-{seed}")
    scratch, ratios = 0, []
    for number in range(runs):
        copy = shutil.copytree(trained.folder, folder / "copy")
        run = sifu.open_run(copy, engine=trained.engine())
        outcomes = []
        for clients in REQUESTS:
            outcomes += run.forget(clients, compare_scratch=number == 0)
        scratch = scratch or sum(outcome.scratch_rounds or 0 for outcome in outcomes)
        ratios.append(scratch / sum(outcome.rounds for outcome in outcomes))
        shutil.rmtree(copy)
    return sorted(ratios)


def main() -> None:
    """Print a line for each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[DEMO.seed])
    parser.add_argument("--runs", type=int, default=40)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for seed in chosen.seeds:
            ratios = gains(seed, chosen.runs, Path(folder))
            print(
                f"seed {seed}: worst {ratios[0]:.1f}x, median {statistics.median(ratios):.1f}x, best {ratios[-1]:.1f}x "
                f"over {chosen.runs} runs",
                flush=True,
            )


if __name__ == "__main__":
    main()
