"""Crashes of commands: a fault at any call that changes files, or a power loss there, and what is left of the work.

Every command runs once, and each of its calls that change files is logged with its bytes (io_log.c), SQLite's calls
included. A power loss at a call keeps everything synced before it. Of the unsynced changes, each folder may keep any
number of its first name changes, and each file any of its writes, in part or in whole, also later ones without earlier
ones. As a check of the log itself, a disk that lost nothing must equal the one that the command left.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import os
import random
import re
import secrets
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

import sifu
from sifu.cli.main import main as sifu_command

ROOT = 0
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


# -- commands ----------------------------------------------------------------------------------------------------------

KILL, FULL, BROKEN, FULL_FROM_NOW, HALF = 1, 2, 3, 4, 5
"""Numbers of the faults in io_log.c."""
FAULTS = ("kill", "ENOSPC", "EIO", "half a write", "power loss")
TIMES = re.compile(r"\d{4}-\d\d-\d\d(T[\d:.]+Z)?")
NOT_COMPARED = ("run", "cost", "days_left", "failure", "held_out")
"""Keys that depend on the place, the day or the attempt; held-out figures are measured again by `sifu evaluate`."""


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
            repeat_draws(" ".join(arguments))
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


def repeat_draws(words: str) -> None:
    """Draw the same noise and group keys in every attempt of a command, and let every round be committed.

    Noise takes hundreds of bytes and depends on its size alone, keys take 32; ids of runs stay random.
    """
    drawn, keys, clock = secrets.token_bytes, random.Random(words), itertools.count(0, 10)

    def token_bytes(nbytes: int | None = None) -> bytes:
        size = 32 if nbytes is None else nbytes
        return random.Random(size).randbytes(size) if size >= 256 else keys.randbytes(32) if size == 32 else drawn(size)

    secrets.token_bytes = token_bytes
    time.monotonic = lambda: float(next(clock))


def results_in(root: Path) -> dict[str, Any]:
    """Return what the commands so far acknowledged: the statements of each run, and other files by name."""
    found: dict[str, Any] = {}
    for place in ("run", "again"):
        if (root / place / "run.db").exists():
            try:
                found[f"{place} problems"] = sifu.verify(root / place).problems
                found |= {f"{place} {name}": value for name, value in _statements(root / place).items()}
            except sifu.SifuError as error:
                found[f"{place} problems"] = [str(error)]
    for path in root.iterdir():
        if path.is_file() and path.name != "heads":
            found[path.name] = path.stat().st_size
    known = root / "heads"
    found["known"] = sorted(set(re.findall('"run": "([0-9a-f]+)"', known.read_text()))) if known.exists() else []
    return found


def _statements(folder: Path) -> dict[str, Any]:
    """Return what a run states, without times: status, model, history, requests with certificates, and their steps."""
    run = sifu.open_run(folder)
    status, requests = run.status(), run.request_records()
    with tempfile.TemporaryDirectory() as place:
        try:
            tensors = load_file(run.export(Path(place) / "model.safetensors"))
        except sifu.InputError:  # nothing is released yet
            tensors = {}
    model = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        model.update(f"{name} {tensor.dtype} {tensor.shape}".encode() + tensor.tobytes())
    stated = []
    for request in requests:
        body = run.certificate(request.request, "auditor").body if request.status == "done" else {}
        subjects = [(row["clients"], row["psi"], row["charge"]) for row in body.get("subjects", ())]
        rest = {key: value for key, value in asdict(request).items() if key not in (*NOT_COMPARED, "steps")}
        stated.append((rest, subjects, [(row["name"], row["status"]) for row in body.get("premises", ())]))
    compared = {
        "status": {key: value for key, value in status.to_mapping().items() if key not in (*NOT_COMPARED, "requests")},
        "model": model.hexdigest(),
        "history": [asdict(row) for row in run.history()],
        "requests": stated,
    }
    steps = [f"{request.request} {step.status}" for request in requests for step in request.steps]
    return json.loads(TIMES.sub("TIME", json.dumps(compared, default=str))) | {"steps": steps}


@dataclass
class Command:
    """Command of a job: the disk before it, its calls, and what was acknowledged before and after."""

    words: str
    before: Disk
    acknowledged: dict[str, Any]
    done: dict[str, Any]
    changes: list[Change]
    calls: int

    @property
    def arguments(self) -> list[str]:
        """Words of the command line."""
        return self.words.split()


class Job:
    """Job in a folder, after every command ran once; `interrupted` before one kills it while its request runs."""

    def __init__(self, root: Path, commands: list[str], write_inputs: Callable[[Path], None]) -> None:
        self.root, self.log = root, root.parent / "log"
        self.commands: list[Command] = []
        self.wrong: list[str] = []
        os.environ["SIFU_HEADS"] = str(root / "heads")
        write_inputs(root)
        for words in commands:
            if words.startswith("interrupted "):
                self._interrupt(words.split()[1:])
            else:
                self._run(words)

    @property
    def printed(self) -> str:
        """Output of the last command."""
        return (self.root.parent / "printed").read_text()[-600:]

    def _run(self, words: str) -> None:
        self.log.unlink(missing_ok=True)
        acknowledged = results_in(self.root)  # first: after a kill, verification extends the memory of heads
        before = Disk.read(self.root)
        code = called(self.root, words.split(), self.log)
        if code != 0:
            raise RuntimeError(f"{words}: exit code {code} without a fault: {self.printed}")
        after, logged = Disk.read(self.root), self.log.read_bytes()
        changes = read_log(logged, self.root, before)
        if after_power_loss(before, changes, lambda kind: 1.0).content() != after.content():
            raise RuntimeError(f"{words}: replaying the log does not give the disk")
        if changes:
            calls = int(self.log.with_name("calls").read_text())
            self.commands.append(Command(words, before, acknowledged, results_in(self.root), changes, calls))
            after.write(self.root)

    def _interrupt(self, arguments: list[str]) -> None:
        before = Disk.read(self.root)
        for at in range(20, 2000, 10):
            before.write(self.root)
            if called(self.root, arguments, self.log, (at, KILL)) == 0:
                break
            if any(request.status == "running" for request in sifu.open_run(self.root / "run").request_records()):
                return
        raise RuntimeError(f"{' '.join(arguments)}: no kill left the request running")

    def trials(self) -> list[tuple[int, str, int]]:
        """Return every trial: number of the command, fault, and number of the call."""
        return [
            (number, fault, at)
            for number, command in enumerate(self.commands)
            for fault in FAULTS
            for at in range(1, (len(command.changes) if fault == "power loss" else command.calls) + 1)
        ]

    def attempt(self, number: int, fault: str, at: int) -> str:
        """Make a trial and let the same command finish; return its outcome."""
        command, draw = self.commands[number], random.Random(f"{number} {fault} {at}")
        if fault == "power loss":
            keep: Callable[[str], float] = draw.choice(
                [lambda kind: 0.0, lambda kind: draw.choice((0.0, 1.0)), lambda kind: draw.random()]
            )
            after_power_loss(command.before, command.changes[:at], keep).write(self.root)
            problem = self._lost(command, at == len(command.changes)) or self._unfinished(command)
            return f"wrong: {problem}" if problem else fault
        command.before.write(self.root)
        full = FULL if at % 2 else FULL_FROM_NOW
        kind = {"kill": KILL, "ENOSPC": full, "EIO": BROKEN, "half a write": HALF}[fault]
        self.log.unlink(missing_ok=True)
        code = called(self.root, command.arguments, self.log, (at, kind))
        if kind != KILL and (code in (1, 70) or code < 0 or "Traceback" in self.printed):
            return f"wrong: it did not end in a sentence: {self.printed}"
        problem = self._lost(command, code == 0) or self._unfinished(command)
        return f"wrong: {problem}" if problem else fault

    def _lost(self, command: Command, done: bool) -> str | None:
        """Return what is lost of the acknowledged results, including the command's own if it is done."""
        there, expected = results_in(self.root), command.done if done else command.acknowledged
        for name, value in expected.items():
            found, (place, _, what) = there.get(name), name.partition(" ")
            if what == "problems":
                # Until a permanent erasure is finished, verification reports it, and files may be left over.
                if found is None or (found and not any("permanent" in problem for problem in found)):
                    return f"{place} is damaged: {str(found)[:300]}"
            elif what == "steps":
                if not set(value) <= set(found or ()):
                    return f"steps are lost: {sorted(set(value) - set(found or ()))}"
            elif what:
                if done and found != value:
                    return f"{name} is another: {_difference(found, value)}"
            elif name == "known":
                if not set(value) <= set(found or ()) and not done:
                    return f"known heads are lost: {found}"
            elif found is None or found < 0.9 * value:  # random salts and times change the size of an archive
                return f"{name} is lost: {found}"
        return None

    def _unfinished(self, command: Command) -> str | None:
        """Run the command again; return how the result differs from the uninterrupted command's."""
        code = called(self.root, command.arguments)
        if code not in (0, 2):  # 2: already done
            return f"again it ends with {code}: {self.printed}"
        there = results_in(self.root)
        for name, value in command.done.items():
            if name == "known" or (name.endswith((".zip", ".jsonl")) and name in there):
                continue
            if there.get(name) != value:
                return f"again, {name} is another ({code}): {_difference(there.get(name), value)}, {self.printed}"
        left = [path.name for place in ("run", "again") for path in (self.root / place).rglob(".tmp-*")]
        return f"{left} was left" if left else None


def _difference(found: Any, expected: Any) -> str:
    if isinstance(found, dict) and isinstance(expected, dict):
        return str({key: (found.get(key), expected.get(key)) for key in expected if found.get(key) != expected[key]})[
            :300
        ]
    return f"{str(found)[:300]} instead of {str(expected)[:300]}"
