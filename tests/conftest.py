"""Fixtures of the library's suites."""

from __future__ import annotations

import sys

import suite_setup  # noqa: F401  before anything of ours is imported
from run_fixtures import (  # noqa: F401
    cli,
    heads,
    own_run,
    own_trained,
    pytest_configure,
    pytest_sessionfinish,
    run_with_requests,
    trained_run,
)
from secret_draws import fixed_secrets, pytest_fixture_setup, same_groups  # noqa: F401  for every test and shared fixture

# These suites test the library alone, whether sifu-kernels is installed or not.
sys.modules["sifu_kernels"] = None  # type: ignore[assignment]
