"""Public data sets by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def load(name: str, folder: Path | None = None) -> Any:
    from sifu.data.digits import read_digits
    from sifu_paper.data.public import read_public

    return read_digits() if name == "digits" else read_public(name, folder, "content")
