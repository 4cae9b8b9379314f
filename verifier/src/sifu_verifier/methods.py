"""Facts about the methods that a request may use (docs/store.md, section 4)."""

from __future__ import annotations

REPLAYING = ("fed_eraser", "fed_accum")
"""Methods that replay stored updates."""

ERASABLE = {"sifu", "last", "scratch"}
"""Methods after which a purge may erase all figures."""

PROTECTION = {
    "sifu": "noise",
    "last": "noise",
    "scratch": "noise",
    "noisy_scratch": "noise",
    "dp": "training noise",
    "closed_form": "noise",
    "groups": "noise",
    "fine_tuning": "nothing",
    "fed_eraser": "nothing",
    "fed_accum": "nothing",
}
"""Protection of the forgotten client in the model: noise added once, noise during training, or nothing."""
