"""Journeys: a seed draws a federation, its training, requests and what happens between them, and each claim is true.

The truth of a claim is a repeated run with and without the forgotten clients (`claims_against_truth`). Operators who
cheat (`broken_promises`) are caught at fixed seeds. Thousands of journeys: python tests/test_journeys.py --log FILE
[--slice I/N] [--most N]
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

import long_form
import suite_setup  # noqa: F401  for the program
from broken_promises import CONTROLS
from claims_against_truth import Findings, Truth, _separate, audit_journey, delta_at
from counterfactual_runs import OtherParticipantsError
from random_journeys import FAMILIES
from sifu_verifier.calibration import charge_of

SEEDS = 40
"""Number of journeys in the short form, each with two or three rounds a run."""
CAUGHT_AT = {"psi": 0, "charges": 2, "noise": 3, "hit group": 5, "statistics": 2, "erasure": 0, "budget": 0,
             "levels": 2, "names": 24, "names, exact": 0}  # fmt: skip
"""Seed of a journey in which each cheat matters."""
LONG = 2000
"""Number of journeys in the long form."""


def journey(seed: int, folder: Path, *, small: bool) -> tuple[str, Findings]:
    """Make a journey; return the family that its seed draws, and what was found."""
    findings, family = Findings(), random.Random(f"family {seed}").choice(FAMILIES)
    audit_journey(seed, folder, findings, [family], small=small)
    return family, findings


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_claim_of_a_random_run_is_beyond_the_truth(tmp_path: Path, seed: int) -> None:
    _, findings = journey(seed, tmp_path, small=True)
    assert findings.violations == []
    assert findings.refused or findings.folders_verified >= 1


@pytest.mark.parametrize("name", CONTROLS)
def test_whoever_breaks_a_promise_is_caught(tmp_path: Path, name: str) -> None:
    control = CONTROLS[name]
    findings = control.findings()
    with control.cheat():
        audit_journey(CAUGHT_AT[name], tmp_path, findings, control.families, most_requests=3)
    assert control.is_caught(findings), findings


def test_every_family_and_control_is_sampled() -> None:
    assert {random.Random(f"family {seed}").choice(FAMILIES) for seed in range(SEEDS)} == set(FAMILIES)
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


def main() -> int:
    """Make the journeys of the long form."""

    def attempt(trial: str) -> str:
        with tempfile.TemporaryDirectory(prefix="sifu-journey-") as folder:
            try:
                family, findings = journey(int(trial), Path(folder), small=int(trial) % 2 == 0)
            except Exception as error:  # a traceback counts as a finding
                return f"wrong: {type(error).__name__}: {error}"
        counts = f"{findings.requests} requests, {findings.distances} distances, {findings.exact_models} exact models"
        return f"wrong: {findings.violations}" if findings.violations else f"{family}: {counts}"

    return long_form.work_off("journeys", [str(seed) for seed in range(LONG)], attempt, __doc__)


if __name__ == "__main__":
    sys.exit(main())
