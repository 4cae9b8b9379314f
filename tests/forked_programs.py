"""Programs of tests, each in a separate process that is forked from one with sifu and torch already imported.

Importing them takes three seconds of a core, and many tests start such a program.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch", "sifu.api", "sifu.engines.sim", "sifu.requests.worker"])


def run_program(program: Path, folder: Path, argument: str, environment: Mapping[str, str], timeout: float) -> str:
    """Run `python PROGRAM FOLDER ARGUMENT`, which must succeed.

    Args:
        program: File of the program.
        folder: Folder that it works in; what it prints is kept next to it until the program ends.
        argument: Second argument of the program.
        environment: Variables of the process; PYTHONPATH adds to the folders that modules are imported from.
        timeout: Seconds after which the program is killed.

    Returns:
        Standard output of the program.
    """
    printed, errors = (folder.with_name(f"{folder.name}.{name}") for name in ("out", "err"))
    errors.touch()
    arguments = [str(folder), argument]
    process = SERVER.Process(target=_execute, args=(program, arguments, dict(environment), printed, errors))
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
    assert process.exitcode == 0, f"exit code {process.exitcode}: {errors.read_text()[-4000:]}"
    output = printed.read_text()
    printed.unlink()
    errors.unlink()
    return output


def _execute(program: Path, arguments: list[str], environment: dict[str, str], printed: Path, errors: Path) -> None:
    import torch

    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [str(program.parent), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    sys.argv = [str(program), *arguments]
    torch.set_num_threads(1)
    for path, stream in ((printed, 1), (errors, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), stream)
    runpy.run_path(str(program), run_name="__main__")
