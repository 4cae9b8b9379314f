"""Crash suite: four jobs, a fault at every call that changes files, and the same command finishes the work.

A call is any change of a file or name and any sync, SQLite's included, so every COMMIT is among them. The process is
killed before it, or it fails with ENOSPC or EIO, or half of its bytes are written, or the power is lost. Then all that
was acknowledged before must be there and verify, an error must have been a sentence, and the command, called again,
must lead to what the uninterrupted one states. All: python tests/test_crash.py --log FILE [--slice I/N] [--job NAME]
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import stat
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import long_form
import suite_setup  # noqa: F401  for the program
from crashing import FAULTS, Job
from run_tools import built_command, environment, small_spec, spec_for
from sifu.cli.main import app

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None or sys.platform != "linux", reason="the log of calls needs a C compiler and Linux"
)
NOISE = small_spec(
    data={"clients": 8}, local={"rate": 0.05, "steps": 3}, keep={"models": 4}, stop={"target": 0.0, "max_rounds": 2}
)
GROUPS = spec_for(
    "groups",
    data={"clients": 6, "samples_per_client": 10},
    groups={"count": 3, "rounds": 2},
    stop={"target": 0.0, "max_rounds": 3},
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
READ_ONLY = {"audit", "clients list", "plan", "requests", "status", "verify"}
ELSEWHERE = {"clients sign", "demo", "flower"}
"""Commands that write one file or a new folder of their own, or call the commands above."""
JOBS: dict[str, list[str]] = {
    "noise": [
        "train small.toml --run run",
        "request run --clients client-000 --id a",
        "decide run a verify",
        "forget run --request a",
        "forget run --clients client-001 --request b --retention strict --method scratch",
        "forget run --clients client-004 --records 0,1 --request d --method scratch --level none",
        "forget run --clients client-005 --request n --level none",
        "purge run",
    ],
    "upkeep": [
        "init spec.toml",
        "clients add run --name client-000 --node-key node.pub",
        "clients block run --name client-000",
        "--witness witness.jsonl train small.toml --run fresh/run",
        "train small.toml --run run",
        "request run --clients client-002 --id w",
        "decide run w withdraw",
        "evaluate run",
        "export run --model model.safetensors",
        "report run",
        "forget run --clients client-003 --request c --level none",
        "certificate run c --bundle bundle.json",
        "key run --rotate",
        "backup run backup.zip",
        "restore backup.zip again",
        "interrupted forget run --clients client-006 --request s --level none",
        "decide run s settle --reason gone",
    ],
    "table": [
        "train table.toml --run run",
        "request run --client h0 --records P0000,P0004,P0008,P0012 --id a --actor ann",
        "decide run a approve --actor bob",
        "forget run --request a",
        "request run --client h2 --id c --actor ann",
        "decide run c refuse --reason no --actor bob",
        "update run",
        "join run --file new.csv",
        "export run --model model.safetensors",
        "predict model.safetensors new.csv --output predicted.csv",
        "purge run",
    ],
    "groups": [
        "train groups.toml --run run",
        "forget run --client client-000 --method groups --request a",
        "update run",
        "forget run --client client-003 --method groups --retention strict --request b",
    ],
}


def write_inputs(root: Path) -> None:
    """Write the specs, tables and keys that the commands read."""
    for name, spec in {"small": NOISE, "groups": GROUPS}.items():
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
    (root / "fresh").mkdir()


def attempted(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run the program; return the lines of its log."""
    log = folder / "log.jsonl"
    program = [sys.executable, __file__, "--log", str(log), *arguments]
    given = environment(PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    ended = subprocess.run(program, env=given, capture_output=True, text=True, timeout=3000)
    assert ended.returncode in (0, 3), ended.stdout[-2000:] + ended.stderr[-4000:]
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize("job", JOBS)
def test_nothing_is_lost_and_the_same_command_finishes(job: str, tmp_path: Path) -> None:
    lines = attempted(tmp_path, "--job", job, "--most", "28")
    assert [line for line in lines if line["outcome"].startswith(long_form.WRONG)] == []
    assert set(Counter(line["outcome"] for line in lines)) == set(FAULTS)


def test_every_command_that_writes_is_tried() -> None:
    """So that a new command joins a job."""

    def names(command: Any, words: str) -> Iterator[str]:
        if not hasattr(command, "commands"):
            yield words.strip()
        for name, below in getattr(command, "commands", {}).items():
            yield from names(below, f"{words} {name}")

    begun = [f" {' '.join(words.split()[:3])} " for commands in JOBS.values() for words in commands]
    everything = {name for name in names(built_command(app), "") if not name.startswith(("serve", "token"))}
    assert {name for name in everything if not any(f" {name} " in words for words in begun)} == READ_ONLY | ELSEWHERE


@pytest.mark.long
def test_a_command_that_syncs_no_folder_is_caught(tmp_path: Path) -> None:
    """Negative control: without these syncs, acknowledged work is lost with the power."""
    lines = attempted(tmp_path, "--job", "table", "--most", "15", "--unsynced")
    assert any(line["outcome"].startswith(long_form.WRONG) for line in lines)


def trials_of(name: str, job: Job) -> list[str]:
    """Return all trials of a job, one of every command and fault first, drawn by the job's name."""
    drawn, strata = job.trials(), set()
    random.Random(name).shuffle(drawn)
    firsts = [trial for trial in drawn if trial[:2] not in strata and not strata.add(trial[:2])]  # type: ignore[func-returns-value]
    return ["|".join([name, *map(str, trial)]) for trial in dict.fromkeys([*firsts, *drawn])]


def main() -> int:
    """Build the jobs and make the trials."""
    names = [sys.argv[sys.argv.index("--job") + 1]] if "--job" in sys.argv else list(JOBS)
    unsynced = "--unsynced" in sys.argv
    left = [
        word for word in sys.argv[1:] if word not in ("--job", "--unsynced", *(names if "--job" in sys.argv else ()))
    ]
    if unsynced:
        sync = os.fsync
        os.fsync = lambda descriptor: None if stat.S_ISDIR(os.fstat(descriptor).st_mode) else sync(descriptor)  # type: ignore[assignment,arg-type]
    import torch  # imported once, for every child

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="sifu-crash-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")) as parent:
        jobs = {}
        for name in names:
            root = Path(parent) / name / "disk"
            root.mkdir(parents=True)
            jobs[name] = Job(root, JOBS[name], write_inputs)

        def attempt(trial: str) -> str:
            name, number, fault, at = trial.split("|")
            os.environ["SIFU_HEADS"] = str(jobs[name].root / "heads")
            return jobs[name].attempt(int(number), fault, int(at))

        ordered = [trials_of(name, job) for name, job in jobs.items()]
        if unsynced:
            ordered = [[trial for trial in trials if "power loss" in trial] for trials in ordered]
        trials = [trial for trials in ordered for trial in trials]
        return long_form.work_off("crash", trials, attempt, __doc__, left)


def with_log_of_calls() -> None:
    """Start this program again with io_log.c loaded, unless it is loaded already."""
    if hasattr(ctypes.CDLL(None), "io_log_fault"):
        return
    shim = Path(tempfile.mkdtemp(prefix="sifu-io-log-")) / "io_log.so"
    source = Path(__file__).with_name("io_log.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", shim, source, "-ldl"], check=True)
    os.environ |= {"LD_PRELOAD": str(shim), "OMP_NUM_THREADS": "1"}
    os.execv(sys.executable, [sys.executable, *sys.argv])


if __name__ == "__main__":
    with_log_of_calls()
    sys.exit(main())
