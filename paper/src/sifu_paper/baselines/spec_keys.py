"""Spec keys of the baselines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sifu.core.extensions import SpecKey

if TYPE_CHECKING:
    from sifu import Spec


def _clip(spec: Spec) -> Iterator[tuple[bool, str]]:
    yield 1e-9 <= spec.extension(CLIP) <= 1e9, "0, or in 1e-9 to 1e9"


def _noise(spec: Spec) -> Iterator[tuple[bool, str]]:
    yield spec.extension(CLIP) > 0 and 1e-9 <= spec.extension(NOISE) <= 1e6, "0, or in 1e-9 to 1e6 with server.clip > 0"
    grouped = spec.groups.count > 0 or spec.groups.rounds > 0
    yield not grouped, "0.0 with groups, whose separate rounds dp does not count"


def _updates_every(spec: Spec) -> Iterator[tuple[bool, str]]:
    yield spec.extension(UPDATES_EVERY) >= 0, "0 or more"


def _calibration_steps(spec: Spec) -> Iterator[tuple[bool, str]]:
    yield 0 <= spec.extension(CALIBRATION_STEPS) <= spec.local.steps, "in 0 to local.steps"


CLIP = SpecKey(
    "server.clip",
    0.0,
    "bound on the norm of a client's update; 0 is off (with it sifu is conditional at best)",
    _clip,
    sets="update_clip",
)
NOISE = SpecKey(
    "server.noise",
    0.0,
    "noise on every client's update, as a multiple of clip (method dp); 0 is off",
    _noise,
    sets="update_noise",
)
UPDATES_EVERY = SpecKey(
    "keep.updates_every",
    0,
    "keep the clients' updates of every Nth round (fed_eraser, fed_accum); 0: never",
    _updates_every,
    sets="updates_every",
)
CALIBRATION_STEPS = SpecKey(
    "local.calibration_steps",
    0,
    "fed_eraser: local steps of a calibration round; 0 takes half of steps",
    _calibration_steps,
)
