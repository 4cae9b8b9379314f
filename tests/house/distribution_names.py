"""Search for texts that would make an installer fetch `sifu` from a package index, where the name belongs to another
project.
"""

from __future__ import annotations

import re
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

NOT_OURS = "sifu"
NOT_SEARCHED = {".git", ".bench", "build", "dist", "node_modules", "__pycache__"}
INSTALLED = re.compile(r"\b(?:pip3?|uv|pipx|conda)\b[^\n]*?\b(?:install|add)\b(?:\s+-\S+)*\s+[\"'`]?sifu(?![\w./-])")
"""Pattern of `pip install` and similar commands, with or without options and quotes, followed by the bare name."""
EXTRA = re.compile(r"(?<![\w./-])sifu\\*\[[a-z_,\s]+\\*\]")
"""Pattern of the name with extras in brackets, also with the backslashes of markup."""
PINNED = re.compile(r"[\"'`]sifu\s*(?:[<>=!~]=|@)")
"""Pattern of the name with a version or an address."""


def texts_below(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield name and text of every text file below a folder, except in virtual environments and caches."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or path.name in NOT_SEARCHED or path.name.endswith((".egg-info", "_cache")):
            continue
        if path.is_dir():
            if not (path / "pyvenv.cfg").exists():
                yield from ((f"{path.name}/{name}", text) for name, text in texts_below(path))
            continue
        try:
            yield path.name, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def texts_of_wheel(wheel: Path) -> Iterator[tuple[str, str]]:
    """Yield name and text of every text file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            try:
                yield name, archive.read(name).decode()
            except UnicodeDecodeError:
                continue


def mentions(texts: Iterator[tuple[str, str]]) -> list[str]:
    """Return every place that names the other project's package as something to install."""
    places = []
    for name, text in texts:
        places += [
            f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
            for pattern in (INSTALLED, EXTRA, PINNED)
            for match in pattern.finditer(text)
        ]
        if name.endswith("pyproject.toml"):
            places += [f"{name}: {text}" for text in requirements(tomllib.loads(text)) if is_not_ours(text)]
        if name.endswith("METADATA"):
            required = re.findall(r"^Requires-Dist: (.+)$", text, re.MULTILINE)
            places += [f"{name}: {text}" for text in required if is_not_ours(text)]
    return places


def requirements(project: Mapping[str, Any]) -> list[str]:
    """Return all dependencies in a pyproject.toml, including extras and build requirements."""
    section = project.get("project", {})
    extras = section.get("optional-dependencies", {})
    groups = [section.get("dependencies", []), project.get("build-system", {}).get("requires", []), *extras.values()]
    return [requirement for group in groups for requirement in group]


def is_not_ours(requirement: str) -> bool:
    """Return whether a requirement names the other project's package."""
    return Requirement(requirement).name.lower() == NOT_OURS
