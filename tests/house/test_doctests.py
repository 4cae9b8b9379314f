"""Doctests of the package: every example in a docstring is run."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import sifu

PACKAGE = Path(sifu.__file__).resolve().parent
OPTIONAL = ("flwr", "ray")
"""Packages that may be missing; modules that import them are then skipped."""


def modules_with_examples() -> list[str]:
    """Return the modules that contain examples, found by their text, so that others are not imported."""
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]
    names = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in paths]
    return [name.removesuffix(".__init__") for name in names]


@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_of(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in OPTIONAL:
            pytest.skip(f"{name} needs {error.name}, which is not installed")
        raise
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def test_there_are_examples() -> None:
    assert len(modules_with_examples()) > 20
