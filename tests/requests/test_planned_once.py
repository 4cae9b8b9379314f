"""Requests are planned once: the checked plan is executed, unless the run changed meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import sifu
from run_tools import small_spec
from sifu.api import run_requests
from sifu.methods.registry import plan_request
from sifu.requests import worker

RIDGE_SUM = {"model": {"kind": "ridge"}, "features": {"kind": "random_fourier", "count": 32}}
SPECS = {
    "rounds": small_spec(),
    "groups": small_spec(groups={"count": 4, "rounds": 3}),
    "closed form": small_spec(**RIDGE_SUM, keep={"statistics": "sum"}),
}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list of all plans made, with the calling module of each."""
    made: list[Any] = []

    def counted(module: Any) -> None:
        def noted(*given: Any) -> Any:
            plan = plan_request(*given)
            made.append((module.__name__, plan))
            return plan

        monkeypatch.setattr(module, "plan_request", noted)

    counted(run_requests)
    counted(worker)
    return made


@pytest.mark.parametrize("kind", SPECS)
def test_a_request_is_planned_once(tmp_path: Path, planned: list[Any], kind: str) -> None:
    run = sifu.train(SPECS[kind], run=tmp_path / "run")
    run.forget(["client-001"])
    run.forget(["client-004"], records=[1])
    assert [module for module, _ in planned] == [run_requests.__name__] * 2
    assert run.verify().problems == []


def test_a_plan_is_made_again_where_the_run_changed_in_between(tmp_path: Path, planned: list[Any]) -> None:
    """An earlier request for records is executed first, so the checked plan is outdated and is made again."""
    run = sifu.train(SPECS["rounds"], run=tmp_path / "run")
    run.request(["client-004"], records=[1])
    run.forget(["client-001"])
    assert [module for module, _ in planned].count(worker.__name__) == 2
    assert run.verify().problems == []


@pytest.mark.parametrize("kind", SPECS)
def test_a_plan_is_the_same_before_and_after_its_request_was_received(tmp_path: Path, kind: str) -> None:
    """A plan for a waiting request once subtracted the leavers twice from the participants."""
    run = sifu.train(SPECS[kind], run=tmp_path / "run")
    before = run.plan(["client-001"])
    waiting = run.plan_of(run.request(["client-001"]))
    assert [(way.method, way.rounds) for way in waiting.ways] == [(way.method, way.rounds) for way in before.ways]
    assert waiting == before
