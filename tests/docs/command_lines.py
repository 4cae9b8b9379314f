"""Runs command lines one after another; each of `sifu` in a separate process that is forked after all imports.

    python tests/docs/command_lines.py COMMANDS.json

Prints the output of the first command that fails, and ends with its status.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import sifu.cli.main as command_line

# What commands import when they need it; a fork begins with all of it.
import sifu.plots
import sifu.report  # noqa: F401
from sifu.engines import sim  # noqa: F401


def run_forked(command: str, output: Path) -> int:
    """The exit status of a command line; what it printed is in `output`."""
    child = os.fork()
    if child == 0:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.argv = command.split()
        status = 0
        try:
            command_line.main()
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    output = Path("output-of-a-command.txt")
    for command in json.loads(Path(sys.argv[1]).read_text()):
        if command.startswith("sifu "):
            status = run_forked(command, output)
        else:
            status = subprocess.run(["sh", "-c", command], check=False).returncode
        if status != 0:
            print(f"{command}\nended with {status}\n{output.read_text(errors='replace')}")
            sys.exit(1)


if __name__ == "__main__":
    main()
