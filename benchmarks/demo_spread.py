"""Spread of the demo's gain over noise draws and seeds; the demo draws fresh noise every time, and its seed was chosen.

    python benchmarks/demo_spread.py --seeds 2 3 4 5 6 7 --runs 40
    python benchmarks/demo_spread.py --runs 1 --figure docs/images/rounds.png    # the figure of the README

Trains the demo's federation once for each seed, then executes the demo's three requests many times on copies of that
run, and prints the ratio of Scratch's rounds to theirs: worst, median, best.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import sifu
from sifu.cli.demo import DEMO, REQUESTS, rounds_from_scratch


def gains(seed: int, runs: int, folder: Path, figure: Path | None = None) -> list[float]:
    """Return the ratios of Scratch's rounds to those of the three requests, for `runs` fresh draws of the noise."""
    spec = replace(DEMO, seed=seed)
    trained, scratch = sifu.train(spec, run=folder / f"seed-{seed}"), rounds_from_scratch(spec)
    ratios = []
    for _ in range(runs):
        copy = shutil.copytree(trained.folder, folder / "copy")
        run = sifu.open_run(copy, engine=trained.engine())
        rounds = [run.forget(clients)[0].rounds for clients in REQUESTS]
        ratios.append(sum(scratch) / sum(rounds))
        shutil.rmtree(copy)
    if figure is not None:
        draw(rounds, scratch, figure)
    return sorted(ratios)


def draw(rounds: list[int], scratch: list[int], file: Path) -> None:
    """Draw the rounds of each request next to those of training from scratch, and the totals below."""
    import matplotlib.pyplot as plt

    names = [f"r{number + 1}" for number in range(len(rounds))] + ["total"]
    done, again = [*rounds, sum(rounds)], [*scratch, sum(scratch)]
    figure, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
    axes.set_title(
        f"Forgetting took {done[-1]} rounds, from scratch it takes {again[-1]}: {again[-1] / done[-1]:.1f}x fewer",
        loc="left", fontweight="bold",
    )  # fmt: skip
    for line, (here, there) in enumerate(zip(done, again, strict=True)):
        axes.barh(-line + 0.18, here, 0.36, color="#0072b2", label="as it was done" if line == 0 else None)
        axes.barh(
            -line - 0.18, there, 0.36, color="#b4bac4", label="training again from scratch" if line == 0 else None
        )
        axes.text(here, -line + 0.18, f"  {here}   {there / here:.1f}x fewer", va="center", fontweight="bold")
        axes.text(there, -line - 0.18, f"  {there}", va="center")
    axes.set(
        yticks=[-line for line in range(len(names))], yticklabels=names, xlabel="Rounds", xlim=(0, 1.3 * again[-1])
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(loc="upper right", frameon=False)
    figure.savefig(file, dpi=130)


def main() -> None:
    """Print a line for each seed."""
    os.environ["SIFU_HEADS"] = os.devnull  # copies of a run may continue
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[DEMO.seed])
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--figure", type=Path, help="file for a figure of the last run")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for seed in chosen.seeds:
            ratios = gains(seed, chosen.runs, Path(folder), chosen.figure)
            print(
                f"seed {seed}: worst {ratios[0]:.1f}x, median {statistics.median(ratios):.1f}x, best {ratios[-1]:.1f}x "
                f"over {chosen.runs} runs",
                flush=True,
            )


if __name__ == "__main__":
    main()
