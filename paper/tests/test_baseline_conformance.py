"""Conformance suite of sifu's methods, applied to the baselines."""

from __future__ import annotations

import pytest
from tests.methods.test_method_conformance import (  # noqa: F401
    TestEveryMethod,
    method_run,
    own_run_of_method,
    seeded_pairs,
    trained_runs,
)

from sifu_paper.baselines import METHODS


@pytest.fixture(params=[method.info.name for method in METHODS])
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)
