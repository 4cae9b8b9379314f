"""Short-lived programs of a deployment, started without the seconds that importing Flower and torch takes.

SuperExec starts a process for every message, and `flwr` and `sifu` are processes too. Each runs Flower's or sifu's own
entry point with its own arguments, environment, folder and outputs, but in a fork of this process instead of a new
interpreter. This process has imported everything, has no threads and has never run any of the programs.
`write_programs` replaces each program by a script. The script passes everything to the fork, lives as long as it, and
returns its exit code; if the script is killed, so is the fork.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

ENTRY_POINTS = {
    "flower-superexec": "flwr.supercore.cli:flower_superexec",
    "flwr": "flwr.cli.app:app",
    "flwr-clientapp": "flwr.supernode.cli:flwr_clientapp",
    "flwr-serverapp": "flwr.superlink.cli:flwr_serverapp",
    "sifu": "sifu.cli.main:main",
}
ALSO = ("numpy", "torch", "sifu.engines.flower.exchange", "sifu.engines.ready", "sifu.server.flower_app")
STANDS_FOR = "for-"
"""Prefix of a fork's process name, followed by the pid of its script; `deployment.descendants` reads it."""
SCRIPT = """#!{python} -SE
import json, os, signal, socket, sys
link = socket.socket(socket.AF_UNIX)
link.connect({address!r})
request = json.dumps([{name!r}, os.getpid(), os.getcwd(), sys.argv, dict(os.environ)]).encode()
socket.send_fds(link, [len(request).to_bytes(8, "big")], [0, 1, 2])
link.sendall(request)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: link.sendall(bytes([number])))
code = int.from_bytes(link.recv(8) or b"\\x89", "big")
sys.exit(code)
"""


def write_programs(folder: Path, address: str) -> None:
    """Write a script for each program that asks the process at `address` to run it."""
    folder.mkdir()
    for name in ENTRY_POINTS:
        (folder / name).write_text(SCRIPT.format(python=sys.executable, address=address, name=name))
        (folder / name).chmod(0o755)


def fork_for_scripts(listener: socket.socket) -> str:
    """Fork for each script; return only in the forks, with the name of the program to run."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        link, _ = listener.accept()
        if os.fork() == 0:
            break
        link.close()
    listener.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, files, _, _ = socket.recv_fds(link, 8, 3)
    with link.makefile("rb") as reader:
        name, script, folder, arguments, environment = json.loads(reader.read(int.from_bytes(length, "big")))
    fork = os.fork()
    if fork:
        for file in files:
            os.close(file)
        guard(link, fork)
    link.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    Path("/proc/self/comm").write_text(f"{STANDS_FOR}{script}")
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.path[0] = arguments, str(Path(sys.executable).parent)
    sys.modules["numpy"].random.seed()  # a new state, as in a new process; Python reseeds its own generator
    return str(name)


def guard(link: socket.socket, fork: int) -> None:
    """Forward the script's signals to its fork, kill the fork when the script ends, and report the fork's exit code."""
    ended = os.pidfd_open(fork)
    while ended not in select.select([link, ended], [], [])[0]:
        for number in link.recv(8) or [signal.SIGKILL]:
            os.kill(fork, number)
    code = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
    with contextlib.suppress(OSError):
        link.sendall((code if code >= 0 else 128 - code).to_bytes(8, "big"))
    os._exit(0)


def run(entry_point: Callable[[], object]) -> None:
    """Exit as `sys.exit(entry_point())` does, without tearing down imported modules, which takes about a second."""
    try:
        code = entry_point()
    except SystemExit as ended:
        code = ended.code
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def main() -> None:
    """Import the modules of the programs and the named ones, then serve the socket given as standard input."""
    entry_points = {}
    for module in (*ALSO, *sys.argv[1:]):
        importlib.import_module(module)
    for name, place in ENTRY_POINTS.items():
        module, _, function = place.partition(":")
        entry_points[name] = getattr(importlib.import_module(module), function)
    assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread: a fork would not have it"
    gc.freeze()
    run(entry_points[fork_for_scripts(socket.socket(fileno=0))])


if __name__ == "__main__":
    main()
