"""Rounds on a GPU: how long they take, as groups, where the time goes, and where a GPU is worthwhile.

    python benchmarks/gpu_rounds.py times --data FOLDER --out benchmarks/results/gpu.json
    python benchmarks/gpu_rounds.py groups --out benchmarks/results/gpu_groups.json
    python benchmarks/gpu_rounds.py profile --out benchmarks/results/gpu_profile.json
    python benchmarks/gpu_rounds.py worth --out benchmarks/results/gpu_worth.json

Every part has `--help`.
"""

from __future__ import annotations

import argparse

from gpu import gpu_worth, group_rounds, round_profile, round_times

PARTS = {"times": round_times, "groups": group_rounds, "profile": round_profile, "worth": gpu_worth}


def main() -> None:
    """Execute the part that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    for name, part in PARTS.items():
        options = parts.add_parser(name, description=part.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        part.add_options(options)
    chosen = parser.parse_args()
    PARTS[chosen.part].run(chosen)


if __name__ == "__main__":
    main()
