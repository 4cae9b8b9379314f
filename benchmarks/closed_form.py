"""Benchmarks of closed-form heads: costs, hospitals and patients that leave.

    python benchmarks/closed_form.py costs --data FOLDER --out benchmarks/results/closed_form.json
    python benchmarks/closed_form.py hospitals --data FOLDER --out benchmarks/results/hospitals.json

For a quick look: `costs --features 512 --clients 100 1000 --images 1000`.
"""

from __future__ import annotations

import argparse

from heads import costs, hospital_leaves


def main() -> None:
    """Execute the chosen part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    for name, about, add_options, run in (
        ("costs", costs.__doc__, costs.add_options, costs.run),
        ("hospitals", hospital_leaves.__doc__, hospital_leaves.add_options, hospital_leaves.run),
    ):
        part = parts.add_parser(name, description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
        add_options(part)
        part.set_defaults(run=run)
    chosen = parser.parse_args()
    chosen.run(chosen)


if __name__ == "__main__":
    main()
