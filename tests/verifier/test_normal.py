"""The verifier's normal distribution and calibration, against scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import log_ndtr, ndtr

from sifu.theory.calibration import exact_multiplier as of_the_product
from sifu_verifier.calibration import delta_of, epsilon_of, exact_multiplier
from sifu_verifier.normal import TAIL, cdf, log_cdf


@pytest.mark.parametrize("x", [*np.linspace(-40.0, 8.0, 97), TAIL, np.nextafter(TAIL, 0.0), -1e4])
def test_the_distribution_is_that_of_scipy(x: float) -> None:
    assert cdf(x) == pytest.approx(float(ndtr(x)), rel=1e-12, abs=1e-300)
    assert log_cdf(x) == pytest.approx(float(log_ndtr(x)), rel=1e-13)


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 1.0, 10.0])
@pytest.mark.parametrize("delta", [1e-10, 1e-5, 0.1])
def test_calibration_inverts_itself_and_agrees_with_the_product(epsilon: float, delta: float) -> None:
    s = exact_multiplier(epsilon, delta)
    assert s == pytest.approx(of_the_product(epsilon, delta), rel=1e-9)
    assert delta_of(s, epsilon) == pytest.approx(delta, rel=1e-6)
    assert epsilon_of(1 / s, delta) == pytest.approx(epsilon, rel=1e-9)
    assert delta_of(0.99 * s, epsilon) > 1.001 * delta
