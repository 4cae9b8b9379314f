"""Fixtures of the experiments' tests."""

from __future__ import annotations

import suite_setup  # noqa: F401  before anything of ours is imported
