"""Writing the report: figures first, the page last, each file whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from sifu.errors import InputError
from sifu.report.collect import collect
from sifu.store.regular_files import private_folder

PAGE = "index.html"


def write_report(run_folder: str | Path, output: str | Path | None = None) -> Path:
    """One self-contained HTML page about a run, with the same figures as PNG and SVG files beside it.

    `output` is the page (`report.html`) or a folder for it; by default it is RUN/report/index.html. The run
    is only read, within one snapshot, so this also works while another process writes to it.
    """
    from sifu.plots.style import figure_bytes
    from sifu.report.figures import FIGURES
    from sifu.report.page import render_page

    data = collect(run_folder)
    page = page_path(Path(run_folder), None if output is None else Path(output))
    prefix = "" if page.name == PAGE else f"{page.stem}-"
    try:
        private_folder(page.parent, parents=True)
        drawings = {}
        for kind in FIGURES:
            figure = kind.draw(data)
            svg = figure_bytes(figure, "svg")
            drawings[kind.name] = svg.decode()
            _replace(page.parent / f"{prefix}{kind.name}.svg", svg)
            _replace(page.parent / f"{prefix}{kind.name}.png", figure_bytes(figure, "png"))
        _replace(page, render_page(data, drawings).encode("utf-8", "xmlcharrefreplace"))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InputError(
                f"no space left to write the report into {page.parent}: free some, or give another place"
            ) from error
        raise InputError(
            f"the report cannot be written to {page}: {error.strerror}; give another place for it"
        ) from error
    return page


def page_path(run_folder: Path, output: Path | None) -> Path:
    """Where the page goes: the file named, or index.html in the folder named."""
    if output is None:
        return run_folder / "report" / PAGE
    if output.is_dir() or output.suffix.lower() not in (".html", ".htm"):
        return output / PAGE
    return output


def _replace(path: Path, content: bytes) -> None:
    """Replace `path` by `content`, readable by the operator only, like the run itself."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
