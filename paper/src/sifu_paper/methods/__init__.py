"""Methods by name: each takes a state whose clients just asked, and finds the model that retraining starts from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sifu_paper.methods.dp import dp
from sifu_paper.methods.fed_accum import fed_accum
from sifu_paper.methods.fed_eraser import fed_eraser
from sifu_paper.methods.fine_tuning import fine_tuning
from sifu_paper.methods.last import last
from sifu_paper.methods.noisy_scratch import noisy_scratch
from sifu_paper.methods.scratch import scratch
from sifu_paper.methods.sifu import sifu
from sifu_paper.running import State


@dataclass(frozen=True)
class Method:
    """A method.

    Attributes:
        title: Its name for people.
        start: Function that finds the model to go on from; it returns the rounds that this took, at most as many as
            its second argument says.
        training: Kind of first training: `shared`, `updates` (clients' updates are kept) or `dp` (with noise).
        by_rules: True if its result depends on how influence is counted.
    """

    title: str
    start: Callable[[State, int], int]
    training: str = "shared"
    by_rules: bool = False


METHODS = {
    "sifu": Method("SIFU", sifu, by_rules=True),
    "scratch": Method("Scratch", scratch),
    "fine_tuning": Method("Fine-Tuning", fine_tuning),
    "last": Method("Last", last, by_rules=True),
    "dp": Method("DP", dp, training="dp"),
    "fed_eraser": Method("FedEraser", fed_eraser, training="updates"),
    "fed_accum": Method("FedAccum", fed_accum, training="updates"),
    "noisy_scratch": Method("Noisy Scratch", noisy_scratch),
}
