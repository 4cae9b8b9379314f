"""Variables are named after what they hold: five names that fit anything are bound nowhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIT_ANYTHING = {"one", "found", "made", "asked", "known"}


def all_purpose_names(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of every assignment, loop or comprehension that binds a name that fits anything."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in FIT_ANYTHING:
            yield node.lineno, node.id


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks", "paper"])
def test_no_variable_has_a_name_that_fits_anything(folder: str) -> None:
    bound = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, name in all_purpose_names(path.read_text(encoding="utf-8"))
    ]
    assert not bound, "name these after what they hold:\n" + "\n".join(bound)


@pytest.mark.parametrize(
    "source", ["found = f(x)", "made: int = 3", "for one in rows: pass", "y = [one.x for one in rows]", "(known := 2)"]
)
def test_control_each_way_to_bind_one_is_seen(source: str) -> None:
    assert len(list(all_purpose_names(source))) == 1
