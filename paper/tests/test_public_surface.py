"""The experiments use only the parts of the library that docs/api.md names."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "paper" / "src").rglob("*.py"))
ENTRIES = re.findall(r"^::: (\S+)((?:\n    .*)*)", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
DOCUMENTED = {name for name, _ in ENTRIES}
WITH_SUBMODULES = tuple(f"{name}." for name, options in ENTRIES if "show_submodules: true" in options)
MEMBERS = {
    name: {member.strip() for member in listed.group(1).split(",")}
    for name, options in ENTRIES
    if (listed := re.search(r"members: \[([^\]]*)\]", options))
}
"""Names that the page lists for a module, if it lists any."""


def private_imports(source: str) -> Iterator[str]:
    """Yield imports of undocumented modules, and of names that neither the page nor `__all__` lists."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("sifu."))
        if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] != "sifu":
            continue
        module = node.module or ""
        if module not in DOCUMENTED and not module.startswith(WITH_SUBMODULES):
            yield module
            continue
        if module == "sifu.engines.flower.virtual_nodes" and importlib.util.find_spec("flwr") is None:
            continue
        offered = MEMBERS.get(module) or getattr(importlib.import_module(module), "__all__", None)
        for alias in node.names:
            if (alias.name.startswith("_") and alias.name != "__version__") or (
                offered is not None and alias.name not in offered
            ):
                yield f"{module}.{alias.name}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_only_documented_names_of_the_library_are_imported_by(path: Path) -> None:
    assert sorted(set(private_imports(path.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    "source",
    [
        "from sifu.store.checkpoints import latest_checkpoint",
        "from sifu.store.files import read_plain",
        "from sifu.audit import lira",
        "from sifu.plots.style import _styled",
        "import sifu.store.reader",
        "def f():\n    from sifu.cli.runs import train",
    ],
)
def test_control_an_import_past_the_surface_is_seen(source: str) -> None:
    assert len(list(private_imports(source))) == 1
