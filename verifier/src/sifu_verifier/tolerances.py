"""Tolerances of comparisons between recorded and recomputed figures."""

from __future__ import annotations

RELATIVE = 1e-9
"""Relative error that a recomputation in float64 may have (docs/store.md, section 3)."""

FLOOR = 1e-10
"""Smallest delta that a certificate states, except 0 where nothing has to be hidden (docs/store.md, section 4)."""
