"""Random journeys of runs: every claim of a run is compared with the truth, to the last bit.

`python benchmarks/random_audits.py --requests 1000` does the same for at least 1000 requests.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from broken_promises import CONTROLS
from claims_against_truth import Findings, Truth, _separate, audit_journey, delta_at
from counterfactual_runs import OtherParticipantsError
from random_journeys import FAMILIES
from sifu_verifier.calibration import charge_of

pytestmark = pytest.mark.long

QUICK = {"linear": 8, "network": 3, "groups": 1, "closed form": 1}
"""Seed of a journey of each family that takes about a second."""
CAUGHT_AT = {"psi": 0, "charges": 2, "noise": 3, "hit group": 5, "statistics": 2, "levels": 2, "names": 24,
             "names, exact": 0}  # fmt: skip
"""Seed of a journey in which each cheat matters."""


@pytest.mark.parametrize("family", QUICK)
def test_no_claim_of_a_random_run_is_beyond_the_truth(tmp_path: Path, family: str) -> None:
    findings = Findings()
    audit_journey(QUICK[family], tmp_path, findings, [family], most_requests=3)
    assert findings.violations == []
    assert findings.requests >= 2
    assert findings.distances + findings.assumed_distances > 0
    assert findings.folders_verified >= 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_no_claim_of_many_random_runs_is_beyond_the_truth(tmp_path: Path, seed: int) -> None:
    findings = Findings()
    audit_journey(seed, tmp_path, findings)
    assert findings.violations == []


@pytest.mark.parametrize("name", CONTROLS)
def test_whoever_breaks_a_promise_is_caught(tmp_path: Path, name: str) -> None:
    control = CONTROLS[name]
    findings = control.findings()
    with control.cheat():
        audit_journey(CAUGHT_AT[name], tmp_path, findings, control.families, most_requests=3)
    assert control.is_caught(findings), findings


def test_every_family_and_control_is_sampled() -> None:
    assert set(QUICK) == set(FAMILIES)
    assert set(CAUGHT_AT) == set(CONTROLS)


def test_delta_by_another_way_of_counting() -> None:
    """dp-accounting, which integrates the privacy loss, agrees with our evaluation of the normal distribution in fifty
    digits.
    """
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    for ratio, epsilon in ((1.0, 1.0), (2.0, 4.0)):
        counted = from_gaussian_mechanism(1.0 / ratio, value_discretization_interval=1e-3)
        assert counted.get_delta_for_epsilon(epsilon) == pytest.approx(delta_at(ratio, epsilon), rel=0.01)


def test_a_charge_beyond_every_number_is_infinite() -> None:
    """A charge that overflows is infinite; noise near 1e-302 occurs for a client without drift, under an accounting
    that certifies nothing.
    """
    assert charge_of(0.1, 1e-301) == math.inf
    assert charge_of(0.0, 0.0) == 0.0


def test_a_counterfactual_that_diverges_is_infinitely_far_away() -> None:
    class Diverging(Truth):
        def __init__(self) -> None: ...

        def _needed(self, wanted: object) -> list[int]:
            return [0, 1]

        def _model(self, engine: object, gone: object, number: int, models: object) -> np.ndarray:
            if number:
                raise OtherParticipantsError("a reply was refused")
            return np.zeros(2)

    other = Diverging().models(None, (), [1], may_diverge=True)
    assert other[1] is None
    assert _separate(np.zeros(2), other[1]) == math.inf
    with pytest.raises(OtherParticipantsError):  # the recorded run itself must not diverge
        Diverging().models(None, (), [1])
