"""Power losses replayed from the log of a command's calls (io_log.c).

Every command that writes runs once, and each of its calls that change files is logged with its bytes. A power loss at a
call keeps everything synced before it. Of the unsynced changes, each folder may keep any number of its first name
changes, and each file any of its writes, in part or in whole, also later ones without earlier ones. As a check of the
log itself, a disk that lost nothing must equal the one that the command left.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest

from run_tools import query, scalars
from secret_draws import repeat_draws
from sifu.api import verify_run
from sifu.cli.main import main as sifu_command

ROOT = 0
DRAWN = ("known", "run events", "again events")
"""Results that may differ in another attempt: ids and keys are random, and the attempt itself may be recorded."""
REBUILT = "-shm"
"""Suffix of SQLite's index of its log, which no power loss keeps and the next process rebuilds."""


@dataclass
class Change:
    """One change of the disk: a name in a folder, bytes or size of a file, or a sync of either."""

    kind: str
    node: int
    name: str = ""
    target: int | None = None
    offset: int = 0
    data: bytes = b""


@dataclass
class Disk:
    """Files and folders by number: the content of each file, the names in each folder."""

    files: dict[int, bytes] = field(default_factory=dict)
    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})

    @staticmethod
    def read(root: Path) -> Disk:
        """Return the content of a folder."""
        disk = Disk()
        disk._read(root, ROOT)
        return disk

    def _read(self, place: Path, node: int) -> None:
        for path in sorted(place.iterdir()):
            number = len(self.files) + len(self.folders)
            if not path.name.endswith(REBUILT):
                self.folders[node][path.name] = number
                if path.is_dir():
                    self.folders[number] = {}
                    self._read(path, number)
                else:
                    self.files[number] = path.read_bytes()

    def write(self, root: Path, node: int = ROOT) -> None:
        """Empty a folder and write everything into it."""
        if node == ROOT:
            for entry in root.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        for name, number in self.folders[node].items():
            if number in self.folders:
                (root / name).mkdir(mode=0o700)
                self.write(root / name, number)
            else:
                (root / name).touch(mode=0o600)
                (root / name).write_bytes(self.files[number])

    def content(self, node: int = ROOT, path: str = "") -> dict[str, bytes | None]:
        """Return every path with its bytes; None for a folder."""
        found: dict[str, bytes | None] = {}
        for name, number in self.folders[node].items():
            here = f"{path}/{name}"
            found |= {here: None} | self.content(number, here) if number in self.folders else {here: self.files[number]}
        return found


def read_log(log: bytes, root: Path, before: Disk) -> list[Change]:
    """Return the changes in a log, each with the file or folder that had its path at the time."""
    names: dict[str, int] = {str(root): ROOT}

    def know(node: int, path: str) -> None:
        for name, number in before.folders[node].items():
            names[f"{path}/{name}"] = number
            if number in before.folders:
                know(number, f"{path}/{name}")

    know(ROOT, str(root))
    counter = iter(range(1_000_000, 1_000_000_000))
    changes: list[Change] = []

    def entry(path: str, number: int | None) -> None:
        folder, name = os.path.split(path)
        changes.append(Change("name", names[folder], name, number))
        if number is None:
            names.pop(path, None)
        else:
            names[path] = number

    for op, offset, path, other, data in _records(log):
        path, other = os.path.normpath(path), os.path.normpath(other)
        if path.endswith(REBUILT):
            continue
        if op in ("create", "folder"):
            number = next(counter)
            changes.append(Change(op, number))
            entry(path, number)
        elif op in ("rename", "link"):
            moved = {place: number for place, number in names.items() if place == path or place.startswith(f"{path}/")}
            if op == "rename":  # the new name exists before the old one is removed
                entry(other, names[path])
                entry(path, None)
                for place, number in moved.items():
                    names.pop(place, None)
                    names[other + place[len(path) :]] = number
            else:
                entry(other, names[path])
        elif op == "remove":
            entry(path, None)
        elif path in names:
            changes.append(Change(op, names[path], offset=offset, data=data))
    return changes


