"""Requests that leave one client, or too few for masks: plan, request, log and status announce it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sifu
import sifu_verifier
from run_tools import query, small_spec
from sifu.core.spec import Spec
from sifu.run.clients_and_engine import clients_from_spec, engine_from_spec
from sifu.theory.facts import DROPPED_MASKED_ROUND, MASKED_STATISTICS

WARNING = "is the only client left: the model is made from its data alone"


def test_a_request_that_leaves_one_client_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = sifu.train(small_spec(stop={"max_rounds": 2, "target": 0.0}), run=tmp_path / "run", device="cpu")
    names = [name for (name,) in query(run.folder, "SELECT name FROM clients ORDER BY client")]
    for method in ("auto", "scratch"):
        plan = run.plan(names[:-1], method=method)
        assert [note for note in plan.notes if note.startswith(f"{names[-1]} {WARNING}")]
        assert not [note for note in run.plan(names[:-2], method=method).notes if WARNING in note]
    run.forget(names[:-2], "first", method="scratch", level="none")
    assert WARNING not in caplog.text
    run.forget([names[-2]], "second", method="scratch", level="none")
    assert f"request second: {names[-1]} {WARNING}" in caplog.text
    assert run.verify().problems == []


ROUNDS_STOP = "and a masked round needs 3: no round can run until another client joins"
SOLVES_STOP = "and a masked sum needs 3: the head cannot be solved again until another client joins"


@pytest.mark.parametrize(
    ("masks", "warning"), [(DROPPED_MASKED_ROUND, ROUNDS_STOP), (MASKED_STATISTICS, SOLVES_STOP), ("", "")]
)
def test_masks_with_fewer_than_three_clients_left_are_announced(
    tmp_path: Path, cli: Any, masks: str, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With masks a warning is shown, without them none; the embedded engine stands in for a masking server."""
    rounds = small_spec(stop={"max_rounds": 2, "target": 0.0})
    head = {"data": rounds["data"], "model": {"kind": "ridge"}}
    given = Spec.from_mapping(head if masks == MASKED_STATISTICS else rounds)
    engine, spec = engine_from_spec(given, clients_from_spec(given))
    if masks:
        engine.facts = replace(engine.facts, outside=(*engine.facts.outside, masks))
    run = sifu.train(spec, run=tmp_path / "run", engine=engine)
    names = [name for (name,) in query(run.folder, "SELECT name FROM clients ORDER BY client")]
    two, three = f"2 clients left, {warning}", names[3:]
    assert run.status().warnings == ()
    assert not [note for note in run.plan(three).notes if "masked" in note]  # three clients remain
    announced = [note for note in run.plan(names[2:]).notes if note.startswith(two)]
    assert bool(announced) == bool(masks)
    answer = cli("request", run.folder, "--clients", ",".join(names[2:]), "--id", "few")
    assert (f"\nWarning: {two}" in answer.out) == bool(masks)
    run.forget(request="few", level="none")
    assert (two in caplog.text) == bool(masks)
    assert bool(run.status().warnings) == bool(masks)
    assert (two in " ".join(cli("status", run.folder).out.split())) == bool(masks)


def test_a_head_of_one_client_whose_rows_are_kept_verifies(tmp_path: Path) -> None:
    """The single client's file contains rows, and the sum over it must not be taken for another form of that file."""
    spec = {"data": {"clients": 3, "samples_per_client": 2}, "model": {"kind": "ridge"}}
    run = sifu.train(spec, run=tmp_path / "run")
    for client in ("client-000", "client-001"):
        run.forget([client])
    files = sorted(path.name.partition(".")[2] for path in (tmp_path / "run" / "statistics").iterdir())
    assert files == ["2.rows.statistics", "sum.statistics"]
    assert run.verify().problems == sifu_verifier.verify(run.folder) == []
