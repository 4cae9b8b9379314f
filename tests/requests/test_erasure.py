"""Strict erasure: the raw bytes of all files contain nothing of the forgotten client, except in the
auditor's record.
"""

from __future__ import annotations

import sqlite3
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
from killed_purges import purge_killed_at
from random_journeys import tables as table_clients
from run_tools import Command, copy_run, query, small_spec
from sifu.errors import InputError
from sifu.store import database, writer
from sifu.store.files import stored_path
from sifu.store.writer import SCRUB_FILE, RunWriter
from sifu_verifier import verify

F = "client-003"
SPEC = small_spec()


def raw(folder: Path) -> dict[str, bytes]:
    """Return every byte of every file."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def model_patterns(folder: Path, nodes: list[int]) -> list[bytes]:
    """Return 32-byte patterns of models, which cannot occur elsewhere by chance."""
    patterns = []
    for node in nodes:
        content = stored_path(folder, "models", node).read_bytes()
        body = np.frombuffer(content[-4096:], dtype=np.uint8)
        for start in range(0, len(body) - 32, 256):
            piece = body[start : start + 32].tobytes()
            if len(set(piece)) > 16:
                patterns.append(piece)
    assert patterns
    return patterns


def holding(folder: Path, patterns: list[bytes]) -> list[str]:
    return [
        f"{name}: {pattern.hex()}"
        for name, content in raw(folder).items()
        for pattern in patterns
        if pattern in content
    ]


def touched(folder: Path) -> list[int]:
    """Return the models on disk except the initial one; every client took part, so F influenced each of them."""
    return [node for (node,) in query(folder, "SELECT node FROM models WHERE node > 0")]


@pytest.fixture(scope="module")
def kept_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run that keeps models, with its last changes still in the write-ahead log."""
    folder = tmp_path_factory.mktemp("erasure") / "kept"
    sifu.train(SPEC, run=folder)
    return folder


@pytest.fixture
def kept(kept_run: Path, tmp_path: Path) -> Path:
    return copy_run(kept_run, tmp_path / "run")


def test_the_patterns_are_there_before(kept: Path) -> None:
    """Negative control: the search finds the patterns before the erasure."""
    patterns = model_patterns(kept, touched(kept))
    assert len(holding(kept, patterns)) >= len(patterns)


def test_a_strict_request_leaves_no_model_in_the_raw_bytes(kept: Path) -> None:
    nodes = touched(kept)
    patterns = model_patterns(kept, nodes)
    run = sifu.open_run(kept)
    run.forget([F], "strictly", sigma=0.5, retention="strict")
    assert holding(kept, patterns) == []
    assert not (kept / SCRUB_FILE).exists()
    assert run.verify().problems == []
    assert verify(kept) == []


def test_paper_retention_keeps_and_a_purge_erases(kept: Path, cli: Command) -> None:
    run = sifu.open_run(kept)
    run.forget([F], "kept", sigma=0.5)
    held = [n for n in touched(kept) if n < query(kept, "SELECT noise_node FROM requests")[0][0]]
    assert held
    patterns = model_patterns(kept, held)
    assert holding(kept, patterns)
    (kept / "report").mkdir()
    (kept / "report" / "old.html").write_bytes(patterns[0])
    answer = cli("purge", kept, "--format", "json")
    assert answer.code == 0, answer.err
    assert (answer.json["models"], answer.json["besides"]) == (held, ["report"])
    assert answer.json["remains"]
    assert holding(kept, patterns) == []
    assert run.verify().problems == []
    assert verify(kept) == []
    again = cli("purge", kept, "--format", "json")
    assert (again.json["models"], again.json["besides"]) == ([], [])
    assert run.verify().problems == []
    # And the run continues.
    run.forget(["client-005"], "later", sigma=0.5)
    assert run.verify().problems == []
    assert verify(kept) == []


def scalars_of(folder: Path, client: str) -> list[bytes]:
    """Return the drifts of a client as SQLite stores them: eight bytes, big-endian."""
    rows = query(folder, "SELECT drift FROM participation JOIN clients USING (client) WHERE name = ?", (client,))
    return [struct.pack(">d", drift) for (drift,) in rows]


def live_pages(folder: Path, patterns: list[bytes]) -> dict[str, int]:
    return {name: sum(content.count(pattern) for pattern in patterns) for name, content in raw(folder).items()}


def test_scalars_stay_in_the_auditors_record_alone(kept: Path) -> None:
    """Every drift of the forgotten client occurs once for each live row of run.db, and in no other file."""
    before = scalars_of(kept, F)
    run = sifu.open_run(kept)
    run.forget([F], "strictly", sigma=0.5, retention="strict")
    after = scalars_of(kept, F)
    assert after == before
    counts = live_pages(kept, sorted(set(after)))
    assert counts.pop("run.db") == len(after)
    assert set(counts.values()) == {0}


def test_deleted_rows_leave_nothing_in_free_pages(kept: Path) -> None:
    """The psi_max of an erased model, a float in `models`, occurs in no file; only the ledger's text may still state
    it.
    """
    rows = query(kept, "SELECT psi_max FROM models WHERE node > 0")
    patterns = [struct.pack(">d", value) for (value,) in rows if value]
    run = sifu.open_run(kept)
    run.forget([F], "strictly", sigma=0.5, retention="strict")
    left = [struct.pack(">d", value) for (value,) in query(kept, "SELECT psi_max FROM models")]
    gone = [pattern for pattern in patterns if pattern not in left]
    assert gone
    assert holding(kept, gone) == []


