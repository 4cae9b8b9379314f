"""The methods by name. A new one is one file, one description in `sifu.core.method_info` and one line here."""

from __future__ import annotations

from sifu.core.method_info import METHOD_INFOS, method_info
from sifu.methods.base import Method
from sifu.methods.dp import Dp
from sifu.methods.fed_accum import FedAccum
from sifu.methods.fed_eraser import FedEraser
from sifu.methods.fine_tuning import FineTuning
from sifu.methods.last import Last
from sifu.methods.noisy_scratch import NoisyScratch
from sifu.methods.scratch import Scratch
from sifu.methods.sifu import Sifu

METHODS: dict[str, type[Method]] = {
    method.info.name: method for method in (Sifu, Scratch, FineTuning, Last, Dp, FedEraser, FedAccum, NoisyScratch)
}


def method_named(name: str) -> Method:
    """The method of this name, or a sentence with the known names."""
    return METHODS[method_info(name).name]()


def register(method: type[Method]) -> None:
    """Add a method of your own, for this process (docs/new-method.md)."""
    METHOD_INFOS[method.info.name] = method.info
    METHODS[method.info.name] = method
