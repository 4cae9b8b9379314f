"""The command `sifu-verifier`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sifu_verifier.certificate_file import verify_certificate
from sifu_verifier.verification import on_record, verify


def main(arguments: list[str] | None = None) -> int:
    """Verify the named run folders, or a certificate, and print their problems.

    Args:
        arguments: Command line without the program's name. If None, the arguments of the process are used.

    Returns:
        Exit code: 0 if everything agrees, 1 if there is a problem.
    """
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["certificate"]:
        parser = argparse.ArgumentParser(prog="sifu-verifier certificate", description="Check a certificate file.")
        parser.add_argument("file", type=Path, metavar="FILE", help="public certificate or auditor's copy")
        parser.add_argument("--public-key", metavar="HEX", help="the operator's key, known from elsewhere")
        options = parser.parse_args(given[1:])
        good = "all good" if options.public_key else "consistent; who signed it is unknown without --public-key"
        return print_problems(options.file, verify_certificate(options.file, options.public_key), good)
    parser = argparse.ArgumentParser(
        prog="sifu-verifier",
        description="Check what a run of sifu recorded. To check a certificate alone: sifu-verifier certificate FILE",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    return max([print_verification(folder) for folder in parser.parse_args(given).runs])


def print_problems(path: Path, problems: list[str], good: str = "all good") -> int:
    """Print the problems of a file or folder; return 1 if there are any."""
    counted = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    print(f"{path}: {counted if problems else good}", *problems, sep="\n  ")
    return int(bool(problems))


def print_verification(folder: Path) -> int:
    """Verify a run folder, print its problems, and return 1 if there are any."""
    problems = verify(folder)
    print_problems(folder, problems)
    for name in [] if problems else on_record(folder):
        print(f"  on the signed record, at least in part: {name}")
    return int(bool(problems))