def test_without_rewriting_the_database_the_log_tells(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Second negative control: without scrubbing the database, the search finds the old pages."""
    monkeypatch.setattr(writer, "scrub_database", lambda connection: True)
    rows = query(kept, "SELECT psi_max FROM models WHERE node > 0")
    patterns = [struct.pack(">d", value) for (value,) in rows if value]
    keeper = sqlite3.connect(kept / "run.db")  # an open connection keeps the log
    keeper.execute("SELECT COUNT(*) FROM models").fetchone()
    sifu.open_run(kept).forget([F], "strictly", sigma=0.5, retention="strict")
    left = [struct.pack(">d", value) for (value,) in query(kept, "SELECT psi_max FROM models")]
    assert holding(kept, [pattern for pattern in patterns if pattern not in left])
    keeper.close()


@pytest.mark.long
@pytest.mark.parametrize(
    "share", [0, 1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_a_purge_killed_on_the_way_is_finished_by_the_next_command(kept: Path, tmp_path: Path, share: int) -> None:
    sifu.open_run(kept).forget([F], "kept", sigma=0.5)
    held = [n for n in touched(kept) if n < query(kept, "SELECT noise_node FROM requests")[0][0]]
    patterns = model_patterns(kept, held)
    total = purge_killed_at(copy_run(kept, tmp_path / "whole"), 0)
    assert total is not None
    assert total >= 6
    killed = 0
    for step in range(1 + share, total + 1, 4):
        folder = copy_run(kept, tmp_path / f"killed-{step}")
        killed += purge_killed_at(folder, step) is None
        RunWriter.open(folder).close()  # any writing command
        assert not (folder / SCRUB_FILE).exists()
        if not query(folder, "SELECT 1 FROM events WHERE kind = 'purged'"):
            sifu.open_run(folder).purge()  # the purge had not begun
        assert holding(folder, patterns) == [], step
        assert sifu.open_run(folder).verify().problems == []
    print(f"purge: killed at {killed} of {total} steps, 0 stretches of erased models found after a restart")
    assert killed >= 2


def test_a_reader_at_work_is_named_and_the_next_command_finishes(kept: Path) -> None:
    sifu.open_run(kept).forget([F], "kept", sigma=0.5)
    reader = sqlite3.connect(kept / "run.db", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT COUNT(*) FROM models").fetchone()
    opened = database.open_database

    def impatient(folder: Path) -> Any:
        connection = opened(folder)
        connection.execute("PRAGMA busy_timeout=50")
        return connection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "open_database", impatient)
        done = sifu.open_run(kept).purge()
    assert not done.complete
    assert (kept / SCRUB_FILE).exists()
    reader.execute("COMMIT")
    reader.close()
    assert sifu.open_run(kept).purge().complete
    assert not (kept / SCRUB_FILE).exists()


def test_a_purge_that_erased_too_little_is_caught(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sifu.requests import erasure

    run = sifu.open_run(kept)
    run.forget([F], "kept", sigma=0.5)
    honest = erasure.to_purge

    def lazy(*arguments: Any) -> Any:
        purge = honest(*arguments)
        return purge[1:]

    with monkeypatch.context() as patch:
        patch.setattr(erasure, "to_purge", lazy)
        run.purge()
    assert any("purge" in problem for problem in run.verify().problems)
    assert any("purged" in problem for problem in verify(kept))


def test_a_purge_of_an_unfinished_run_is_refused(kept: Path) -> None:
    with sqlite3.connect(kept / "run.db") as connection:
        connection.execute("UPDATE run SET value = 'training' WHERE key = 'phase'")
    with pytest.raises((InputError, Exception), match=r"still training|changed by hand"):
        sifu.open_run(kept).purge()


RIDGE: dict[str, Any] = {
    "data": {"preprocessing": "fixed"},
    "model": {"kind": "ridge", "outputs": 3},
    "features": {"norm": 8.0},
}


def test_copies_elsewhere_are_named(tmp_path: Path) -> None:
    cache = tmp_path / "features"
    spec = RIDGE | {"features": RIDGE["features"] | {"cache": str(cache)}}
    run = sifu.train(spec, run=tmp_path / "run", clients=table_clients(np.random.default_rng(5), 5, 0, 3, (4,)))
    model = run.export(tmp_path / "released.safetensors")
    jobs = tmp_path / ".sifu-console" / "jobs"
    jobs.mkdir(parents=True)
    (jobs / "abc.out").write_text("{}")
    cache.mkdir(exist_ok=True)
    (cache / "0.npy").write_bytes(b"features")
    assert not any("outside the record" in note for note in run.verify().notes)
    run.forget(["client-002"], retention="strict")
    told = " ".join(what for what, _ in run.purge().remains)
    notes = " ".join(run.verify().notes)
    for path in (model, cache, jobs / "abc.out"):
        assert str(path) in told
        assert str(path) in notes
    again = run.export(tmp_path / "again.safetensors")
    assert str(again) not in " ".join(run.verify().notes)
