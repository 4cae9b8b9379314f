"""Hypothesis as these tests need it: the same examples on every run, no deadline on a shared machine."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "core",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=45,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("core")
