"""What the package imports is what pyproject.toml declares, and the runtime dependencies are enough to import it."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# These packages of ours import an extra's package at their top, because they are of no use without it.
NEEDS_AN_EXTRA = ("sifu.flower", "sifu.engines.flower", "sifu.server", "sifu.console", "sifu.engines.sim.gpu")

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


def distribution(requirement: str) -> str:
    """The normalised name of the package that a requirement names."""
    return re.sub(r"[-_.]+", "-", Requirement(requirement).name).lower()


def declared(*extras: str) -> set[str]:
    """The packages that are declared for every user, or by these extras."""
    requirements = list(PROJECT["dependencies"])
    for extra in extras:
        requirements += PROJECT["optional-dependencies"][extra]
    return {distribution(requirement) for requirement in requirements}


def imported_packages(sources: Path) -> Iterator[tuple[str, str]]:
    """Each import of another package, as the file and the name, also those inside functions."""
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
    """Imports of packages that neither the runtime dependencies nor an extra for users declare."""
    allowed = declared(*(set(PROJECT["optional-dependencies"]) - {"dev", "docs"}))
    # Import names of what need not be installed for the tests; torch brings triton, flwr brings ray.
    allowed |= {"flwr", "ray", "triton", "mlflow", "pyarrow"}
    providers = importlib.metadata.packages_distributions()
    return {
        (file, package)
        for file, package in imported_packages(sources)
        if not {re.sub(r"[-_.]+", "-", name).lower() for name in [package, *providers.get(package, [])]} & allowed
    }


def test_every_import_is_declared() -> None:
    assert undeclared(SOURCES) == set()


def test_an_undeclared_import_is_noticed(tmp_path: Path) -> None:
    """The negative control: a package of the development extra alone."""
    (tmp_path / "module.py").write_text("def ready():\n    import hypothesis\n")
    assert undeclared(tmp_path) == {("module.py", "hypothesis")}


def runtime_closure() -> set[str]:
    """The runtime dependencies with everything that they need in turn."""
    closure: set[str] = set()
    waiting = [(name, frozenset[str]()) for name in declared()]
    while waiting:
        name, extras = waiting.pop()
        if name in closure:
            continue
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        closure.add(name)
        for text in requirements:
            requirement = Requirement(text)
            if requirement.marker is None or any(
                requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)
            ):
                waiting.append((distribution(text), frozenset(requirement.extras)))
    return closure


def test_every_module_is_imported_with_the_runtime_dependencies_alone(tmp_path: Path) -> None:
    """Whatever is missing then belongs to an extra, in a package that is of no use without it."""
    venv.create(tmp_path / "environment", with_pip=False)
    (packages,) = (tmp_path / "environment").glob("lib/python*/site-packages")
    for name in runtime_closure():
        files = importlib.metadata.distribution(name).files or []
        for top in {file.parts[0] for file in files} - {".."}:
            source = Path(str(importlib.metadata.distribution(name).locate_file(top)))
            if source.exists() and not (packages / top).exists():
                (packages / top).symlink_to(source)
    (packages / "sifu").symlink_to(SOURCES / "sifu")
    command = [str(tmp_path / "environment" / "bin" / "python"), "-I", "-c", IMPORT_ALL]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert answer.returncode == 0, answer.stderr
    missing = [line.split() for line in answer.stdout.splitlines()]
    assert missing, "the environment has more than the runtime dependencies: flwr or starlette was imported"
    assert [line for line in missing if not line[0].startswith(NEEDS_AN_EXTRA)] == []
    extras = {"flwr", "ray", "starlette", "uvicorn", "prometheus_client", "authlib", "httpx", "joserfc", "triton"}
    assert {line[1] for line in missing} <= extras
