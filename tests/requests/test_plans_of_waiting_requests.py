"""Plans of requests that wait."""

from __future__ import annotations

from pathlib import Path

import pytest

import sifu
from run_tools import small_spec

RIDGE_SUM = {"model": {"kind": "ridge"}, "features": {"kind": "random_fourier", "count": 32}}
SPECS = {
    "rounds": small_spec(),
    "groups": small_spec(groups={"count": 4, "rounds": 3}),
    "closed form": small_spec(**RIDGE_SUM, keep={"statistics": "sum"}),
}


@pytest.mark.parametrize("kind", SPECS)
def test_a_plan_is_the_same_before_and_after_its_request_was_received(tmp_path: Path, kind: str) -> None:
    """The leavers are subtracted once from the participants."""
    run = sifu.train(SPECS[kind], run=tmp_path / "run")
    before = run.plan(["client-001"])
    waiting = run.plan_of(run.request(["client-001"]))
    assert [(way.method, way.rounds) for way in waiting.ways] == [(way.method, way.rounds) for way in before.ways]
    assert waiting == before
