"""Runner of the commands and programs in documents; each runs in a process forked after all imports.

A task is a line of JSON on standard input: the folder to work in, and either a command line of `sifu`, the text of a
program or the path of one. The answer is a line of JSON on standard output, with its status and output. Typer builds
the parsers before the forks, because that takes longer than most commands.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import runpy
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import typer.main

import sifu.cli.main as command_line

NEEDED_LATER = (
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
    "rich.progress",
    "rich.table",
    "safetensors.torch",
    "scipy.linalg",
    "scipy.stats",
    "sifu.audit",
    "sifu.engines.sim",
    "sifu.plots",
    "sifu.report",
)
"""Modules that commands import lazily; imported before the forks."""
PATIENCE = 600
"""Seconds after which a process counts as hanging."""


def work(command: str = "", text: str = "", path: str = "") -> None:
    """Execute one task in this process."""
    if command:
        sys.argv = command.split()
        command_line.main()
    elif text:
        exec(compile(text, "example", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [path]
        sys.path.insert(0, str(Path(path).parent))
        runpy.run_path(path, run_name="__main__")


def run_forked(folder: str, **task: str) -> dict[str, Any]:
    """Run a task in `folder`, in a separate process; return its status and output."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            signal.alarm(PATIENCE)
            os.chdir(folder)
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            status = 0
            try:
                work(**task)
            except SystemExit as leaving:
                status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
            except BaseException:
                traceback.print_exc()
                status = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        printed = []
        for stream in (out, err):
            stream.seek(0)
            printed.append(stream.read().decode(errors="replace"))
    return {"status": status, "out": printed[0], "err": printed[1]}


def main() -> None:
    for name in NEEDED_LATER:
        importlib.import_module(name)
    typer.main.get_command = functools.cache(typer.main.get_command)
    typer.main.get_command(command_line.app)
    for line in sys.stdin:
        print(json.dumps(run_forked(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