def _records(log: bytes) -> Iterator[tuple[str, int, str, str, bytes]]:
    place = 0
    while place < len(log):
        end = log.index(b"\0\n", place)
        head, other = log[place:end].split(b"\0")
        op, offset, length, path = head.decode().split(" ", 3)
        place = end + 2 + int(length)
        yield op, int(offset), path, other.decode(), log[end + 2 : place]


def after_power_loss(before: Disk, changes: list[Change], keep: Callable[[str], float]) -> Disk:
    """Return a disk that a power loss after these changes may leave.

    `keep` draws which share of the unsynced changes survives: of a folder's name changes, and of a write.
    """
    disk = Disk(dict(before.files), {number: dict(names) for number, names in before.folders.items()})
    synced = {change.node: at for at, change in enumerate(changes) if change.kind == "sync"}
    unsynced: dict[int, list[Change]] = {}
    for at, change in enumerate(changes):
        if change.kind == "create":
            disk.files[change.node] = b""
        elif change.kind == "folder":
            disk.folders[change.node] = {}
        elif change.kind in ("data", "size"):
            share = 1.0 if at < synced.get(change.node, -1) else keep("data")
            _apply(disk, change, share)
        elif change.kind == "name":
            if at < synced.get(change.node, -1):
                _rename(disk, change)
            else:
                unsynced.setdefault(change.node, []).append(change)
    for later in unsynced.values():
        for change in later[: round(keep("names") * len(later))]:
            _rename(disk, change)
    return disk


def _apply(disk: Disk, change: Change, share: float) -> None:
    content = disk.files[change.node]
    if change.kind == "size":
        if share >= 0.5:
            disk.files[change.node] = content[: change.offset].ljust(change.offset, b"\0")
        return
    data = change.data[: round(share * len(change.data))]
    if data:
        start = content[: change.offset].ljust(change.offset, b"\0")
        disk.files[change.node] = start + data + content[change.offset + len(data) :]


def _rename(disk: Disk, change: Change) -> None:
    if change.target is None:
        disk.folders[change.node].pop(change.name, None)
    else:
        disk.folders[change.node][change.name] = change.target


def called(root: Path, arguments: list[str], log: Path | None = None, fault: tuple[int, int] | None = None) -> int:
    """Run a command in a child; return its exit code, negative if a signal ended it.

    Args:
        root: The folder to run it in.
        arguments: The command line after `sifu`.
        log: File to log its calls in; their number is written to `calls` next to it.
        fault: Number of the call that goes wrong, and how (io_log.c).
    """
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.chdir(root)
            with open(root.parent / "printed", "w") as printed:
                os.dup2(printed.fileno(), 1)
                os.dup2(printed.fileno(), 2)
            sys.argv = ["sifu", *arguments]
            if log is not None:
                ctypes.CDLL(None).io_log_start(str(log).encode(), str(root).encode())
                ctypes.CDLL(None).io_log_fault(*fault or (-1, 0))
            repeat_draws(pytest.MonkeyPatch())
            sifu_command()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        if log is not None:
            log.with_name("calls").write_text(str(ctypes.CDLL(None).io_log_points()))
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def result_of(root: Path) -> dict[str, Any]:
    """Return what the commands so far acknowledged: the tables of each run, and other files by name."""
    result: dict[str, Any] = {}
    for place in ("run", "again"):
        if (root / place / "run.db").exists():
            problems = verify_run(root / place).problems
            result[place] = problems or scalars(root / place)
            decisions = "SELECT kind FROM events WHERE kind NOT IN ('rounds', 'round') ORDER BY seq"
            result[f"{place} events"] = query(root / place, decisions)
    for path in root.iterdir():
        if path.is_file() and path.name != "heads":
            result[path.name] = path.stat().st_size
    tokens = root / ".sifu-console" / "tokens.json"
    result["tokens"] = [row["name"] for row in json.loads(tokens.read_bytes())["tokens"]] if tokens.exists() else []
    known = root / "heads"
    result["known"] = sorted(set(re.findall('"run": "([0-9a-f]+)"', known.read_text()))) if known.exists() else []
    return result
