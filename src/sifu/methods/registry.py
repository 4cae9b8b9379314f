"""The methods by name. A new one is one file, one description in `sifu.core.method_info` and one line here."""

from __future__ import annotations

from sifu.core.method_info import CLOSED_FORM, METHOD_INFOS, method_info
from sifu.core.spec import RIDGE
from sifu.errors import InputError
from sifu.methods.base import Method
from sifu.methods.closed_form import ClosedForm
from sifu.methods.dp import Dp
from sifu.methods.fine_tuning import FineTuning
from sifu.methods.groups import Groups
from sifu.methods.last import Last
from sifu.methods.scratch import NoisyScratch, Scratch
from sifu.methods.sifu import Sifu
from sifu.methods.stored_updates import FedAccum, FedEraser
from sifu.run.run_view import RunView

METHODS: dict[str, type[Method]] = {
    method.info.name: method
    for method in (Sifu, Scratch, ClosedForm, Groups, FineTuning, Last, Dp, FedEraser, FedAccum, NoisyScratch)
}


def method_named(name: str) -> Method:
    """The method of this name, or a sentence with the known names."""
    return METHODS[method_info(name).name]()


def method_for(view: RunView, name: str) -> Method:
    """The method of this name, if it can do anything with a model of this run's kind."""
    method, closed = method_named(name), view.spec.model.kind == RIDGE
    if closed and name != CLOSED_FORM:
        raise InputError(
            f"method {name} is for models that are trained in rounds; this run solves a ridge head in closed form: "
            f"use method {CLOSED_FORM}, which is exact and takes no rounds or one"
        )
    if name == CLOSED_FORM and not closed:
        raise InputError(
            f"method {CLOSED_FORM} is for runs with model.kind = {RIDGE!r}; this one has {view.spec.model.kind!r}. Use "
            "sifu or scratch"
        )
    return method


def register(method: type[Method]) -> None:
    """Add a method of your own, for this process (docs/new-method.md)."""
    METHOD_INFOS[method.info.name] = method.info
    METHODS[method.info.name] = method
