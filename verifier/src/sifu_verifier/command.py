"""The command `sifu-verifier`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sifu_verifier.verification import not_recomputed, verify


def main(arguments: list[str] | None = None) -> int:
    """Verify the named run folders and print what was found.

    Args:
        arguments: Command line without the program's name; the process's own if None.

    Returns:
        Exit code: 0 if everything agrees, 1 if there is a problem.
    """
    parser = argparse.ArgumentParser(prog="sifu-verifier", description="Check what a run of sifu recorded.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    return max([print_verification(folder) for folder in parser.parse_args(arguments).runs])


def print_verification(folder: Path) -> int:
    """Print the problems of a run folder; return 1 if there are any."""
    problems = verify(folder)
    counted = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    print(f"{folder}: {counted if problems else 'all good'}", *problems, sep="\n  ")
    if not problems:
        for name, time in not_recomputed(folder).items():
            print(f"  not recomputed, figures erased {time}: {name}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
