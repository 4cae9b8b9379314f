"""Random faults in every command that writes: python tests/faults/random_faults.py --each 300 --jobs 4 --log FILE.jsonl

The scenarios together contain every command that writes. A trial draws a command and one of

* a kill before one of its calls that change files;
* a failing call: the disk is full, at that call or from then on, or an I/O error, or half of the bytes are written;
* a power loss: any part of the changes not synced before that call is lost (`power_loss.py`).

Afterwards everything that earlier commands acknowledged must exist, and the same command must finish the work: the run
verifies and records what the uninterrupted run does. A failing call must end in an error message.

Each share of trials prepares its scenario in its own folder and adds a line to the log when it ends; a repeated call
makes the missing shares. `--seed` draws other faults. Prints the counts; the exit code is 3 if anything was lost. Needs
Linux and a C compiler.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import stat
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from power_loss import DRAWN, Change, Disk, after_power_loss, called, read_log, result_of

from run_tools import query, small_spec, spec_for
from shares import Line, Share, work_off
from sifu.run import group_training, training

KILL, FULL, BROKEN, FULL_FROM_NOW, HALF = 1, 2, 3, 4, 5
"""Numbers of the faults in io_log.c."""
KINDS = ("kill", "failing call", "power loss")
EACH_SHARE = 20
"""Trials of each kind in a share."""
INTERRUPTED = "interrupted"
"""First word of a command that is killed while its request runs, to prepare the next command."""
NOISE = small_spec(
    local={"rate": 0.05, "steps": 3},
    keep={"models": 4},
    stop={"target": 0.0, "max_rounds": 2},
)
TABLE = """
requests.approval = "one"
model.kind = "ridge"
[data]
name = "table"
partition = "given"
file = "a.csv"
label = "ill"
client = "hospital"
id = "patient"
classes = "no,yes"
scale = "age=50,20\\npressure=130,30"
held_out = 0.2
preprocessing = "fixed"
"""
SCENARIOS: dict[str, list[str]] = {
    "noise": [
        "init spec.toml",
        "clients add run --name client-000 --node-key node.pub",
        "clients block run --name client-000",
        "--witness witness.jsonl train small.toml --run fresh/run",
        "train small.toml --run run",
        "request run --clients client-000 --id a",
        "decide run a verify",
        "forget run --request a",
        "forget run --clients client-001 --request b --retention strict --method scratch",
        "request run --clients client-002 --id w",
        "forget run --clients client-003 --request c --level none",
        "decide run w withdraw",
        "update run",
        "forget run --clients client-004 --records 0,1 --request d --method scratch --level none",
        "forget run --clients client-005 --request n --level none",
        "evaluate run",
        "purge run",
        "export run --model model.safetensors",
        "report run",
        "certificate run a --bundle bundle.json",
        "key run --rotate",
        "backup run backup.zip",
        "restore backup.zip again",
        f"{INTERRUPTED} forget run --clients client-006 --request s --level none",
        "decide run s settle --reason gone",
        "token create . --name ann --role auditor",
        "token revoke . ann",
    ],
    "table": [
        "init spec.toml --from a.csv --label ill",
        "train table.toml --run run",
        "request run --client h0 --records P0000,P0004,P0008,P0012 --id a --actor ann",
        "decide run a approve --actor bob",
        "forget run --request a",
        "request run --client h1 --id b --actor ann",
        "decide run b approve --actor bob",
        "request run --client h2 --id c --actor ann",
        "decide run c refuse --reason no --actor bob",
        "update run",
        "join run --file new.csv",
        "forget run",
        "evaluate run",
        "export run --model model.safetensors",
        "predict model.safetensors new.csv --output predicted.csv",
        "purge run",
        "backup run backup.zip",
        "restore backup.zip again",
    ],
    "groups": [
        "train groups.toml --run run",
        "forget run --client client-000 --method groups --request a",
        "update run",
        "forget run --client client-003 --method groups --retention strict --request b",
        "update run",
        "purge run",
    ],
}


def write_inputs(root: Path) -> None:
    """Write the specs, tables and keys that the commands read."""
    groups = spec_for("groups", data={"clients": 6, "samples_per_client": 10},
                      groups={"count": 3, "rounds": 2},
                      stop={"target": 0.0, "max_rounds": 3})  # fmt: skip
    for name, spec in {"small": NOISE, "groups": groups}.items():
        lines = [
            f"{section}.{key} = {json.dumps(value)}" for section, keys in spec.items() for key, value in keys.items()
        ]
        (root / f"{name}.toml").write_text("\n".join(lines) + "\n")
    (root / "table.toml").write_text(TABLE)
    draw = random.Random(1)
    rows = [(draw.randint(30, 80), draw.randint(90, 190)) for _ in range(90)]
    lines = [
        f"P{n:04},h{n % 4},{age},{pressure},{'yes' if age > 55 else 'no'}\n" for n, (age, pressure) in enumerate(rows)
    ]
    header = "patient,hospital,age,pressure,ill\n"
    (root / "a.csv").write_text(header + "".join(lines[:60]))
    (root / "new.csv").write_text(header + "".join(lines[60:]).replace(",h", ",new").replace("new1", "new0"))
    key = "AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43
    (root / "node.pub").write_text(f"ssh-ed25519 {key} node\n")


@dataclass
class Command:
    """Command of a scenario: the disk before it, its calls, and what it acknowledged."""

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


class Scenario:
    """Scenario in a folder, after every command ran once."""

    def __init__(self, root: Path, commands: list[str]) -> None:
        self.root, self.log = root, root.parent / "log"
        self.commands: list[Command] = []
        self.wrong: list[str] = []
        training.COMMIT_SECONDS = group_training.COMMIT_SECONDS = 0.0
        os.environ["SIFU_HEADS"] = str(root / "heads")
        write_inputs(root)
        (root / "fresh").mkdir()
        for words in commands:
            if words.startswith(INTERRUPTED):
                self._interrupt(words.split()[1:])
            else:
                self._run(words)

    @property
    def printed(self) -> str:
        """Output of the last command."""
        return (self.root.parent / "printed").read_text()[-600:]

    def _run(self, words: str) -> None:
        self.log.unlink(missing_ok=True)
        acknowledged = result_of(self.root)  # first: after a kill, verification extends the memory of heads
        before = Disk.read(self.root)
        code = called(self.root, words.split(), self.log)
        if code != 0:
            raise RuntimeError(f"{words}: exit code {code} without a fault: {self.printed}")
        after, logged = Disk.read(self.root), self.log.read_bytes()
        changes = read_log(logged, self.root, before)
        if after_power_loss(before, changes, lambda kind: 1.0).content() != after.content():
            raise RuntimeError(f"{words}: replaying the log does not give the disk")
        if changes:
            done, calls = result_of(self.root), int(self.log.with_name("calls").read_text())
            self.commands.append(Command(words, before, acknowledged, done, changes, calls))
            after_power_loss(before, changes, lambda kind: 0.0).write(self.root)
            problem = self._lost(self.commands[-1], True)
            self.wrong += [f"{words}: power lost after its end: {problem}"] if problem else []
            after.write(self.root)

    def _interrupt(self, arguments: list[str]) -> None:
        """Kill a command at the first tried call that leaves its request running."""
        before = Disk.read(self.root)
        for at in range(20, 2000, 10):
            before.write(self.root)
            if called(self.root, arguments, self.log, (at, KILL)) == 0:
                break
            if query(self.root / "run", "SELECT 1 FROM requests WHERE status = 'running'"):
                return
        raise RuntimeError(f"{' '.join(arguments)}: no kill left the request running")

    def trial(self, kind: str, draw: random.Random) -> tuple[str, str | None]:
        """Try one random fault; return its description and the problem after it."""
        command = draw.choice(self.commands)
        if kind == "power loss":
            at = len(command.changes) if draw.random() < 0.25 else draw.randrange(len(command.changes))
            styles: list[Callable[[str], float]] = [
                lambda kind: 0.0,
                lambda kind: draw.choice((0.0, 1.0)),
                lambda kind: draw.random(),
            ]
            after_power_loss(command.before, command.changes[:at], draw.choice(styles)).write(self.root)
            told = f"{command.words}: power lost at change {at} of {len(command.changes)}"
            return told, self._lost(command, at == len(command.changes)) or self._unfinished(command)
        command.before.write(self.root)
        fault = KILL if kind == "kill" else draw.choice((FULL, BROKEN, FULL_FROM_NOW, HALF))
        at = draw.randint(1, command.calls + 1)
        self.log.unlink(missing_ok=True)
        code = called(self.root, command.arguments, self.log, (at, fault))
        told = f"{command.words}: fault {fault} at call {at}, exit code {code}"
        if fault != KILL and (code in (1, 70) or code < 0 or "Traceback" in self.printed):
            return told, f"it did not end in a sentence: {self.printed}"
        return told, self._lost(command, code == 0) or self._unfinished(command)

    def _lost(self, command: Command, done: bool) -> str | None:
        """Return what is lost of the acknowledged results, including the command's own if it is done."""
        there, expected = result_of(self.root), command.done if done else command.acknowledged
        for name, value in expected.items():
            found = there.get(name)
            if name.endswith(" events"):
                if not done and (found or [])[: len(value)] != value:
                    return f"{name} are lost: {str(found)[:300]}"
            elif name in ("run", "again"):
                # Until a permanent erasure is finished, verification reports it, and files may be left over.
                problems = found if isinstance(found, list) else []
                unverified = [] if any("permanent" in problem for problem in problems) else problems
                if found is None or unverified or (done and found != value):
                    return f"{name} is damaged: {str(unverified or found)[:300]}"
            elif name in ("tokens", "known"):
                if not done and found != value and not set(value) <= set(found or ()):
                    return f"{name} are lost: {found}"
            elif found is None or found < 0.9 * value:  # random salts and times change the size of an archive
                return f"{name} is lost: {found}"
        return None

    def _unfinished(self, command: Command) -> str | None:
        """Run the command again; return how the result differs from the uninterrupted command's."""
        code = called(self.root, command.arguments)
        if code not in (0, 2):  # 2: already done
            return f"again it ends with {code}: {self.printed}"
        there = result_of(self.root)
        for name, value in command.done.items():
            found = there.get(name)
            if found != value and name not in DRAWN and not (found and name.endswith((".zip", ".jsonl", " events"))):
                return (
                    f"again it does not lead to the same {name} (exit code {code}): {str(found)[:300]}, {self.printed}"
                )
        left = [path.name for place in ("run", "again") for path in (self.root / place).rglob(".tmp-*")]
        return f"{left} was left" if left else None


