"""Cached figures of the current model on held-out rows, in one small file.

`sifu status` shows them. No certificate depends on the file, so it is not part of the ledger and may be lost. A
rollback deletes it. When retraining ends, it is written again, without the held-out rows of forgotten clients.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sifu.core.held_out_figures import HeldOutFigures
from sifu.core.ledger import canonical_json
from sifu.store.files import read_plain, sync_folder, write_atomically

STANDING_FILE = "standing.json"


def write_held_out(folder: Path, node: int, figures: HeldOutFigures) -> None:
    """Cache the held-out figures of the model of `node`."""
    write_atomically(folder / STANDING_FILE, canonical_json({"node": node, "held_out": asdict(figures)}))


def read_held_out(folder: Path, node: int) -> HeldOutFigures | None:
    """Return the figures of the model of `node` on held-out rows, or None if there are none or they are invalid."""
    try:
        content = json.loads(read_plain(folder / STANDING_FILE))
        return _figures(content["held_out"]) if int(content["node"]) == node else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _figures(content: dict[str, Any]) -> HeldOutFigures:
    content = dict(content)
    positive = str(content.pop("positive", ""))
    figures = {name: None if value is None else float(value) for name, value in content.items()}
    rows = int(figures.pop("rows") or 0)
    if figures.get("accuracy") is None and figures.get("mean_squared_error") is None:
        raise ValueError("neither an accuracy nor a squared error")
    return HeldOutFigures(rows, **figures, positive=positive)


def remove_standing(folder: Path) -> None:
    """Delete the cached figures if they exist."""
    if (folder / STANDING_FILE).exists():
        (folder / STANDING_FILE).unlink()
        sync_folder(folder)
