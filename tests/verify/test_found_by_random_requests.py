"""Honest runs at the edges of verification, found by random requests (`test_journeys.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

import sifu
from claims_against_truth import Findings, audit_journey
from run_tools import small_spec
from sifu_verifier import verify

TINY = {"data": {"clients": 6, "samples_per_client": 6}, "stop": {"target": 0.0, "max_rounds": 2}}


@pytest.mark.parametrize("method", ["sifu", "scratch"])
def test_whoever_joins_later_changes_nothing_that_was_said_before(tmp_path: Path, method: str) -> None:
    """A client joins again, and earlier requests stay valid."""
    spec = small_spec(**TINY) | {"seed": 5}
    run = sifu.train(spec, run=tmp_path / "run")
    run.forget(["client-000"], "before", sigma=0.02, epsilon=1.0, level="none")
    run.forget(["client-001"], "records", method=method, records=[0, 1, 2], level="none")
    run.forget(["client-002"], "after", method="scratch", level="none")
    assert run.verify().problems == []
    assert verify(run.folder) == []


def test_figures_that_a_purge_erased_make_psi_infinite_for_those_who_stay(tmp_path: Path) -> None:
    findings = Findings()
    audit_journey(20848, tmp_path, findings, ["groups"], small=True)
    assert findings.requests == 5
    assert findings.violations == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "family"),
    [(144, "linear"), (670, "linear"), (629, "network"), (1031, "network"), (475, "training noise"),
     (411, "training noise"), (1309, "linear"), (197, "closed form")],
)  # fmt: skip
def test_the_journeys_that_showed_it(tmp_path: Path, seed: int, family: str) -> None:
    """Both verifiers agree on the edge of a condition, and deltas of 1e-300."""
    findings = Findings()
    audit_journey(seed, tmp_path, findings, [family])
    assert findings.violations == []
