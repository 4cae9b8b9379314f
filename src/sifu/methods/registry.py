"""The methods by name. A new one is one file and one line here."""

from __future__ import annotations

import difflib

from sifu.core.errors import InputError
from sifu.methods.dp import Dp
from sifu.methods.fed_accum import FedAccum
from sifu.methods.fed_eraser import FedEraser
from sifu.methods.fine_tuning import FineTuning
from sifu.methods.last import Last
from sifu.methods.method import Method
from sifu.methods.noisy_scratch import NoisyScratch
from sifu.methods.scratch import Scratch
from sifu.methods.sifu import Sifu

METHODS: dict[str, type[Method]] = {
    Sifu.name: Sifu,
    Scratch.name: Scratch,
    FineTuning.name: FineTuning,
    Last.name: Last,
    Dp.name: Dp,
    FedEraser.name: FedEraser,
    FedAccum.name: FedAccum,
    NoisyScratch.name: NoisyScratch,
}


def method_named(name: str) -> Method:
    """The method of this name, or a sentence with the known ones."""
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"unknown method {name!r}: there are {', '.join(METHODS)}{hint}")
    return METHODS[name]()
