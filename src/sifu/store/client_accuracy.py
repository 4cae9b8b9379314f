"""Cached accuracy of the current model, per client and on held-out rows, in one small file.

Plans use the file to compute how the accuracy changes when some clients are no longer counted. `sifu status` shows the
figures on held-out rows. No certificate depends on the file, so it is not part of the ledger and may be lost. A
rollback deletes the file. When retraining ends, the file is written again, without the forgotten clients and their
held-out rows. Without the file, plans assume that the model is equally accurate for all clients.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sifu.core.engine import Evaluation
from sifu.core.held_out_figures import HeldOutFigures
from sifu.core.ledger import canonical_json
from sifu.store.files import read_plain, sync_folder, write_atomically
from sifu.theory.arrays import Integers

STANDING_FILE = "standing.json"
COLUMNS = ("clients", "samples", "correct")


@dataclass(frozen=True)
class Standing:
    """Accuracy of the model of `node`: each client's number of samples and number of correct predictions."""

    node: int
    clients: Integers
    samples: Integers
    correct: Integers
    held_out: HeldOutFigures | None = None

    def gain_without(self, leaving: set[int]) -> float:
        """Return the increase in accuracy if the clients `leaving` are not counted, or 0 if no samples remain."""
        stays = ~np.isin(self.clients, list(leaving))
        total, left = int(self.samples.sum()), int(self.samples[stays].sum())
        if left == 0:
            return 0.0
        return float(self.correct[stays].sum()) / left - float(self.correct.sum()) / total


def write_standing(folder: Path, node: int, evaluation: Evaluation) -> None:
    """Replace the cached accuracy with an evaluation of the model of `node`."""
    columns = {name: getattr(evaluation, name).tolist() for name in COLUMNS}
    write_atomically(folder / STANDING_FILE, canonical_json({"node": node} | columns))


def write_held_out(folder: Path, node: int, figures: HeldOutFigures) -> None:
    """Cache the held-out figures of the model of `node`; drop cached accuracies that belong to another model."""
    before = read_standing(folder)
    same = before is not None and before.node == node
    columns = {name: getattr(before, name).tolist() if same else [] for name in COLUMNS}
    content = {"node": node, "held_out": asdict(figures)} | columns
    write_atomically(folder / STANDING_FILE, canonical_json(content))


def read_held_out(folder: Path, node: int) -> HeldOutFigures | None:
    """Return the figures of the model of `node` on held-out rows, or None."""
    standing = read_standing(folder)
    return standing.held_out if standing is not None and standing.node == node else None


def read_standing(folder: Path) -> Standing | None:
    """Return the cached accuracy, or None if there is none or it is invalid."""
    try:
        content = json.loads(read_plain(folder / STANDING_FILE))
        columns = [np.array(content[name], dtype=np.int64) for name in COLUMNS]
        clients, samples, correct = columns
        held_out = None if content.get("held_out") is None else _figures(content["held_out"])
        standing = Standing(int(content["node"]), clients, samples, correct, held_out)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    if {column.shape for column in columns} != {(clients.size,)} or np.any(correct < 0) or np.any(correct > samples):
        return None
    return standing


def _figures(content: dict[str, Any]) -> HeldOutFigures:
    content = dict(content)
    positive = str(content.pop("positive", ""))
    figures = {name: None if value is None else float(value) for name, value in content.items()}
    rows = int(figures.pop("rows") or 0)
    if figures.get("accuracy") is None and figures.get("mean_squared_error") is None:
        raise ValueError("neither an accuracy nor a squared error")
    return HeldOutFigures(rows, **figures, positive=positive)


def remove_standing(folder: Path) -> None:
    """Delete the cached accuracy if it exists."""
    if (folder / STANDING_FILE).exists():
        (folder / STANDING_FILE).unlink()
        sync_folder(folder)
