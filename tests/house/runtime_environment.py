"""Environment with only the runtime dependencies, made of links to the packages installed here."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
import venv
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def distribution(requirement: str) -> str:
    """Return the normalised name of the package that a requirement names."""
    return re.sub(r"[-_.]+", "-", Requirement(requirement).name).lower()


def declared(*extras: str) -> set[str]:
    """Return the packages declared for every user and those declared by these extras."""
    requirements = list(PROJECT["dependencies"])
    for extra in extras:
        requirements += PROJECT["optional-dependencies"][extra]
    return {distribution(requirement) for requirement in requirements}


def closure_of(names: set[str]) -> set[str]:
    """Return packages with all their direct and indirect dependencies."""
    closure: set[str] = set()
    waiting = [(name, frozenset[str]()) for name in names]
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


def make_environment(folder: Path, names: set[str], *sources: Path) -> Path:
    """Make an environment of packages, their dependencies, and folders of sifu's sources.

    Args:
        folder: Folder for the environment.
        names: The packages, normalised.
        sources: Folders of packages of this repository.

    Returns:
        Path of its Python interpreter.

    """
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in closure_of(names):
        files = importlib.metadata.distribution(name).files or []
        for top in {file.parts[0] for file in files} - {".."}:
            source = Path(str(importlib.metadata.distribution(name).locate_file(top)))
            if source.exists() and not (packages / top).exists():
                (packages / top).symlink_to(source)
    for source in sources:
        (packages / source.name).symlink_to(source)
    return folder / "bin" / "python"
