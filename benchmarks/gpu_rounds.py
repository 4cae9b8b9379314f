"""Rounds on a GPU: times, groups, profile, and the size from which a GPU is worthwhile.

    python benchmarks/gpu_rounds.py times --data FOLDER --out benchmarks/results/gpu.json
    python benchmarks/gpu_rounds.py groups --out benchmarks/results/gpu_groups.json
    python benchmarks/gpu_rounds.py profile --out benchmarks/results/gpu_profile.json
    python benchmarks/gpu_rounds.py worth --out benchmarks/results/gpu_worth.json

Each part has a `--help` option.
"""

from __future__ import annotations

import argparse

from gpu import gpu_worth, group_rounds, round_profile, round_times

PARTS = {"times": round_times, "groups": group_rounds, "profile": round_profile, "worth": gpu_worth}


def main() -> None:
    """Execute the chosen part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    for name, part in PARTS.items():
        options = parts.add_parser(name, description=part.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        part.add_options(options)
    chosen = parser.parse_args()
    PARTS[chosen.part].run(chosen)


if __name__ == "__main__":
    main()
