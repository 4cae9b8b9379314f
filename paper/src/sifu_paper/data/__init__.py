"""Public data sets by name."""

from __future__ import annotations

from pathlib import Path

from sifu.data import Dataset
from sifu.data.digits import read_digits
from sifu_paper.data.public import read_public


def load(name: str, folder: Path | None = None) -> Dataset:
    """Return a data set of images, from files in `folder` or the default folders."""
    return read_digits() if name == "digits" else read_public(name, folder, "content")
