"""Every argument of the public functions and of the methods of their classes is named in its docstring."""

from __future__ import annotations

import inspect
import re

import pytest

import sifu
from sifu.api import LoadedModel

CLASSES = (sifu.Run, LoadedModel, sifu.ServerLoop)
INHERITED = "torch"


def public_functions() -> dict[str, object]:
    """Return the functions and classes in `import sifu`, and the public methods that sifu defines."""
    exported = {name: getattr(sifu, name) for name in sifu.__all__}
    functions = {name: value for name, value in exported.items() if callable(value) and not name.endswith("Error")}
    for owner in CLASSES:
        for name, method in inspect.getmembers(owner, inspect.isfunction):
            if not name.startswith("_") and not method.__module__.startswith(INHERITED):
                functions[f"{owner.__name__}.{name}"] = method
    return functions


def undocumented(function: object) -> list[str]:
    """Return the arguments of a function that its docstring does not name."""
    text = inspect.getdoc(function) or ""
    names = [name for name in inspect.signature(function).parameters if name != "self"]  # type: ignore[arg-type]
    return [name for name in names if not re.search(rf"\b{name}\b", text)]


@pytest.mark.parametrize("name", sorted(public_functions()))
def test_every_argument_is_named_in_the_docstring(name: str) -> None:
    assert undocumented(public_functions()[name]) == []


def test_control_an_argument_without_a_word_is_seen() -> None:
    def train(spec: str, rounds: int) -> None:
        """Train by a `spec`."""

    assert undocumented(train) == ["rounds"]
