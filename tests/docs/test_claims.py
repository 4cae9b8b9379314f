"""Numbers that README and docs state, recomputed."""

from __future__ import annotations

import math

import pytest

from sifu.theory.calibration import delta_reached, exact_multiplier, true_positive_rate


def test_two_full_budget_releases_at_epsilon_10_reach_delta_0_248() -> None:
    # Two releases of ratio mu each are one of ratio sqrt(2) mu (Gaussian DP composition).
    assert delta_reached(10, exact_multiplier(10, 0.01) / math.sqrt(2)) == pytest.approx(0.248, abs=5e-4)


def test_the_classical_calibration_really_reaches_0_0406_at_the_papers_budget() -> None:
    assert delta_reached(10, math.sqrt(2.0 * math.log(1.25 / 0.01)) / 10) == pytest.approx(0.0406, abs=5e-5)


def test_a_budget_of_10_lets_an_attacker_spot_70_percent_at_1_percent_false_alarms() -> None:
    assert true_positive_rate(1 / exact_multiplier(10, 0.01), 0.01) == pytest.approx(0.70, abs=0.005)
