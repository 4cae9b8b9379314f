"""Leftovers of a killed change are told from files that a person added; an unfinished erasure is always reported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sifu
import sifu_verifier
from run_tools import Command, copy_run, query, small_spec
from sifu.api import verify_run
from sifu.store import writer
from sifu.store.kept_heads import WitnessPost
from sifu.store.reader import RunReader
from sifu.store.writer import SCRUB_FILE, RunWriter

FORGOTTEN = "client-003"


class Killed(BaseException):
    """Final end of a process."""


@pytest.fixture(scope="module")
def kept_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("leftovers") / "run"
    sifu.train(small_spec(keep={"models": 6}), run=folder)
    return folder


@pytest.fixture
def kept(kept_run: Path, tmp_path: Path) -> Path:
    return copy_run(kept_run, tmp_path / "run")


def killed_after(folder: Path, kind: str, change: Callable[[sifu.Run], Any]) -> None:
    """Execute a change, and stop right after an event of this kind is in the database, before any file is deleted."""

    def kill(post: WitnessPost, reader: RunReader, seq: int) -> None:
        if reader.events()[-1].kind == kind:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WitnessPost, "recorded", kill)  # called right after the commit
        with pytest.raises(Killed):
            change(sifu.open_run(folder))


def forget(retention: str = "paper") -> Callable[[sifu.Run], Any]:
    return lambda run: run.forget([FORGOTTEN], "mine", sigma=0.05, retention=retention)


def dropped(folder: Path) -> set[str]:
    """Return the files that the last event dropped."""
    content = json.loads(query(folder, "SELECT payload FROM events ORDER BY seq DESC LIMIT 1")[0][0])
    return {f"models/{node}.safetensors" for node in content.get("dropped_models", [])}


def test_a_kill_in_mid_rollback_is_noted_until_the_next_writer(kept: Path, cli: Command) -> None:
    killed_after(kept, "rolled back", forget())
    left = dropped(kept)
    assert any(name.startswith("models") for name in left)
    verification = verify_run(kept)
    assert verification.problems == []
    assert {leftover.file for leftover in verification.leftovers} == left
    assert all("dropped it" in leftover.why for leftover in verification.leftovers)
    answer = cli("verify", kept)
    assert answer.code == 0
    assert "files of an interrupted command are left" in " ".join(answer.out.split())
    told = json.loads(cli("verify", kept, "--format", "json").out)
    assert told["holds"] is True
    assert {leftover["file"] for leftover in told["leftovers"]} == left
    RunWriter.open(kept).close()
    assert not any((kept / name).exists() for name in left)
    verification = verify_run(kept)
    assert (verification.problems, verification.leftovers, verification.notes) == ([], [], [])


def test_an_erased_model_that_came_back_is_no_leftover(kept: Path) -> None:
    """The same bytes after the cleanup, under the same name or any other, are reported as an erased model."""
    killed_after(kept, "rolled back", forget())
    name = min(name for name in dropped(kept) if name.startswith("models/"))
    stolen = (kept / name).read_bytes()
    sifu.open_run(kept).forget()
    assert verify_run(kept).problems == []
    (kept / name).write_bytes(stolen)
    assert any(name in problem and "erased" in problem for problem in verify_run(kept).problems)
    (kept / name).unlink()
    for other in ("models/9999.safetensors", "models/.tmp-9999.safetensors", "statistics/9999.sum.statistics"):
        (kept / other).write_bytes(stolen)
        assert any(other in problem and name in problem for problem in verify_run(kept).problems), other
        (kept / other).unlink()
    assert verify_run(kept).problems == []


@pytest.mark.parametrize("harm", ["other bytes", "missing model", "changed model", "in a folder"])
def test_leftovers_excuse_nothing_else(kept: Path, harm: str) -> None:
    killed_after(kept, "rolled back", forget())
    left = sorted(dropped(kept))
    tip = kept / "models" / f"{query(kept, 'SELECT MAX(node) FROM models')[0][0]}.safetensors"
    if harm == "other bytes":
        (kept / left[0]).write_bytes(b"something else")
    elif harm == "missing model":
        tip.unlink()
    elif harm == "changed model":
        tip.write_bytes(tip.read_bytes()[:-1] + b"\0\1")
    else:
        (kept / "models" / "more").mkdir()
        shutil.copyfile(kept / left[0], kept / "models" / "more" / "9999.safetensors")
    assert verify_run(kept).problems


@pytest.mark.parametrize("how", ["strict", "purge"])
def test_an_erasure_for_good_that_was_cut_short_fails_until_it_is_finished(kept: Path, cli: Command, how: str) -> None:
    if how == "strict":
        killed_after(kept, "rolled back", forget("strict"))
    else:
        sifu.open_run(kept).forget([FORGOTTEN], "mine", sigma=0.5)
        killed_after(kept, "purged", lambda run: run.purge())
    left = dropped(kept)
    assert left
    verification = verify_run(kept)
    assert all(any(name in problem and "permanently" in problem for problem in verification.problems) for name in left)
    assert any(problem.startswith("erasure: ") for problem in verification.problems)
    assert verification.leftovers == []
    assert cli("verify", kept).code == 3
    RunWriter.open(kept).close()
    assert verify_run(kept).problems == []


def test_a_log_that_still_holds_pages_is_named(kept: Path) -> None:
    """All files are deleted, but a reader kept the database from being rewritten, so the erasure is incomplete."""
    sifu.open_run(kept).forget([FORGOTTEN], "mine", sigma=0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "scrub_database", lambda connection: False)
        assert not sifu.open_run(kept).purge().complete
    assert [problem.partition(":")[0] for problem in verify_run(kept).problems] == ["erasure"]
    assert sifu.open_run(kept).purge().complete
    assert verify_run(kept).problems == []


def test_a_strict_request_tries_again_when_it_is_done(kept: Path) -> None:
    """If the run was being read at that moment, the end of the retraining completes the erasure."""
    real, calls = writer.scrub_database, []

    def first_in_vain(connection: Any) -> bool:
        calls.append(1)
        return len(calls) > 1 and real(connection)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "scrub_database", first_in_vain)
        forget("strict")(sifu.open_run(kept))
    assert len(calls) == 2
    assert not (kept / SCRUB_FILE).exists()
    assert verify_run(kept).problems == []


def test_an_erasure_that_never_began_is_a_leftover(kept: Path) -> None:
    """The mark is written before the event, so a kill in between has erased and claimed nothing."""
    (kept / SCRUB_FILE).touch()
    verification = verify_run(kept)
    assert verification.problems == []
    assert [leftover.file for leftover in verification.leftovers] == [SCRUB_FILE]


def test_files_of_an_event_that_was_never_recorded_are_noted(kept: Path) -> None:
    for name in ("models/9999.safetensors", "models/.tmp-9998.safetensors", "statistics/9999.sum.statistics"):
        (kept / name).write_bytes(b"half a model")
    verification = verify_run(kept)
    assert verification.problems == []
    assert len(verification.leftovers) == 3
    assert len(verification.notes) == 1
    for name in ("models/007.safetensors", "models/notes.txt", "statistics/007.safetensors"):
        (kept / name).write_bytes(b"no file of ours")
        assert any(name in problem for problem in verify_run(kept).problems), name
        (kept / name).unlink()


def test_a_kill_before_certificates_are_written_is_noted(kept: Path) -> None:
    """The signed certificates are in the database, and the next writer writes their files."""
    killed_after(kept, "request done", forget())
    verification = verify_run(kept)
    assert verification.problems == []
    assert sum("is not there yet" in note for note in verification.notes) == 2
    RunWriter.open(kept).close()
    assert verify_run(kept).notes == []
    sifu.open_run(kept).rotate_key()  # from now on a missing file was deleted
    (kept / "certificates" / "mine.public.json").unlink()
    assert verify_run(kept).problems == ["certificates: the file mine.public.json is missing"]


@pytest.mark.parametrize("place", ["notes.bin", "report/old.bin", "releases-before/1", "run.db.bak", "report/run.db"])
def test_an_erased_model_is_found_anywhere_in_the_folder(kept: Path, place: str) -> None:
    before = {path.name: path.read_bytes() for path in (kept / "models").iterdir()}
    sifu.open_run(kept).forget([FORGOTTEN], "mine", method="scratch")
    assert verify_run(kept).problems == []
    erased = sorted(before.keys() - {"0.safetensors"} - {path.name for path in (kept / "models").iterdir()})[0]
    (kept / place).parent.mkdir(exist_ok=True)
    (kept / place).write_bytes(b"a note")  # any other file may be there
    assert verify_run(kept).problems == []
    assert sifu_verifier.verify(kept) == []
    (kept / place).write_bytes(before[erased])
    assert f"folder: {place} holds what was recorded as models/{erased}" in "\n".join(verify_run(kept).problems)
    assert any(place in problem for problem in sifu_verifier.verify(kept))


LOCKED = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 510, 0x40000002)  # the bytes that readers lock
    except OSError:
        sys.exit(1)
"""


@pytest.mark.parametrize("verify", [sifu.verify, sifu_verifier.verify])
def test_verification_leaves_other_readers_their_locks(own_trained: Path, verify: Callable[[Path], Any]) -> None:
    """Otherwise another process that ends deletes the log that they still read."""
    with RunReader(own_trained) as reader, reader.snapshot():
        verify(own_trained)
        assert subprocess.run([sys.executable, "-c", LOCKED, own_trained / "run.db"]).returncode == 1
