"""Commands during a writer's work, and Ctrl-C: second writers are refused, readers get answers, nothing is lost."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import sifu
from run_tools import Command, environment, query, small_spec, start_cli, state
from sifu.api import verify_run
from sifu.store.files import WriterLock
from sifu.store.writer import RunWriter

pytestmark = pytest.mark.long

LONG = """
[data]
clients = 12
samples_per_client = 10
[local]
steps = 2
[stop]
target = 0.0
max_rounds = 1500
evaluate_every = 50
[keep]
models = 6
"""


@pytest.fixture
def long_spec(tmp_path: Path) -> Path:
    path = tmp_path / "long.toml"
    path.write_text(LONG)
    return path


def wait_for_rounds(folder: Path, process: subprocess.Popen[str], at_least: int, branch: int = 0) -> int:
    """Wait until the database has `at_least` rounds of a branch; return their number."""
    for _ in range(6000):
        if (folder / "run.db").exists():
            try:
                rounds_done = query(
                    folder, "SELECT COUNT(*) FROM nodes WHERE kind = 'round' AND branch = ?", (branch,)
                )[0][0]
            except sqlite3.OperationalError:
                rounds_done = 0
            if rounds_done >= at_least:
                return int(rounds_done)
        if process.poll() is not None:
            raise AssertionError(f"the process ended with {process.returncode}: {process.communicate()[1]}")
        time.sleep(0.01)
    raise AssertionError("no rounds appeared")


def test_ctrl_c_loses_nothing(cli: Command, tmp_path: Path, long_spec: Path) -> None:
    folder = tmp_path / "run"
    process = start_cli("train", long_spec, "--run", folder)
    seen = wait_for_rounds(folder, process, 20)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "every finished round is saved" in err
    assert "Traceback" not in err
    assert out == ""
    saved = query(folder, "SELECT COUNT(*) FROM nodes")[0][0]
    assert saved >= seen
    assert verify_run(folder).problems == []
    # The same command continues and finishes.
    answer = cli("train", long_spec, "--run", folder, "--format", "json")
    assert answer.code == 0, answer.err
    assert answer.json["phase"] == "ready"
    assert answer.json["rounds_run"] == 1500
    # An interrupted request stays in the ledger and is finished first.
    process = start_cli("forget", folder, "--clients", "client-003", "--sigma", "0.3", "--format", "json")
    wait_for_rounds(folder, process, 5, branch=1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert '"exit_code": 130' in out
    assert query(folder, "SELECT status FROM requests") == [("running",)]
    assert verify_run(folder).problems == []
    assert cli("export", folder, "--model", tmp_path / "m.safetensors").code == 2
    answer = cli("forget", folder)
    assert answer.code == 0, answer.err
    assert query(folder, "SELECT status FROM requests") == [("done",)]
    assert verify_run(folder).problems == []


def test_a_second_writer_is_refused_while_readers_answer(
    cli: Command, own_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text("[data]\nclients = 12\n[local]\nsteps = 3\n[stop]\ntarget = 0.0\nmax_rounds = 8\n")
    before = state(own_run)
    writer = RunWriter.open(own_run)
    try:
        for arguments in (
            ["train", spec, "--run", own_run],
            ["forget", own_run, "--clients", "client-007"],
            ["forget", own_run],
        ):
            answer = cli(*arguments)
            assert answer.code == 5, (arguments, answer.err)
            assert "is in use by another process (pid " in answer.err
            assert "nothing was changed" in answer.err
            assert "Traceback" not in answer.err
        for arguments in (
            ["status", own_run],
            ["plan", own_run, "--clients", "client-007"],
            ["verify", own_run],
            ["report", own_run, "--output", tmp_path / "report"],
            ["export", own_run, "--model", tmp_path / "model.safetensors"],
        ):
            answer = cli(*arguments)
            assert answer.code == 0, (arguments, answer.err)
    finally:
        writer.close()
    assert state(own_run) == before
    assert cli("forget", own_run, "--clients", "client-007").code == 0


def test_a_request_beside_a_writer_waits_in_the_inbox(cli: Command, own_run: Path) -> None:
    writer = RunWriter.open(own_run)
    try:
        answer = cli("request", own_run, "--clients", "client-007", "--id", "mine")
        assert answer.code == 0, answer.err
        assert "in the inbox of the running server" in answer.out
        assert cli("request", own_run, "--clients", "client-007", "--id", "mine").code == 0
        assert cli("request", own_run, "--clients", "client-003", "--id", "mine").code == 2
        assert cli("request", own_run, "--clients", "nobody").code == 2
        assert query(own_run, "SELECT COUNT(*) FROM requests WHERE request = 'mine'") == [(0,)]
    finally:
        writer.close()
    # The writer closed without reading the inbox: the next writer ingests the request.
    assert cli("forget", own_run).code == 0
    assert query(own_run, "SELECT status FROM requests WHERE request = 'mine'") == [("done",)]
    assert list((own_run / "inbox").iterdir()) == []
    assert verify_run(own_run).problems == []


@pytest.fixture
def busy_writer(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """Start a process that trains and commits after every round."""
    folder = tmp_path / "busy"
    program = (
        "import sys, sifu\n"
        "from sifu.run import training\n"
        "training.COMMIT_SECONDS = 0.0\n"
        f"sifu.train({small_spec(stop={'max_rounds': 100000}, keep={'models': 4})!r}, run=sys.argv[1])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for_rounds(folder, process, 3)
        yield folder, process
    finally:
        process.kill()
        process.communicate()


def test_readers_beside_a_busy_writer(cli: Command, busy_writer: tuple[Path, subprocess.Popen[str]]) -> None:
    """Status and plan succeed, and verify finds no problem in a run that is being written."""
    folder, process = busy_writer
    problems = []
    for _ in range(12):
        assert cli("status", folder).code == 0
        assert cli("plan", folder, "--clients", "client-003", "--sigma", "0.1").code == 0
        answer = cli("verify", folder)
        if answer.code != 0:
            problems.append(answer.err)
    answer = cli("forget", folder, "--clients", "client-003")
    assert answer.code == 5
    assert f"pid {process.pid}" in answer.err
    assert process.poll() is None, process.communicate()[1]
    assert not problems, f"{len(problems)} of 12 verifications failed, the first: {problems[0]}"


def test_an_export_during_a_request_is_refused(cli: Command, own_trained: Path, tmp_path: Path) -> None:
    """During a request the export is refused with a message: no half-trained model is written."""
    run = sifu.open_run(own_trained)
    answers = []

    def look(update: object) -> None:
        answers.append(cli("export", own_trained, "--model", tmp_path / "m.safetensors"))

    run.forget(["client-003"], sigma=0.1, progress=look)
    assert {answer.code for answer in answers} == {2}
    assert not (tmp_path / "m.safetensors").exists()


def test_the_lock_is_let_go_when_its_holder_dies(tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom sifu.store.files import WriterLock\n"
        "lock = WriterLock(Path(sys.argv[1]))\nprint('held', flush=True)\ntime.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "lock")], env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    from sifu.errors import RunBusyError

    with pytest.raises(RunBusyError, match=f"pid {process.pid}"):
        WriterLock(tmp_path / "lock")
    process.kill()
    process.communicate()
    with WriterLock(tmp_path / "lock"):
        pass