def share_of(
    name: str, commands: list[str], number: int, seed: int, each: int, kinds: Sequence[str] = KINDS
) -> Callable[[Path], Line]:
    """Return a function that prepares the scenario of a share and tries faults of each kind."""

    def work(folder: Path) -> Line:
        (folder / "disk").mkdir()
        scenario, draw = Scenario(folder / "disk", commands), random.Random(f"{seed} {name} {number}")
        tried: Counter[str] = Counter()
        words: Counter[str] = Counter()
        wrong = list(scenario.wrong)
        for _ in range(each):
            for kind in kinds:
                told, problem = scenario.trial(kind, draw)
                tried[kind] += 1
                words[told.partition(":")[0]] += 1
                if problem:
                    wrong.append(f"{told}: {problem}")
        return {"tried": tried, "commands": words, "wrong": wrong}

    return work


def main() -> int:
    """Make the missing shares and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=300, help="faults of each kind, over all scenarios")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=list(SCENARIOS), action="append", help="scenarios to use; all by default")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after this many seconds")
    parser.add_argument("--log", type=Path, required=True, help="file of JSON lines to extend and continue")
    parser.add_argument("--unsynced", action="store_true", help="sync no folder and try power losses: must fail")
    chosen = parser.parse_args()
    if chosen.unsynced:
        sync = os.fsync
        os.fsync = lambda descriptor: None if stat.S_ISDIR(os.fstat(descriptor).st_mode) else sync(descriptor)  # type: ignore[assignment,arg-type]
    used = {name: commands for name, commands in SCENARIOS.items() if name in (chosen.only or SCENARIOS)}
    sizes = {name: sum(not words.startswith(INTERRUPTED) for words in used[name]) for name in used}
    shares, kinds = [], ("power loss",) if chosen.unsynced else KINDS
    for name, commands in used.items():
        trials = -(-chosen.each * sizes[name] // sum(sizes.values()))
        parts = [min(EACH_SHARE, trials - begin) for begin in range(0, trials, EACH_SHARE)]
        shares += [
            Share(
                f"{name} {chosen.seed}", number, len(parts), share_of(name, commands, number, chosen.seed, each, kinds)
            )
            for number, each in enumerate(parts)
        ]
    import torch  # imported once, for every child

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="sifu-faults-") as parent:
        lines = work_off(shares, Path(parent), chosen)
    tried, words = Counter[str](), Counter[str]()
    for line in lines:
        tried.update(line.get("tried", {}))
        words.update(line.get("commands", {}))
    problems = [f"{line['matrix']}: {problem}" for line in lines for problem in line["wrong"]]
    print(f"{len(lines)} of {len(shares)} shares: {dict(tried)}, {len(words)} commands, {len(problems)} wrong")
    print("\n".join(problems))
    return 3 if problems else 0


def with_log_of_calls() -> None:
    """Start this program again with io_log.c loaded, unless it is loaded already."""
    if hasattr(ctypes.CDLL(None), "io_log_fault"):
        return
    shim = Path(tempfile.mkdtemp(prefix="sifu-io-log-")) / "io_log.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-o", shim, Path(__file__).with_name("io_log.c"), "-ldl"], check=True
    )
    os.environ |= {"LD_PRELOAD": str(shim), "OMP_NUM_THREADS": "1"}
    os.execv(sys.executable, [sys.executable, *sys.argv])


if __name__ == "__main__":
    with_log_of_calls()
    sys.exit(main())
