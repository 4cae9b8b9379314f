"""A request that leaves a single client says so: in the plan, and in the log when it is executed."""

from __future__ import annotations

from pathlib import Path

import pytest

import sifu
from run_tools import query, small_spec

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
