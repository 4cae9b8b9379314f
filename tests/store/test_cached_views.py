"""Values that a run caches between two calls are never older than the run."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest

import sifu
from run_tools import copy_run
from sifu.errors import RunDamagedError
from sifu.run.run_view import RunView
from sifu.run.training import track_everyone
from sifu.store.reader import RunReader


def fresh(folder: Path) -> sifu.Run:
    return sifu.open_run(folder)


def test_plan_and_status_follow_what_another_process_writes(own_trained: Path) -> None:
    run = fresh(own_trained)
    before = run.status()
    first = run.plan(["client-003"], sigma=0.3)
    assert run.plan(["client-003"], sigma=0.3) == first
    fresh(own_trained).request(["client-001"], "elsewhere")
    assert [request.request for request in run.status().requests] == ["elsewhere"]
    fresh(own_trained).forget()
    assert run.status() == fresh(own_trained).status()
    assert run.status() != before
    assert run.plan(["client-003"], sigma=0.3) == fresh(own_trained).plan(["client-003"], sigma=0.3)


def test_a_change_by_hand_is_not_hidden_by_what_was_remembered(own_trained: Path) -> None:
    run = fresh(own_trained)
    before = run.plan(["client-003"], sigma=0.3)
    connection = sqlite3.connect(own_trained / "run.db")
    connection.execute("UPDATE participation SET drift = drift * 100")
    connection.execute("UPDATE clients SET expansion = expansion / 2")
    connection.commit()
    connection.close()
    assert run.plan(["client-003"], sigma=0.3).source_node != before.source_node
    assert any("clients" in problem for problem in run.verify().problems)
    with pytest.raises(RunDamagedError, match="changed by hand"):
        run.forget(["client-003"], sigma=0.3)


def test_another_run_in_the_same_place_is_another_run(own_trained: Path, run_with_requests: Path) -> None:
    run = fresh(own_trained)
    assert run.status().requests == ()
    shutil.rmtree(own_trained)
    copy_run(run_with_requests, own_trained)
    assert len(run.status().requests) == 5


def test_psi_that_goes_on_from_what_was_known_is_the_replayed_one(run_with_requests: Path) -> None:
    """Psi computed incrementally equals the replayed one bit for bit, at every node of every history."""
    everyone = np.arange(12)
    warm = RunReader(run_with_requests)
    tips = [node.node for node in warm.nodes()]
    for tip in [*tips, *reversed(tips)]:
        cold = RunReader(run_with_requests)
        expected = track_everyone(RunView(cold, tip=tip)).total(everyone)
        assert np.array_equal(track_everyone(RunView(warm, tip=tip)).total(everyone), expected)
        assert warm.path(tip) == cold.path(tip)
        cold.close()
    warm.close()


def test_participations_that_were_read_are_only_added_to_by_ones_own_writes(own_trained: Path) -> None:
    """New rows are found, rows of a rolled-back transaction are not kept, and manual changes are seen."""

    def as_read_now() -> list[tuple[float, ...]]:
        cold = RunReader(own_trained)
        rows = cold.everyone()
        cold.close()
        return list(zip(rows.nodes, rows.clients, rows.samples, rows.drifts, strict=True))

    def as_remembered() -> list[tuple[float, ...]]:
        rows = warm.everyone()
        return list(zip(rows.nodes, rows.clients, rows.samples, rows.drifts, strict=True))

    warm = RunReader(own_trained)
    last = warm.tip
    assert as_remembered() == as_read_now()
    warm.connection.execute("INSERT INTO participation VALUES (?, 0, 10, 0.5)", (last + 1,))
    assert as_remembered() == as_read_now()
    assert as_remembered()[-1] == (last + 1, 0, 10, 0.5)
    warm.connection.execute("BEGIN IMMEDIATE")
    warm.connection.execute("INSERT INTO participation VALUES (?, 0, 10, 0.25)", (last + 2,))
    assert as_remembered()[-1] == (last + 2, 0, 10, 0.25)
    warm.connection.execute("ROLLBACK")
    warm.connection.execute("INSERT INTO participation VALUES (?, 1, 10, 0.75)", (last + 2,))
    assert as_remembered() == as_read_now()
    other = sqlite3.connect(own_trained / "run.db")
    other.execute("UPDATE participation SET drift = 7 WHERE node = 1")
    other.commit()
    other.close()
    assert as_remembered() == as_read_now()
    assert 7.0 in {row[3] for row in as_remembered()}
    warm.close()
