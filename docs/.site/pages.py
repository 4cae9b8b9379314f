"""The site's pages that live elsewhere in the repository, and links that leave `docs`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "paper" / "results"
ELSEWHERE = {
    ROOT / "README.md": "start.md",
    ROOT / "CONTRIBUTING.md": "contributing.md",
    ROOT / "CHANGELOG.md": "changelog.md",
    ROOT / "SECURITY.md": "security-policy.md",
    ROOT / "console" / "README.md": "console.md",
    ROOT / "verifier" / "README.md": "verifier.md",
} | {
    path: f"results/{path.relative_to(RESULTS).as_posix()}"
    for path in sorted(RESULTS.rglob("*"))
    if path.suffix in (".md", ".png", ".csv")
}
"""Files outside `docs` that are on the site, and where."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages above `docs`, the READMEs of console and verifier, and the results to the site."""
    for path, uri in ELSEWHERE.items():
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links go where their file is on the site; that to a file which is not on it becomes its name."""
    uri = page.file.src_uri
    source = next((path for path, other in ELSEWHERE.items() if other == uri), ROOT / "docs" / uri)

    def translated(link: re.Match[str]) -> str:
        address, _, anchor = link[2].partition("#")
        target = (source.parent / address).resolve()
        if not target.exists() or not target.is_relative_to(ROOT):
            return link[0]  # mkdocs reports it
        if target.is_relative_to(ROOT / "docs"):
            there = target.relative_to(ROOT / "docs").as_posix()
        elif target in ELSEWHERE:
            there = ELSEWHERE[target]
        else:
            return f"`{target.relative_to(ROOT)}`"
        return f"{link[1]}({os.path.relpath(there, os.path.dirname(uri))}{'#' if anchor else ''}{anchor})"

    return re.sub(r"(!?\[[^\]]*\])\(([^)\s:#][^)\s:]*)\)", translated, markdown)
