"""Baselines of the paper's comparison: methods and spec keys that this package adds to sifu through entry points."""

from __future__ import annotations

import sifu
from sifu_paper.baselines.controls import FineTuning, Last, NoisyScratch
from sifu_paper.baselines.dp import Dp
from sifu_paper.baselines.spec_keys import CALIBRATION_STEPS, CLIP, NOISE, UPDATES_EVERY
from sifu_paper.baselines.stored_updates import FedAccum, FedEraser

METHODS = (FineTuning, Last, Dp, FedEraser, FedAccum, NoisyScratch)
SPEC_KEYS = (CLIP, NOISE, UPDATES_EVERY, CALIBRATION_STEPS)


def register_all() -> None:
    """Register methods and keys in this process, for a checkout that is not installed."""
    for method in METHODS:
        sifu.register(method)
    for key in SPEC_KEYS:
        sifu.register_key(key)
