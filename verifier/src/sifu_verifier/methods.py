"""Facts about the methods that a request may use (docs/store.md, section 4)."""

from __future__ import annotations

ERASABLE = {"sifu", "scratch"}
"""Methods after which a purge may erase all figures."""
