"""The site's pages that live elsewhere in the repository, and links that leave `docs`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_files(files: Files, config: Any) -> Files:
    """The README is the home page; CONTRIBUTING and CHANGELOG are pages, too."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        for other, target in PAGES.items():
            text = text.replace(f"]({other})", f"]({target})")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A link to a file that exists in the repository but is not on the site becomes its name; others stay, checked."""
    here = ROOT if page.file.src_uri in PAGES.values() else (ROOT / "docs" / page.file.src_uri).parent

    def name_it(link: re.Match[str]) -> str:
        target = (here / link[2].partition("#")[0]).resolve()
        outside = target.exists() and target.is_relative_to(ROOT) and not target.is_relative_to(ROOT / "docs")
        return f"`{target.relative_to(ROOT)}`" if outside and target.name not in PAGES else link[0]

    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^)\s:#][^)\s:]*)\)", name_it, markdown)
