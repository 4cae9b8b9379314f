"""Imports of the package against the dependencies in pyproject.toml; the runtime dependencies suffice to import it."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from runtime_environment import PROJECT, ROOT, declared, distribution, make_environment

SOURCES = ROOT / "src"
CONSOLE = {"sifu-console"} | {
    distribution(line)
    for line in tomllib.loads((ROOT / "console/pyproject.toml").read_text())["project"]["dependencies"]
}
"""What sifu-console may import besides the library's dependencies."""
# These packages import an extra's package at module level, because they are useless without it.
NEEDS_AN_EXTRA = (
    "sifu.audit.compare_releases",
    "sifu.audit.run_audit",
    "sifu.data.feature_maps.deep_network",
    "sifu.data.feature_maps.efficientnet",
    "sifu.data.feature_maps.fixed_networks",
    "sifu.data.feature_maps.transformer_networks",
    "sifu.data.own_modules",
    "sifu.engines",
    "sifu.export",
    "sifu.flower",
    "sifu.server",
)

IMPORT_ALL = """
import importlib, pkgutil, sifu
for module in pkgutil.walk_packages(sifu.__path__, "sifu.", onerror=lambda name: None):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        print(module.name, error.name.split(".")[0])
"""


def imported_packages(sources: Path) -> Iterator[tuple[str, str]]:
    """Yield the file and name of each import of another package, also inside functions."""
    for path in sorted(sources.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            for name in names:
                package = name.split(".")[0]
                if package not in sys.stdlib_module_names and package != "sifu":
                    yield path.name, package


def undeclared(sources: Path) -> set[tuple[str, str]]:
    """Return imports of packages that neither the runtime dependencies nor an extra for users declare."""
    allowed = CONSOLE if "console" in sources.parts else set()
    allowed |= declared(*(set(PROJECT["optional-dependencies"]) - {"dev", "docs"}))
    # Import names of packages that the tests do not need; flwr provides ray.
    allowed |= {"flwr", "ray", "pyarrow"}
    providers = importlib.metadata.packages_distributions()
    return {
        (file, package)
        for file, package in imported_packages(sources)
        if not {re.sub(r"[-_.]+", "-", name).lower() for name in [package, *providers.get(package, [])]} & allowed
    }


def test_every_import_is_declared() -> None:
    assert undeclared(SOURCES) == set()
    assert undeclared(ROOT / "console" / "src") == set()


def test_an_undeclared_import_is_noticed(tmp_path: Path) -> None:
    """Negative control: a package that only the development extra declares is noticed."""
    (tmp_path / "module.py").write_text("def ready():\n    import hypothesis\n")
    assert undeclared(tmp_path) == {("module.py", "hypothesis")}


def test_every_module_is_imported_with_the_runtime_dependencies_alone(tmp_path: Path) -> None:
    """Modules that fail to import with the runtime dependencies alone belong to packages that need an extra."""
    python = make_environment(tmp_path / "environment", declared(), SOURCES / "sifu")
    command = [str(python), "-I", "-c", IMPORT_ALL]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert answer.returncode == 0, answer.stderr
    missing = [line.split() for line in answer.stdout.splitlines()]
    assert missing, "the environment has more than the runtime dependencies: flwr was imported"
    assert [line for line in missing if not line[0].startswith(NEEDS_AN_EXTRA)] == []
    extras = {"flwr", "ray", "torch"}
    assert {line[1] for line in missing} <= extras
