"""Interruptions inside one process: Ctrl-C between rounds and in a commit, and the record of a resumed run."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import sifu
from run_tools import SameNoise, scalars, small_spec
from sifu.run.training import Progress
from sifu.store.files import uninterrupted
from sifu.store.projection import NewEvent

SPECS: dict[str, dict[str, Any]] = {
    "everyone": small_spec(),
    "poisson": small_spec(server={"participation": "poisson(0.4)"}, stop={"target": 0.0, "max_rounds": 14}),
    "fixed, few models": small_spec(server={"participation": "fixed(3)"}, keep={"models": 3}),
    "strongly convex": small_spec(
        local={"steps": 3, "weight_decay": 2.0},
        server={"participation": "poisson(0.5)"},
        stop={"target": 0.0, "max_rounds": 14},
    ),
    "expanding": small_spec(local={"steps": 3, "momentum": 0.9, "rate": 0.05}),
    "until a target": small_spec(stop={"target": 0.6, "max_rounds": 50, "evaluate_every": 2}),
}


class StopAfterEachRound:
    """Progress callback that presses Ctrl-C after every round."""

    def __call__(self, update: Progress) -> None:
        raise KeyboardInterrupt


def until_done(step: Any) -> int:
    """Call `step` until it is not interrupted; return the number of interruptions."""
    for number in range(200):
        try:
            step()
        except KeyboardInterrupt:
            continue
        return number
    raise AssertionError("200 attempts were not enough")


@pytest.mark.long
@pytest.mark.parametrize("name", SPECS)
def test_a_run_interrupted_after_every_round_records_the_same(tmp_path: Path, name: str) -> None:
    spec = SPECS[name]
    requests = [
        (["client-000"], "first", {"sigma": 0.08}),
        (["client-001", "client-002"], "second", {"method": "sifu"}),
    ]
    whole = sifu.train(spec, run=tmp_path / "whole", noise=SameNoise())
    for clients, number, terms in requests:
        whole.forget(clients, number, level="none", **terms)
    stopped = tmp_path / "stopped"
    interruptions = until_done(lambda: sifu.train(spec, run=stopped, progress=StopAfterEachRound(), noise=SameNoise()))
    assert interruptions >= 2
    run = sifu.open_run(stopped, noise=SameNoise())
    for clients, number, terms in requests:
        until_done(
            lambda clients=clients, number=number, terms=terms: run.forget(
                clients, number, level="none", progress=StopAfterEachRound(), **terms
            )
        )
    expected, recorded = scalars(tmp_path / "whole"), scalars(stopped)
    for table, rows in expected.items():
        assert recorded[table] == rows, f"{table} differs"
    assert run.verify().problems == []


def interrupted_commit() -> bool:
    """Press Ctrl-C in an uninterrupted block; return whether the block finished before the interrupt."""
    finished = False
    try:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            sum(range(1000))
            finished = True
        time.sleep(0.05)
    except KeyboardInterrupt:
        return finished
    return False


def test_an_interrupt_waits_for_the_end_of_a_commit() -> None:
    assert interrupted_commit()


def test_an_interrupt_waits_also_when_another_thread_could_take_it() -> None:
    """The kernel delivers Ctrl-C to any thread that does not block it, and torch and BLAS have their own threads."""
    ended = threading.Event()
    other = threading.Thread(target=ended.wait)
    other.start()
    try:
        assert interrupted_commit()
    finally:
        ended.set()
        other.join()


def test_an_interrupt_just_after_a_commit_commits_nothing_twice(tmp_path: Path, monkeypatch: Any) -> None:
    """Ctrl-C arrives after the transaction but before the pending rounds are cleared."""
    from sifu.run import training
    from sifu.store.writer import RunWriter

    monkeypatch.setattr(training, "COMMIT_SECONDS", 0.0)
    record, calls = RunWriter.record, []

    def interrupted(self: RunWriter, new: NewEvent) -> Any:
        event = record(self, new)
        if new.kind == "rounds" and not calls:
            calls.append(new.kind)
            raise KeyboardInterrupt
        return event

    monkeypatch.setattr(RunWriter, "record", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sifu.train(small_spec(), run=tmp_path / "run")
    sifu.train(small_spec(), run=tmp_path / "run")
    assert sifu.open_run(tmp_path / "run").verify().problems == []
